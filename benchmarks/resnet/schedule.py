"""The learning rate of ResNet at each step, the same in every framework."""

from __future__ import annotations

from typing import Any

from benchmarks.common.run import schedules


def learning_rate(config: Any, step: int, steps_per_epoch: int) -> float:
    """Learning rate of ``step`` (counted from 0) by config.schedule; see benchmarks/common/run/schedules.py."""
    base, warmup = config.learning_rate, int(config.warmup_epochs * steps_per_epoch)
    if config.schedule == "pow2":
        end, total = config.end_learning_rate, config.epochs * steps_per_epoch
        return schedules.polynomial(step, base=base, end=end, warmup_steps=warmup, total_steps=total, power=2.0)
    drops = [epoch * steps_per_epoch for epoch in config.decay_epochs]
    return schedules.stepwise(step, base=base, factor=config.decay_factor, warmup_steps=warmup, boundaries=drops)
