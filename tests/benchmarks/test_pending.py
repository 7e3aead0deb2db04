"""Evaluations that end while training continues, without a framework: lines, agreement, checkpoints, failures."""

import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.common.run import timeline as timelines
from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.timeline import Timeline
from tests.benchmarks.loop import START, Training, handlers, keys, stop_at
from tests.conftest import records

__all__ = ["handlers"]
EPOCHS, STEPS = 4, 5
SSD = Wording("ssd", accuracy_first=True)


@pytest.fixture(autouse=True)
def evaluators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pause between two looks at an evaluator, which every run closes, and lets finish unless it was interrupted."""
    monkeypatch.setattr("benchmarks.common.run.run.pause", lambda: None)
    Evaluator.made.clear()
    yield
    assert all(each.closed for each in Evaluator.made)
    assert Evaluator.made[-1].finished


class Evaluator:
    """Has the oldest result at the last of ``polls`` looks; its files are those of the run's folder."""

    made: ClassVar[list["Evaluator"]] = []

    def __init__(self, folder: Path, quality: Callable[[int], float], polls: int) -> None:
        self._folder, self._quality, self._polls = folder / "found", quality, polls
        self._left, self._queue = polls, list[int]()
        self.fails_at = 0
        self.closed = self.finished = False
        self.made.append(self)

    def open(self) -> None:
        self._folder.mkdir(exist_ok=True)

    def start(self, epoch: int, found: int) -> None:
        (self._folder / str(epoch)).write_text(str(found), encoding="ascii")
        self.again(epoch)

    def again(self, epoch: int) -> None:
        assert (self._folder / str(epoch)).read_text(encoding="ascii") == str(STEPS * epoch)
        self._queue.append(epoch)

    def poll(self) -> Mapping[str, float] | None:
        if self._queue[0] == self.fails_at:
            raise Problem("the evaluator was killed", "", "resume the run")
        self._left -= 1
        if self._left > 0:
            return None
        self._left = self._polls
        return {"map": self._quality(self._queue.pop(0))}

    def keep(self, epochs: set[int]) -> None:
        for path in self._folder.iterdir():
            if int(path.name) not in epochs:
                path.unlink()

    def finish(self) -> None:
        self.finished = True

    def close(self) -> None:
        self.closed = True


def by_epochs(concurrently: bool = True, interval: int = 0, stops: bool = True) -> Timeline:
    config = SimpleNamespace(epochs=EPOCHS, checkpoint_interval=interval)
    return timelines.by_epochs(config, STEPS, lambda epoch: True, stops, concurrently)


def start(output: Path, timeline: Timeline, quality: Callable[[int], float], polls: int) -> Training:
    """A training whose evaluator is given the number of steps after each epoch."""
    return Training(output, timeline, {"map": 0.5}, SSD, Evaluator(output, quality, polls))


def low(epoch: int) -> float:
    return epoch / 100


def results(folder: Path) -> list[tuple[int, float]]:
    return [(each["epoch"], each["qualities"]["map"]) for each in records(folder / "metrics.jsonl", "eval")]


def test_training_continues_and_the_result_comes_later(tmp_path: Path) -> None:
    """As in the submitted logs of Mask R-CNN: the block ends before its evaluation."""
    assert start(tmp_path, by_epochs(), low, polls=2).go() == "not_reached"
    assert keys(tmp_path) == [
        *START,
        *("+block_start 1x1", "+epoch_start 1", "-epoch_stop 1", "-block_stop 1", "+eval_start 1"),
        *("+block_start 2x1", "+epoch_start 2", "eval_accuracy 1", "-eval_stop 1"),
        *("-epoch_stop 2", "-block_stop 2", "+eval_start 2"),
        *("+block_start 3x1", "+epoch_start 3", "eval_accuracy 2", "-eval_stop 2"),
        *("-epoch_stop 3", "-block_stop 3", "+eval_start 3"),
        *("+block_start 4x1", "+epoch_start 4", "eval_accuracy 3", "-eval_stop 3"),
        *("-epoch_stop 4", "-block_stop 4", "+eval_start 4", "eval_accuracy 4", "-eval_stop 4", "-run_stop"),
    ]
    assert results(tmp_path) == [(epoch, low(epoch)) for epoch in range(1, EPOCHS + 1)]


@pytest.mark.parametrize(
    ("polls", "steps", "end"),
    [
        # Two steps after the result, when all ranks know of it.
        (1, 8, ["+eval_start 1", "+block_start 2x1", "+epoch_start 2", "eval_accuracy 1", "-eval_stop 1", "-run_stop"]),
        # Instead of the next evaluation.
        (
            6,
            10,
            ["+block_start 2x1", "+epoch_start 2", "-epoch_stop 2", "eval_accuracy 1", "-eval_stop 1", "-run_stop"],
        ),
    ],
)
def test_the_run_ends_at_the_evaluation_that_reached_the_targets(
    tmp_path: Path, polls: int, steps: int, end: list[str]
) -> None:
    training = start(tmp_path, by_epochs(), lambda epoch: 0.5, polls)
    assert training.go() == "reached"
    assert training.weight == steps
    assert keys(tmp_path)[-6:] == end
    assert results(tmp_path) == [(1, 0.5)]
    assert '"status": "success"' in (tmp_path / "result.txt").read_text(encoding="utf-8")


def test_an_evaluation_begins_when_the_one_before_it_has_ended(tmp_path: Path) -> None:
    """Or the checker of v0.6 refuses the log."""
    assert start(tmp_path, by_epochs(), lambda epoch: 0.5 if epoch == 2 else 0.1, polls=40).go() == "reached"
    assert results(tmp_path) == [(1, 0.1), (2, 0.5)]
    lines = [line for line in keys(tmp_path) if "eval" in line]
    assert lines == [line for n in (1, 2) for line in (f"+eval_start {n}", f"eval_accuracy {n}", f"-eval_stop {n}")]


