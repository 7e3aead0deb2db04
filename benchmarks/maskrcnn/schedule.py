"""The learning rates of Mask R-CNN at each step, the same in every framework."""

from bisect import bisect_right
from typing import Any, NamedTuple

BIAS_FACTOR = 2.0  # of the base value for biases (SOLVER.BIAS_LR_FACTOR)


class Rates(NamedTuple):
    weights: float
    biases: float


def rates(config: Any, step: int) -> Rates:
    """Return the rates of ``step``, which counts from 0 over the run; see ``learning_rate``."""
    base = float(config.learning_rate)
    return Rates(learning_rate(config, step, base), learning_rate(config, step, BIAS_FACTOR * base))


def learning_rate(config: Any, step: int, base: float) -> float:
    """Rise by ``warmup_factor`` a step to ``base``, then multiply by ``decay_factor`` at each of decay_steps.

    As WarmupMultiStepLR with the method "mlperf_linear" of NVIDIA's submissions has it
    (maskrcnn/implementations/pytorch/maskrcnn_benchmark/solver/lr_scheduler.py; v0.5: utils/lr_scheduler.py). What is
    left of the warm-up is subtracted from each base value, not a share of it: biases begin at half of theirs where
    weights begin at 0. With ``warmup_factor`` 0 the warm-up is linear from a third of the base value, as
    maskrcnn_benchmark's own "linear".
    """
    left = max(0, config.warmup_steps - step)
    if config.warmup_factor > 0:
        base -= left * config.warmup_factor
    elif left:
        base *= 1 - left / config.warmup_steps * 2 / 3
    return float(base * config.decay_factor ** bisect_right(config.decay_steps, step))
