"""Run's loop on one rank without a framework, for the tests of the loop, of evaluators and of interruptions."""

import math
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common.run import checkpoints
from benchmarks.common.run import timeline as timelines
from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.ranks import Lagged, Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.run.timing import InputWait
from tests.conftest import logged, records

STEPS = 3  # Steps per epoch
WORDING = Wording("some")
START = ["+init_start", "seed", "global_batch_size", "-init_stop", "+run_start"]


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    # A run replaces the handlers of SIGTERM and SIGINT
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def lagged_sums(ranks: Ranks, name: str) -> SimpleNamespace:
    lagged = Lagged()

    def send(loss: float | None, stop: bool, *extra: Any) -> list[float] | None:
        return lagged.send(lambda: [loss or 0.0, float(stop), *map(float, extra)])

    return SimpleNamespace(send=send, drain=lagged.drain)


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
    snapshot=lambda content, before: dict(content),
    write=checkpoints.save_arrays,
    load=checkpoints.load_arrays,
    LaggedSums=lagged_sums,
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


def by_epochs(
    epochs: int, rule: Callable[[int], bool] = lambda epoch: True, interval: int = 0, steps: int = STEPS, **options: Any
) -> timelines.Timeline:
    # Evaluations after the epochs, counted from 0, for which the rule holds
    return timelines.by_epochs(SimpleNamespace(epochs=epochs, checkpoint_interval=interval), steps, rule, **options)


def every_two_steps(epochs: int) -> timelines.Timeline:
    # Evaluations inside epochs, and after the last step
    return timelines.Timeline(
        steps_per_epoch=STEPS,
        epochs=epochs,
        evaluates_after=lambda step: step % 2 == 0 or step == epochs * STEPS,
        checkpoints_after=lambda step: False,
        epoch_num=lambda step: 1 + step / STEPS,
        evaluates_inside_epochs=True,
    )


def stop_at(position: int | None) -> Callable[[int], None]:
    # Sends SIGTERM at this step, or this batch of an evaluation
    return lambda number: signal.raise_signal(signal.SIGTERM) if number == position else None


def keys(output: Path) -> list[str]:
    # Events of a log in short form: ``+`` starts, ``-`` ends, then the epoch and the number of epochs
    marks, events = {"INTERVAL_START": "+", "INTERVAL_END": "-", "POINT_IN_TIME": ""}, []
    for event in logged(output / "result.txt"):
        meta = event["metadata"]
        number = meta.get("epoch_num", meta.get("first_epoch_num", ""))
        count = f"x{meta['epoch_count']}" if "epoch_count" in meta else ""
        events.append(f"{marks[event['event_type']]}{event['key']} {number}{count}".strip())
    return events


class Training:
    """A training whose only weight counts its steps; an evaluator receives the weight after each block of steps."""

    def __init__(
        self,
        output: Path,
        timeline: timelines.Timeline,
        targets: Mapping[str, float],
        wording: Wording = WORDING,
        evaluator: Any = None,
        **config: Any,
    ) -> None:
        output.mkdir(exist_ok=True)
        self.run = Run(Config(targets, **config), FRAMEWORK, Path("data"), output, wording)
        self.timeline, self.evaluator = timeline, evaluator
        self.weight = int(self.run.saved.get("weight", 0))

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        # State of the checkpoint that all ranks share, and that of this rank
        return {"weight": self.weight}, {"input": bytes([self.weight])}

    def train_step(self, step: int) -> float | None:
        self.weight += 1
        return float(step)

    def go(
        self,
        qualities: Any = None,
        on_step: Callable[[int], object] = lambda step: None,
        on_batch: Callable[[int], object] = lambda batch: None,
    ) -> str:
        """Train to the end, with ``qualities`` as function of the weight; return the outcome."""
        run = self.run
        with run.initialization():
            run.log({"global_batch_size": 4})
        with run.timed(self.timeline, lambda: 5e6):
            run.register_state(lambda: self.states()[0], lambda: self.states()[1])
            if self.evaluator:
                run.set_evaluator(self.evaluator)
            for _ in run.blocks():
                for step in run.steps():
                    assert step == self.weight
                    on_step(step)
                    run.report(self.train_step(step), 0.5)
                if run.evaluates():
                    for batch in run.interruptible(range(6)):
                        on_batch(batch)
                    if self.evaluator:
                        run.submit_evaluation(self.weight)
                    else:
                        run.evaluated(None if run.interrupted else qualities(self.weight))
        assert run.finish() == 0
        return str(records(run.output / "metrics.jsonl", "end")[-1]["outcome"])