@pytest.mark.parametrize("polls", [1, 40])
def test_a_run_that_is_not_to_stop_has_all_results(tmp_path: Path, polls: int) -> None:
    assert start(tmp_path, by_epochs(stops=False), lambda epoch: 0.6, polls).go() == "reached"
    assert results(tmp_path) == [(epoch, 0.6) for epoch in range(1, EPOCHS + 1)]


def test_an_evaluation_that_is_waited_for_has_the_lines_of_any_other(tmp_path: Path) -> None:
    training = start(tmp_path, by_epochs(concurrently=False), lambda epoch: 0.5 if epoch == 2 else 0.1, polls=3)
    assert training.go() == "reached"
    assert keys(tmp_path)[len(START) :] == [
        *("+block_start 1x1", "+epoch_start 1", "-epoch_stop 1"),
        *("+eval_start 1", "eval_accuracy 1", "-eval_stop 1", "-block_stop 1"),
        *("+block_start 2x1", "+epoch_start 2", "-epoch_stop 2"),
        *("+eval_start 2", "eval_accuracy 2", "-eval_stop 2", "-block_stop 2", "-run_stop"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("concurrently", [True, False])
@pytest.mark.parametrize("polls", [1, 4, 40])
@pytest.mark.parametrize("place", [*((None, step) for step in range(0, EPOCHS * STEPS, 3)), (0, None), (3, None)])
def test_a_stopped_run_loses_no_evaluation(
    tmp_path: Path, concurrently: bool, polls: int, place: tuple[int | None, int | None]
) -> None:
    batch, step = place
    begin = partial(start, timeline=by_epochs(concurrently), quality=low, polls=polls)
    first = begin(tmp_path)
    assert first.go(None, stop_at(step), stop_at(batch)) == "interrupted"
    assert not first.evaluator.finished
    second = begin(tmp_path)
    assert second.weight == first.weight
    assert second.go() == "not_reached"
    assert results(tmp_path) == [(epoch, low(epoch)) for epoch in range(1, EPOCHS + 1)]
    lines = keys(tmp_path)
    # Where the lines of a result are depends on when it came.
    once = tmp_path / "once"
    begin(once).go()
    assert sorted(lines) == sorted(keys(once))
    for epoch in range(1, EPOCHS + 1):
        begun, ended = lines.index(f"+eval_start {epoch}"), lines.index(f"-eval_stop {epoch}")
        assert begun < lines.index(f"eval_accuracy {epoch}") < ended


def test_a_run_is_stopped_while_it_waits_for_the_last_result(tmp_path: Path) -> None:
    training = start(tmp_path, by_epochs(), low, polls=1000)
    polled, poll = [], training.evaluator.poll

    def stop_after_training() -> Any:
        if training.weight == EPOCHS * STEPS:
            polled.append(True)
            if len(polled) == 20:
                signal.raise_signal(signal.SIGTERM)
        return poll()

    training.evaluator.poll = stop_after_training  # type: ignore[method-assign]
    assert training.go() == "interrupted"
    again = start(tmp_path, by_epochs(), low, polls=2)
    assert again.weight == EPOCHS * STEPS
    assert again.go() == "not_reached"
    assert results(tmp_path) == [(epoch, low(epoch)) for epoch in range(1, EPOCHS + 1)]


def test_a_run_killed_after_it_reached_its_targets_ends_when_it_is_resumed(tmp_path: Path) -> None:
    """A checkpoint between the result and the end of the run, as of an epoch that ends there."""
    training = start(tmp_path, by_epochs(), lambda epoch: 0.5, polls=1)

    def die(step: int) -> None:
        if training.run._reached:
            training.run._save()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.go(None, die)
    again = start(tmp_path, by_epochs(), lambda epoch: 0.1, polls=1)
    assert again.go() == "reached"
    assert results(tmp_path) == [(1, 0.5)]


@pytest.mark.parametrize("concurrently", [True, False])
@pytest.mark.parametrize("fails_at", [1, EPOCHS])
def test_an_evaluator_that_fails_ends_the_run_and_loses_nothing(
    tmp_path: Path, concurrently: bool, fails_at: int
) -> None:
    first = start(tmp_path, by_epochs(concurrently), low, polls=2)
    first.evaluator.fails_at = fails_at
    with pytest.raises(SystemExit, match=r"the evaluator was killed\n  hint: resume the run"):
        first.go()
    assert "run_stop" not in (tmp_path / "result.txt").read_text(encoding="utf-8")
    assert not records(tmp_path / "metrics.jsonl", "end")
    second = start(tmp_path, by_epochs(concurrently), low, polls=2)
    assert second.weight == first.weight
    assert second.go() == "not_reached"
    assert results(tmp_path) == [(epoch, low(epoch)) for epoch in range(1, EPOCHS + 1)]


def test_files_are_kept_for_the_checkpoints_that_need_them(tmp_path: Path) -> None:
    """The newest checkpoint is damaged: the one before it had the first evaluation still to come."""
    training = start(tmp_path, by_epochs(interval=1), low, polls=5)
    assert training.go(None, stop_at(STEPS + 4)) == "interrupted"
    older, newest = sorted((tmp_path / "checkpoint").iterdir())
    (newest / "shared").unlink()
    again = start(tmp_path, by_epochs(interval=1), low, polls=2)
    assert f"step_{again.weight:08d}" == older.name
    assert again.go() == "not_reached"
    assert results(tmp_path) == [(epoch, low(epoch)) for epoch in range(1, EPOCHS + 1)]
