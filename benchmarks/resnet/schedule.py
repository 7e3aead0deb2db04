"""The learning rate of ResNet at each step, the same in every framework."""

from __future__ import annotations

from typing import Any

from benchmarks.common import schedules


def learning_rate(config: Any, step: int, steps_per_epoch: int) -> float:
    """Learning rate of ``step`` (counted from 0) by config.schedule; see benchmarks/common/schedules.py."""
    warmup_steps = int(config.warmup_epochs * steps_per_epoch)
    if config.schedule == "pow2":
        return schedules.polynomial(
            step,
            base=config.learning_rate,
            end=config.end_learning_rate,
            warmup_steps=warmup_steps,
            total_steps=config.epochs * steps_per_epoch,
            power=2.0,
        )
    return schedules.stepwise(
        step,
        base=config.learning_rate,
        factor=config.decay_factor,
        warmup_steps=warmup_steps,
        boundaries=[epoch * steps_per_epoch for epoch in config.decay_epochs],
    )
