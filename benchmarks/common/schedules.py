"""Learning rate schedules as pure functions of the step, the same for every framework.

All of them start with a linear warm-up from 0 (Goyal et al. 2017, arXiv 1706.02677, section 2.2).
"""

from __future__ import annotations

from typing import Sequence


def warmup_factor(step: int, warmup_steps: int) -> float:
    """Return the share of the base learning rate at ``step`` (counted from 0) of a linear warm-up, in [0, 1]."""
    if warmup_steps <= 0 or step >= warmup_steps:
        return 1.0
    return step / warmup_steps


def polynomial(step: int, *, base: float, end: float, warmup_steps: int, total_steps: int, power: float) -> float:
    """Warm up to ``base``, then decay to ``end`` at ``total_steps`` along (1 - progress) ** power.

    With power 2 this is the "pow2" schedule of the v0.6 and v0.7 ResNet submissions
    (lars_opt_learning_rate_decay_poly_power in the logs; You et al. 2017, arXiv 1708.03888).
    """
    if step < warmup_steps:
        return base * warmup_factor(step, warmup_steps)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return end + (base - end) * (1.0 - progress) ** power


def stepwise(step: int, *, base: float, factor: float, warmup_steps: int, boundaries: Sequence[int]) -> float:
    """Warm up to ``base``, then multiply by ``factor`` at each of the ``boundaries`` (in steps).

    The schedule of the v0.5 ResNet submissions: factor 0.1 at epochs 30, 60 and 80.
    """
    passed = sum(step >= boundary for boundary in boundaries)
    return base * warmup_factor(step, warmup_steps) * factor**passed
