"""Evaluations during training, without a framework: log, order of results, checkpoints and failures."""

import itertools
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.timeline import Timeline
from tests.benchmarks import loop
from tests.benchmarks.loop import START, Training, keys, signal_handlers, stop_at
from tests.conftest import records

__all__ = ["signal_handlers"]
EPOCHS, STEPS = 4, 5


@pytest.fixture(autouse=True)
def evaluators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Runs poll without a pause and close their evaluators; the last run of a test lets its evaluator finish
    monkeypatch.setattr("benchmarks.common.run.run.pause", lambda: None)
    Evaluator.instances.clear()
    yield
    assert all(evaluator.close.called for evaluator in Evaluator.instances) and Evaluator.instances[-1].finish.called


class Evaluator:
    """Returns the oldest result at every ``polls``-th poll; its files are in the folder of the run."""

    instances: ClassVar[list["Evaluator"]] = []

    def __init__(self, folder: Path, quality: Callable[[int], float], polls: int) -> None:
        self._folder, self._quality, self._polls = folder / "weights", quality, polls
        self._remaining, self._queue = polls, list[int]()
        self.fails_at, self.finish, self.close = 0, mock.Mock(), mock.Mock()
        self.instances.append(self)

    def open(self) -> None:
        self._folder.mkdir(exist_ok=True)

    def start(self, epoch: int, weight: int) -> None:
        (self._folder / str(epoch)).write_text(str(weight), encoding="ascii")
        self.again(epoch)

    def again(self, epoch: int) -> None:
        assert (self._folder / str(epoch)).read_text(encoding="ascii") == str(STEPS * epoch)
        self._queue.append(epoch)

    def poll(self) -> Mapping[str, float] | None:
        if self._queue[0] == self.fails_at:
            raise Problem("the evaluator was killed", "", "resume the run")
        self._remaining = self._remaining - 1 or self._polls
        return {"map": self._quality(self._queue.pop(0))} if self._remaining == self._polls else None

    def keep(self, epochs: set[int]) -> None:
        for path in self._folder.iterdir():
            if int(path.name) not in epochs:
                path.unlink()


def by_epochs(concurrently: bool = True, interval: int = 0, stops: bool = True) -> Timeline:
    return loop.by_epochs(
        EPOCHS, interval=interval, steps=STEPS, stops_at_target=stops, evaluates_concurrently=concurrently
    )


def start(output: Path, timeline: Timeline, quality: Callable[[int], float], polls: int) -> Training:
    return Training(
        output, timeline, {"map": 0.5}, Wording("ssd", accuracy_first=True), Evaluator(output, quality, polls)
    )


def low(epoch: int) -> float:
    return epoch / 100


LOW = [(epoch, low(epoch)) for epoch in range(1, EPOCHS + 1)]


def results(folder: Path) -> list[tuple[int, float]]:
    return [(record["epoch"], record["qualities"]["map"]) for record in records(folder / "metrics.jsonl", "eval")]


def resume(output: Path, timeline: Timeline, weight: int, polls: int = 2) -> None:
    # Continues with the saved weight, and ends with the results of all epochs
    training = start(output, timeline, low, polls)
    assert (training.weight, training.go(), results(output)) == (weight, "not_reached", LOW)


def epoch(number: int, *events: str) -> list[str]:
    return [
        f"+block_start {number}x1",
        f"+epoch_start {number}",
        *events,
        f"-epoch_stop {number}",
        f"-block_stop {number}",
    ]


def evaluation(number: int) -> list[str]:
    return [f"+eval_start {number}", f"eval_accuracy {number}", f"-eval_stop {number}"]


