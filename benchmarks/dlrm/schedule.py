"""The learning rate of DLRM at each step, the same in every framework."""

from __future__ import annotations

from typing import Any

from benchmarks.common.schedules import warmup_factor


def learning_rate(config: Any, step: int) -> float:
    """Warm up from 0, stay, and decay from ``decay_start_step`` over ``decay_steps`` to the end value.

    The decay is base * (1 - progress) ** power, as in the v0.7 submissions; ``step`` counts from 0 over the whole
    run.
    """
    if config.decay_steps == 0 or step < config.decay_start_step:
        return config.learning_rate * warmup_factor(step, config.warmup_steps)
    progress = min(1.0, (step - config.decay_start_step) / config.decay_steps)
    return max(config.end_learning_rate, config.learning_rate * (1.0 - progress) ** config.decay_power)
