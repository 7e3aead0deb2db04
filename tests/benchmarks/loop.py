"""Run's loop on a single rank without a framework: what the tests of the loop, of evaluators and of stops share."""

import json
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common.run import checkpoints
from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.ranks import Lagged, Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.timeline import Timeline
from benchmarks.common.run.timing import InputWait
from tests.conftest import records

STEPS = 3  # of an epoch
WORDING = Wording("some")
START = ["+init_start", "seed", "global_batch_size", "-init_stop", "+run_start"]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A run takes SIGTERM and SIGINT over."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


class Sums:
    def __init__(self, ranks: Ranks, name: str) -> None:
        self._lagged = Lagged()
        self.drain = self._lagged.drain

    def send(self, loss: float | None, stop: bool, *more: Any) -> list[float] | None:
        return self._lagged.send(lambda: [loss or 0.0, float(stop), *map(float, more)])


FRAMEWORK = SimpleNamespace(
    start=lambda config: Ranks(0, 1, 0, 1, None),
    load_compiled=lambda path, ranks: None,
    save_compiled=lambda path, ranks: None,
    finish=lambda: None,
    barrier=lambda: None,
    connect=lambda ranks: None,
    synchronize=lambda: None,
    total=list,
    save=checkpoints.save_arrays,
    copied=lambda content, before: dict(content),
    write=checkpoints.save_arrays,
    load=checkpoints.load_arrays,
    LaggedSums=Sums,
    input_wait=lambda ranks: InputWait(),
    arithmetic=lambda ranks: {"tf32": {"matmul": True}},
    memory=lambda context: math.inf,
)


@dataclass(frozen=True)
class Config:
    targets: Mapping[str, float]
    seed: int = 7
    batch_size: int = 4
    log_interval: int = 1
    checkpoint_interval: int = 0
    async_checkpoints: bool = False
    round: str = "v0.7"
    device: str = "gpu"
    precision: str = "tf32"
    kernels: str = "auto"
    optimizer_kernel: str = "auto"


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


def stop_at(wanted: int | None) -> Callable[[int], None]:
    """Send SIGTERM at a step, or a batch of an evaluation."""
    return lambda number: signal.raise_signal(signal.SIGTERM) if number == wanted else None


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


class Training:
    """A training whose only weight counts its steps; an ``evaluator`` is given it after each block of steps."""

    def __init__(
        self,
        output: Path,
        timeline: Timeline,
        targets: Mapping[str, float],
        wording: Wording = WORDING,
        evaluator: Any = None,
        **config: Any,
    ) -> None:
        output.mkdir(exist_ok=True)
        self.run = Run(Config(targets, **config), FRAMEWORK, Path("data"), output, wording)
        self.timeline, self.evaluator = timeline, evaluator
        self.weight = int(self.run.saved["weight"]) if self.run.resumed else 0
        self.evaluated: list[int] = []

    def go(self, qualities: Any = None, on_step: Any = None, on_batch: Any = None) -> str:
        """Train to the end, with the ``qualities`` of each evaluation by the weight; return the outcome."""
        run = self.run
        with run.initialization():
            run.log({"global_batch_size": 4})
        with run.timed(self.timeline, lambda: 5e6):
            run.register_state(lambda: {"weight": self.weight}, lambda: {"input": bytes([self.weight])})
            if self.evaluator:
                run.use(self.evaluator)
            for _ in run.blocks():
                for step in run.steps():
                    assert step == self.weight
                    if on_step:
                        on_step(step)
                    self.weight += 1
                    run.report(float(step), 0.5)
                if run.evaluates():
                    for batch in run.interruptible(range(6)):
                        if on_batch:
                            on_batch(batch)
                    if self.evaluator:
                        run.evaluated_later(self.weight)
                    elif run.interrupted:
                        run.evaluated(None)
                    else:
                        self.evaluated.append(self.weight)
                        run.evaluated(qualities(self.weight))
        assert run.finish() == 0
        return str(records(run.output / "metrics.jsonl", "end")[-1]["outcome"])