@pytest.mark.parametrize(
    ("timeline", "quality", "polls", "outcome", "steps", "values", "log"),
    [
        # The evaluation starts after the end of the block, as in the submitted logs of Mask R-CNN
        (
            by_epochs(), low, 2, "not_reached", 20, LOW,
            [
                *START, *epoch(1), "+eval_start 1", *epoch(2, "eval_accuracy 1", "-eval_stop 1"), "+eval_start 2",
                *epoch(3, "eval_accuracy 2", "-eval_stop 2"), "+eval_start 3",
                *epoch(4, "eval_accuracy 3", "-eval_stop 3"), *evaluation(4), "-run_stop",
            ],
        ),
        # Stop two steps after the result that reached the targets, when all ranks have read it
        (
            by_epochs(), lambda epoch: 0.5, 1, "reached", 8, [(1, 0.5)],
            [
                "+eval_start 1", "+block_start 2x1", "+epoch_start 2", "eval_accuracy 1", "-eval_stop 1", "-run_stop",
            ],
        ),
        # Instead of the next evaluation
        (
            by_epochs(), lambda epoch: 0.5, 6, "reached", 10, [(1, 0.5)],
            [
                "+block_start 2x1", "+epoch_start 2", "-epoch_stop 2", "eval_accuracy 1", "-eval_stop 1", "-run_stop",
            ],
        ),
        # Evaluations do not overlap: the checker of v0.6 rejects logs in which they do
        (
            by_epochs(), lambda epoch: 0.5 if epoch == 2 else 0.1, 40, "reached", 15, [(1, 0.1), (2, 0.5)],
            [
                *START, *epoch(1), "+eval_start 1", *epoch(2)[:-1], "eval_accuracy 1", "-eval_stop 1", "-block_stop 2",
                "+eval_start 2", *epoch(3)[:-1], "eval_accuracy 2", "-eval_stop 2", "-run_stop",
            ],
        ),
        # A run that continues after its target has all results
        (by_epochs(stops=False), lambda epoch: 0.6, 1, "reached", 20, [(n, 0.6) for n in (1, 2, 3, 4)], ["-run_stop"]),
        (by_epochs(stops=False), lambda epoch: 0.6, 40, "reached", 20, [(n, 0.6) for n in (1, 2, 3, 4)], ["-run_stop"]),
        # A run that waits for its evaluations
        (
            by_epochs(concurrently=False), lambda epoch: 0.5 if epoch == 2 else 0.1, 3, "reached", 10,
            [(1, 0.1), (2, 0.5)],
            [
                *START, *epoch(1)[:-1], *evaluation(1), "-block_stop 1", *epoch(2)[:-1], *evaluation(2),
                "-block_stop 2", "-run_stop",
            ],
        ),
    ],
)  # fmt: skip
def test_log_and_results(
    tmp_path: Path, timeline: Timeline, quality: Any, polls: int, outcome: str, steps: int, values: Any, log: list[str]
) -> None:
    training = start(tmp_path, timeline, quality, polls)
    found = training.go(), training.weight, results(tmp_path), keys(tmp_path)[-len(log) :]
    assert found == (outcome, steps, values, log)
    assert ('"status": "success"' in (tmp_path / "result.txt").read_text(encoding="utf-8")) == (outcome == "reached")


@pytest.mark.slow
@pytest.mark.parametrize("concurrently", [True, False])
@pytest.mark.parametrize("polls", [1, 4, 40])
@pytest.mark.parametrize(
    ("batch", "step"), [*((None, step) for step in range(0, EPOCHS * STEPS, 3)), (0, None), (3, None)]
)
def test_resumed_run_has_all_evaluations(
    tmp_path: Path, concurrently: bool, polls: int, batch: int | None, step: int | None
) -> None:
    first = start(tmp_path, by_epochs(concurrently), low, polls)
    assert first.go(None, stop_at(step), stop_at(batch)) == "interrupted" and not first.evaluator.finish.called
    resume(tmp_path, by_epochs(concurrently), first.weight, polls)
    # The position of a result in the log depends on when it came
    start(tmp_path / "reference", by_epochs(concurrently), low, polls).go()
    lines = keys(tmp_path)
    assert sorted(lines) == sorted(keys(tmp_path / "reference"))
    for number in range(1, EPOCHS + 1):
        assert [line for line in lines if line in evaluation(number)] == evaluation(number)


def test_run_is_stopped_while_it_waits_for_the_last_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, waits = start(tmp_path, by_epochs(), low, polls=1000), itertools.count()

    def stop() -> None:
        if training.weight == EPOCHS * STEPS and next(waits) == 20:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("benchmarks.common.run.run.pause", stop)
    assert training.go() == "interrupted"
    resume(tmp_path, by_epochs(), EPOCHS * STEPS)


def test_run_that_was_killed_after_it_reached_its_target_ends_when_it_is_resumed(tmp_path: Path) -> None:
    training = start(tmp_path, by_epochs(), lambda epoch: 0.5, polls=1)

    def save_and_die(step: int) -> None:
        if training.run._reached:
            training.run._save()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.go(None, save_and_die)
    assert (start(tmp_path, by_epochs(), low, polls=1).go(), results(tmp_path)) == ("reached", [(1, 0.5)])


@pytest.mark.parametrize("concurrently", [True, False])
@pytest.mark.parametrize("fails_at", [1, EPOCHS])
def test_failed_evaluator_ends_the_run_and_nothing_is_lost(tmp_path: Path, concurrently: bool, fails_at: int) -> None:
    first = start(tmp_path, by_epochs(concurrently), low, polls=2)
    first.evaluator.fails_at = fails_at
    with pytest.raises(SystemExit, match=r"the evaluator was killed\n  hint: resume the run"):
        first.go()
    assert "-run_stop" not in keys(tmp_path) and not records(tmp_path / "metrics.jsonl", "end")
    resume(tmp_path, by_epochs(concurrently), first.weight)


def test_files_of_evaluations_exist_as_long_as_a_checkpoint_needs_them(tmp_path: Path) -> None:
    # The newest checkpoint is damaged; in the previous one the first evaluation was pending
    assert start(tmp_path, by_epochs(interval=1), low, polls=5).go(None, stop_at(STEPS + 4)) == "interrupted"
    previous, newest = sorted((tmp_path / "checkpoint").iterdir())
    (newest / "shared").unlink()
    resume(tmp_path, by_epochs(interval=1), int(previous.name.removeprefix("step_")))
