"""The learning rate of BERT pretraining at each step, the same in every framework."""

from __future__ import annotations

from typing import Any


def learning_rate(config: Any, step: int) -> float:
    """Warm up linearly, then decay to 0 at ``max_steps``; ``step`` counts from 0 over the whole run.

    As LinearWarmupPolyDecayScheduler of NVIDIA's v0.7 submission has it (schedulers.py), which counts the first step
    as 1: the decay is that of the whole run, so that the rate falls by a step at the end of the warm-up.
    """
    number = step + 1
    warmed_up = number - config.start_warmup_step
    if warmed_up < config.warmup_steps:
        return float(config.learning_rate * warmed_up / config.warmup_steps)
    return float(config.learning_rate * (1 - min(number / config.max_steps, 1.0)) ** config.decay_power)
