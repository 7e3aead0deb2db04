"""The learning rate of Mask R-CNN at each step, the same in every framework."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any


def learning_rate(config: Any, step: int) -> float:
    """Climb by ``warmup_factor`` a step to the base value, then multiply by ``decay_factor`` at each of decay_steps.

    As WarmupMultiStepLR with the method "mlperf_linear" of NVIDIA's submissions has it
    (maskrcnn/implementations/pytorch/maskrcnn_benchmark/solver/lr_scheduler.py); with ``warmup_factor`` 0 the climb is
    linear from a third of the base value, as maskrcnn_benchmark's own "linear". ``step`` counts from 0 over the run.
    """
    rate = float(config.learning_rate) * config.decay_factor ** bisect_right(config.decay_steps, step)
    if step >= config.warmup_steps:
        return rate
    left = config.warmup_steps - step
    if config.warmup_factor == 0:
        return rate * (1 - left / config.warmup_steps * 2 / 3)
    below = left * config.warmup_factor
    return rate * (1 - below / config.learning_rate)
