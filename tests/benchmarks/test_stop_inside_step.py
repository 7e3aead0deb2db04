"""A run that is stopped within a step of many parts, as those of BERT, continues there."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import loop
from tests.benchmarks.loop import every_two_steps, keys, signal_handlers
from tests.conftest import records

__all__ = ["signal_handlers"]
PARTS = 8


class Training(loop.Training):
    """The loss of a part is its number in the run; the run is stopped in part ``stop`` of a step."""

    def __init__(self, output: Path) -> None:
        super().__init__(output, every_two_steps(2), {"accuracy": 0.5})
        self.parts, self.loss = (int(self.run.saved.get(name, 0)) for name in ("parts", "loss"))
        self.stop: tuple[int, int] | None = None

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"weight": self.weight}, {"parts": self.parts, "loss": self.loss}

    def train_step(self, step: int) -> float | None:
        for part in self.run.interruptible(range(self.parts, PARTS)):
            self.loss += step * PARTS + part
            self.parts += 1
            if self.stop == (step, part):
                signal.raise_signal(signal.SIGTERM)
        if self.parts < PARTS:
            return None
        loss, self.loss, self.parts = float(self.loss), 0, 0
        self.weight += 1
        return loss


def train(output: Path, *stop: int) -> tuple[str, int, int]:
    # Returns the outcome with the step and the part where the training ended
    training = Training(output)
    training.stop = stop or None  # type: ignore[assignment]
    return training.go(lambda weight: {"accuracy": 0.0}), training.weight, training.parts


@pytest.mark.parametrize(
    "stops",
    # In the first, the second, an evaluated, the second epoch's and the last step; twice in the same step
    [*([(step, part)] for step in (0, 1, 2, 3, 5) for part in (0, 3, 6)), [(0, 0), (0, 3)]],
    ids=str,
)
def test_run_resumes_in_the_middle_of_a_step(tmp_path: Path, stops: list[tuple[int, int]]) -> None:
    for step, part in stops:
        # The votes of the ranks are read two parts later; after the last part, that is in the evaluation or next step
        end = (step, part + 3) if part + 3 < PARTS else (step + 1, 3 if step == 0 else 0)
        assert train(tmp_path, step, part) == ("interrupted", *end)
    for folder in (tmp_path, tmp_path / "reference"):
        assert train(folder) == ("not_reached", 6, 0)
    losses = [record["loss"] for record in records(tmp_path / "metrics.jsonl", "step")]
    # Sums of 0 to 7, 8 to 15 and so on
    assert (losses, keys(tmp_path)) == ([28.0, 92.0, 156.0, 220.0, 284.0, 348.0], keys(tmp_path / "reference"))
