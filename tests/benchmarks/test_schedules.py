"""Learning rates against values worked out by hand, and the blocks of epochs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.resnet import schedule


def config(**changes: Any) -> SimpleNamespace:
    values = {
        "schedule": "pow2",
        "learning_rate": 8.0,
        "end_learning_rate": 0.5,
        "warmup_epochs": 2.0,
        "epochs": 10,
        "decay_epochs": (4, 6),
        "decay_factor": 0.1,
        "eval_period": 4,
        "eval_offset": 0,
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0.0), (10, 4.0), (19, 7.6), (20, 8.0), (60, 0.5 + 7.5 * 0.25), (100, 0.5), (120, 0.5)],
)
def test_pow2(step: int, rate: float) -> None:
    assert schedule.learning_rate(config(), step, 10) == pytest.approx(rate)


@pytest.mark.parametrize(("step", "rate"), [(0, 0.0), (10, 4.0), (39, 8.0), (40, 0.8), (60, 0.08), (99, 0.08)])
def test_step(step: int, rate: float) -> None:
    assert schedule.learning_rate(config(schedule="step"), step, 10) == pytest.approx(rate)


def test_no_warmup_starts_at_the_base_rate() -> None:
    assert schedule.learning_rate(config(warmup_epochs=0), 0, 10) == 8.0
