"""A run that is stopped within a step of many parts resumes there: its log and losses are those of a whole run."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.run.run import Run
from tests.benchmarks.loop import FRAMEWORK, WORDING, Config, every_two_steps, handlers, keys
from tests.conftest import records

__all__ = ["handlers"]
PARTS = 8


class Training:
    """Steps of PARTS parts; a part's loss is its number over the whole run."""

    def __init__(self, output: Path) -> None:
        self.run = Run(Config({"accuracy": 0.5}), FRAMEWORK, Path("data"), output, WORDING)
        saved = self.run.saved
        self.step, self.parts, self.loss = (int(saved.get(name, 0)) for name in ("step", "parts", "loss"))

    def train_step(self, stop: tuple[int, int] | None) -> float | None:
        """As benchmarks/bert/pytorch/train.py has it."""
        for part in self.run.interruptible(range(self.parts, PARTS)):
            self.loss += self.step * PARTS + part
            self.parts += 1
            if stop == (self.step, part):
                signal.raise_signal(signal.SIGTERM)
        if self.parts < PARTS:
            return None
        found, self.loss, self.parts = float(self.loss), 0, 0
        self.step += 1
        return found

    def go(self, stop: tuple[int, int] | None = None) -> str:
        run = self.run
        with run.initialization():
            run.log({"global_batch_size": 4})
        with run.timed(every_two_steps(2)):
            run.register_state(lambda: {"step": self.step}, lambda: {"parts": self.parts, "loss": self.loss})
            for _ in run.blocks():
                for step in run.steps():
                    assert step == self.step
                    run.report(self.train_step(stop), 0.5)
                if run.evaluates():
                    run.evaluated({"accuracy": 0.0})
        assert run.finish() == 0
        return str(records(run.output / "metrics.jsonl", "end")[-1]["outcome"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("whole")
    assert Training(folder).go() == "not_reached"
    yield folder


@pytest.mark.parametrize("step", [0, 1, 2, 3, 5], ids=["first", "second", "evaluated", "of another epoch", "last"])
@pytest.mark.parametrize("part", [0, 3, 6])
def test_a_run_resumes_in_the_middle_of_a_step(tmp_path: Path, whole: Path, step: int, part: int) -> None:
    first = Training(tmp_path)
    assert first.go((step, part)) == "interrupted"
    # What the ranks vote is read two parts later; behind the last part in an evaluation, at an epoch's end or in the
    # next step.
    after = part + 3
    next_step = (step + 1, 3 if step == 0 else 0)
    assert (first.step, first.parts) == ((step, after) if after < PARTS else next_step)
    assert first.run.position == first.step
    assert Training(tmp_path).go() == "not_reached"
    assert keys(tmp_path) == keys(whole)
    found, expected = (
        [each["loss"] for each in records(folder / "metrics.jsonl", "step")] for folder in (tmp_path, whole)
    )
    assert found == expected == [float(sum(range(begin, begin + PARTS))) for begin in range(0, 6 * PARTS, PARTS)]


def test_a_run_is_stopped_twice_in_the_same_step(tmp_path: Path, whole: Path) -> None:
    assert Training(tmp_path).go((0, 0)) == "interrupted"
    second = Training(tmp_path)
    assert second.parts == 3
    assert second.go((0, 3)) == "interrupted"
    assert (second.step, second.parts) == (0, 6)
    assert Training(tmp_path).go() == "not_reached"
    assert keys(tmp_path) == keys(whole)
