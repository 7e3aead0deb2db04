"""The learning rate of DLRM at each step, the same in every framework."""

from __future__ import annotations

from typing import Any

from benchmarks.common.run.schedules import decay_factor, warmup_factor


def learning_rate(config: Any, step: int) -> float:
    """Warm up, stay, and decay after ``decay_start_step`` steps over ``decay_steps`` to the end value.

    As LearningRateScheduler of NVIDIA's v0.7 submission has it (dlrm/implementations/pytorch/scripts/utils.py);
    ``step`` counts from 0 over the whole run.
    """
    base = config.learning_rate * warmup_factor(step, config.warmup_steps)
    if config.decay_steps == 0 or step < config.decay_start_step:
        return float(base)
    factor = decay_factor(step, config.decay_start_step, config.decay_steps, config.decay_power)
    return max(config.end_learning_rate, config.learning_rate * factor)
