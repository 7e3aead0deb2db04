"""Learning rate schedules as pure functions of the step, shared by all frameworks.

``step`` counts from 0. The submissions count the next update, from 1 (MXNet's Optimizer.num_update, and
LearningRateScheduler in NVIDIA's v0.7 DLRM), so that the first step has a nonzero rate and the last step the end
value. All schedules start with a linear warm-up (Goyal et al. 2017, arXiv 1706.02677, section 2.2).
"""

from typing import Sequence


def warmup_factor(step: int, warmup_steps: int) -> float:
    """Return the linear warm-up factor of the base learning rate at ``step``, in (0, 1]."""
    if step + 1 >= warmup_steps:
        return 1.0
    return (step + 1) / warmup_steps


def decay_factor(step: int, start: int, steps: int, power: float) -> float:
    """Return (1 - progress) ** power for a decay over ``steps`` updates after ``start`` updates."""
    progress = max(0.0, (step + 1 - start) / max(1, steps))
    return float((1.0 - min(1.0, progress)) ** power)


def polynomial(step: int, *, base: float, end: float, warmup_steps: int, total_steps: int, power: float) -> float:
    """Warm up to ``base``, then decay to ``end`` at the last of ``total_steps`` along (1 - progress) ** power.

    With power 2 this is PolySchedule, "pow2", of NVIDIA's ResNet submissions since v0.6 (common/fit.py;
    lars_opt_learning_rate_decay_poly_power in the logs; You et al. 2017, arXiv 1708.03888).
    """
    if step + 1 <= warmup_steps:
        return base * warmup_factor(step, warmup_steps)
    return end + (base - end) * decay_factor(step, warmup_steps, total_steps - warmup_steps, power)


def stepwise(step: int, *, base: float, factor: float, warmup_steps: int, boundaries: Sequence[int]) -> float:
    """Warm up to ``base``, then multiply by ``factor`` at each boundary (in steps).

    Schedule of the v0.5 ResNet submissions: factor 0.1 after 30, 60 and 80 epochs (MXNet's MultiFactorScheduler).
    """
    passed = sum(step >= boundary for boundary in boundaries)
    return base * warmup_factor(step, warmup_steps) * factor**passed
