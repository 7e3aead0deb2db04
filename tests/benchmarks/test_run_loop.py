"""Run's loop without a framework: which lines a log gets, when a run evaluates, stops, saves and resumes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common import checkpoints
from benchmarks.common import timeline as timelines
from benchmarks.common.mllog import MLLog, V05Log
from benchmarks.common.ranks import Lagged, Ranks
from benchmarks.common.run import Run
from benchmarks.common.timeline import Timeline
from tests.conftest import records

STEPS = 3
"""Of an epoch."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A run takes SIGTERM and SIGINT over."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


class Sums:
    """Sums of a single rank."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._lagged = Lagged()
        self.drain = self._lagged.drain

    def send(self, loss: float | None, stop: bool) -> list[float] | None:
        return self._lagged.send(lambda: [loss or 0.0, float(stop)])


FRAMEWORK = SimpleNamespace(
    start=lambda config: Ranks(0, 1, 0, 1, None),
    finish=lambda: None,
    barrier=lambda: None,
    total=list,
    save=checkpoints.save_arrays,
    load=checkpoints.load_arrays,
    LaggedSums=Sums,
)


@dataclass(frozen=True)
class Config:
    """What Run reads of a configuration."""

    targets: Mapping[str, float]
    seed: int = 7
    batch_size: int = 4
    log_interval: int = 1


class Training:
    """A training whose only weight counts its steps; ``qualities`` gives those of each evaluation."""

    def __init__(self, output: Path, timeline: Timeline, targets: Mapping[str, float], log: Any = MLLog) -> None:
        self.run = Run(Config(targets), FRAMEWORK, Path("data"), output, log)
        self.timeline = timeline
        self.weight = int(self.run.saved["weight"]) if self.run.resumed else 0
        self.evaluated: list[int] = []

    def go(self, qualities: Callable[[int], Mapping[str, float]], on_step: Any = None, on_batch: Any = None) -> str:
        """Train to the end; returns the outcome."""
        run = self.run
        with run.initialization():
            run.log({"global_batch_size": 4})
        with run.timed(self.timeline):
            run.keep(lambda: {"weight": self.weight}, lambda: {"input": bytes([self.weight])})
            for _ in run.blocks():
                for step in run.steps():
                    assert step == self.weight
                    self.weight += 1
                    if on_step:
                        on_step(step)
                    run.report(float(step), 0.5)
                if run.evaluates():
                    for batch in run.watch(range(6)):
                        if on_batch:
                            on_batch(batch)
                    if run.interrupted:
                        run.evaluated(None)
                        continue
                    self.evaluated.append(self.weight)
                    run.evaluated(qualities(self.weight))
        assert run.finish() == 0
        return records(run.output / "metrics.jsonl", "end")[-1]["outcome"]


def by_epochs(epochs: int, rule: Callable[[int], bool] = lambda epoch: True, interval: int = 0) -> Timeline:
    """Evaluations after the epochs of ``rule``, which count from 0."""
    return timelines.by_epochs(SimpleNamespace(epochs=epochs, checkpoint_interval=interval), STEPS, rule)


def every_two_steps(epochs: int) -> Timeline:
    """Evaluations inside epochs, and after the last step."""
    steps = epochs * STEPS
    return Timeline(
        steps_per_epoch=STEPS,
        epochs=epochs,
        evaluates_after=lambda step: step % 2 == 0 or step == steps,
        checkpoints_after=lambda step: False,
        epoch_num=lambda step: 1 + step / STEPS,
        evaluates_inside_epochs=True,
    )


def keys(output: Path) -> list[str]:
    """Events of a log, shortened: ``+`` starts, ``-`` ends, and what the metadata counts."""
    marks = {"INTERVAL_START": "+", "INTERVAL_END": "-", "POINT_IN_TIME": ""}
    found = []
    for line in (output / "result.txt").read_text(encoding="utf-8").splitlines():
        event = json.loads(line.removeprefix(":::MLLOG "))
        meta = event["metadata"]
        number = meta.get("epoch_num", meta.get("first_epoch_num", ""))
        count = f"x{meta['epoch_count']}" if "epoch_count" in meta else ""
        found.append(f"{marks[event['event_type']]}{event['key']} {number}{count}".strip())
    return found


START = ["+init_start", "seed", "global_batch_size", "-init_stop", "+run_start"]
NEVER: Callable[[int], Mapping[str, float]] = lambda weight: {"accuracy": 0.0}  # noqa: E731


def test_blocks_of_epochs_end_in_an_evaluation(tmp_path: Path) -> None:
    training = Training(tmp_path, by_epochs(3, lambda epoch: epoch in (0, 2)), {"accuracy": 0.5})
    assert training.go(NEVER) == "not_reached"
    assert training.evaluated == [3, 9]
    assert keys(tmp_path) == [
        *START,
        *("+block_start 1x1", "+epoch_start 1", "-epoch_stop 1"),
        *("+eval_start 1", "-eval_stop 1", "eval_accuracy 1", "-block_stop 1"),
        *("+block_start 2x2", "+epoch_start 2", "-epoch_stop 2", "+epoch_start 3", "-epoch_stop 3"),
        *("+eval_start 3", "-eval_stop 3", "eval_accuracy 3", "-block_stop 2", "-run_stop"),
    ]


def test_evaluations_lie_inside_epochs(tmp_path: Path) -> None:
    log = partial(MLLog, accuracy_first=True)
    training = Training(tmp_path, every_two_steps(2), {"auc": 0.5}, log)
    assert training.go(lambda weight: {"auc": weight / 10, "log_loss": 0.1}) == "reached"
    assert training.evaluated == [2, 4, 6]
    assert keys(tmp_path)[len(START) :] == [
        *("+block_start 1x1", "+epoch_start 1"),
        *(f"+eval_start {1 + 2 / 3}", f"eval_accuracy {1 + 2 / 3}", f"-eval_stop {1 + 2 / 3}"),
        *("-epoch_stop 1", "-block_stop 1", "+block_start 2x1", "+epoch_start 2"),
        *(f"+eval_start {1 + 4 / 3}", f"eval_accuracy {1 + 4 / 3}", f"-eval_stop {1 + 4 / 3}"),
        *("+eval_start 3.0", "eval_accuracy 3.0", "-eval_stop 3.0"),
        *("-epoch_stop 2", "-block_stop 2", "-run_stop"),
    ]
    evaluations = records(tmp_path / "metrics.jsonl", "eval")
    assert [(each["epoch"], each["qualities"], each["log_loss"]) for each in evaluations] == [
        (1, {"auc": 0.2}, 0.1),
        (2, {"auc": 0.4}, 0.1),
        (2, {"auc": 0.6}, 0.1),
    ]


def test_every_quality_must_reach_its_target(tmp_path: Path) -> None:
    qualities = {3: {"box": 0.4, "mask": 0.3}, 6: {"box": 0.37, "mask": 0.4}, 9: {"box": 0.4, "mask": 0.4}}
    training = Training(tmp_path, by_epochs(9), {"box": 0.377, "mask": 0.339})
    assert training.go(qualities.__getitem__) == "reached"
    assert training.evaluated == [3, 6, 9]
    text = (tmp_path / "result.txt").read_text(encoding="utf-8")
    assert '"value": {"box": 0.4, "mask": 0.4}' in text
    assert records(tmp_path / "metrics.jsonl", "start")[0]["targets"] == {"box": 0.377, "mask": 0.339}


def test_lines_of_the_oldest_round(tmp_path: Path) -> None:
    training = Training(tmp_path, by_epochs(1), {"hit_rate": 0.1}, partial(V05Log, benchmark="ncf"))
    assert training.go(lambda weight: {"hit_rate": 0.2}) == "reached"
    lines = (tmp_path / "result.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split(") ", 1)[1] for line in lines] == [
        *("run_start", "run_set_random_seed: 7", "global_batch_size: 4", "train_loop", "train_epoch: 0"),
        *("eval_start: 1", 'eval_accuracy: {"epoch": 1, "value": 0.2}', "eval_target: 0.1", "eval_stop: 1"),
        *('run_stop: {"success": true}', "run_final"),
    ]


@pytest.mark.parametrize("timeline", [by_epochs(4, lambda epoch: epoch % 2 == 1), every_two_steps(4)])
@pytest.mark.parametrize("place", [*((None, step) for step in range(10)), *((batch, None) for batch in (0, 3))])
def test_a_stopped_run_resumes_as_if_it_had_not_stopped(
    tmp_path: Path, timeline: Timeline, place: tuple[int | None, int | None]
) -> None:
    batch, step = place
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    Training(whole, timeline, {"accuracy": 0.5}).go(NEVER)

    def stop_at(wanted: int | None) -> Callable[[int], None]:
        return lambda number: signal.raise_signal(signal.SIGTERM) if number == wanted else None

    first = Training(broken, timeline, {"accuracy": 0.5})
    assert first.go(NEVER, stop_at(step), stop_at(batch)) == "interrupted"
    second = Training(broken, timeline, {"accuracy": 0.5})
    assert second.run.resumed
    assert second.weight == first.weight
    assert second.go(NEVER) == "not_reached"
    assert keys(broken) == keys(whole)
    for kind, field in (("step", "loss"), ("eval", "qualities")):
        found, expected = (records(folder / "metrics.jsonl", kind) for folder in (broken, whole))
        assert [each[field] for each in found] == [each[field] for each in expected]


def test_checkpoints_are_kept_at_their_interval_and_found(tmp_path: Path) -> None:
    training = Training(tmp_path, by_epochs(5, interval=2), {"accuracy": 0.5})
    training.go(NEVER)
    (kept,) = (tmp_path / "checkpoint").iterdir()
    state = json.loads((kept / checkpoints.STATE_FILE).read_text(encoding="utf-8"))
    assert (state["step"], state["evaluated"]) == (12, 12)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    run = Training(tmp_path, by_epochs(2), {"accuracy": 0.5}).run
    with (
        pytest.raises(SystemExit, match=r"not finite at step 2: found nan\n  do this"),
        run.timed(by_epochs(2)),
    ):
        for _ in run.blocks():
            for step in run.steps():
                run.report(float("nan") if step == 1 else 1.0, 0.1)
    assert "run_stop" not in (tmp_path / "result.txt").read_text(encoding="utf-8")


def test_an_evaluation_that_is_forgotten_is_an_error(tmp_path: Path) -> None:
    run = Training(tmp_path, by_epochs(2), {"accuracy": 0.5}).run
    with pytest.raises(RuntimeError, match="was not reported"), run.timed(by_epochs(2)):
        for _ in run.blocks():
            for _ in run.steps():
                run.report(1.0, 0.1)


def test_ranges_of_steps_end_at_epochs_and_evaluations(tmp_path: Path) -> None:
    run = Training(tmp_path, every_two_steps(2), {"auc": 0.5}).run
    found = []
    with run.timed(every_two_steps(2)):
        for _ in run.blocks():
            for steps in run.strides(100):
                found.append(list(steps))
                run.report(1.0, 0.1, samples=len(steps))
            if run.evaluates():
                run.evaluated({"auc": 0.0})
    assert found == [[0, 1], [2], [3], [4, 5]]


def test_stages_of_a_step_are_timed(tmp_path: Path) -> None:
    run = Training(tmp_path, by_epochs(1), {"accuracy": 0.5}).run
    with run.timed(by_epochs(1)):
        for _ in run.blocks():
            for _ in run.steps():
                with run.stage("forward"):
                    loss = run.wait_for(lambda: 1.0)
                run.report(loss, 0.1)
            if run.evaluates():
                run.evaluated({"accuracy": 1.0})
    (epoch,) = records(tmp_path / "metrics.jsonl", "epoch")
    assert set(epoch["stages"]) == {"forward"}
    assert 0 <= epoch["input_share"] < 1
