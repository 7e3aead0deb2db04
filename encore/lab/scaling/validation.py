"""The cost model against published results: fitted on the smaller counts, compared with the larger.

    from encore.lab.scaling.validation import error_table
    print(error_table("resnet").as_markdown())

The table in docs/scaling.md is made by this module, through ``python -m encore.cli.documentation``.
"""

import functools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from encore.errors import EncoreError
from encore.lab.scaling.cost_model import Point, Prediction, fit_epochs, fit_steps, product
from encore.names import unknown
from encore.results.compare.run_set import submission
from encore.results.published.published import PublishedResult, load_published
from encore.results.published.systems import family
from encore.results.rules import data_size
from encore.results.table import Table


@dataclass(frozen=True)
class Series:
    """Published results of one benchmark that differ in scale: one round, submitter and accelerator."""

    round: str
    submitter: str
    accelerator: str

    @property
    def name(self) -> str:
        return f"{self.round} {self.submitter} {self.accelerator}"


# Google's TPUs of v0.7 are left out: a pod is one node in one description and hundreds in the next.
SERIES = (
    Series(round="v0.6", submitter="NVIDIA", accelerator="V100"),
    Series(round="v0.6", submitter="Google", accelerator="tpu-v3"),
    Series(round="v0.7", submitter="NVIDIA", accelerator="V100"),
    Series(round="v0.7", submitter="NVIDIA", accelerator="A100"),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    cell: PublishedResult
    point: Point  # time in seconds per step, start and evaluations included
    batch: int
    epochs: float
    minutes: float


@dataclass(frozen=True, kw_only=True)
class Check:
    """A published result and what the smaller ones of its series predict."""

    series: Series
    fitted_on: tuple[int, ...]
    measured: Measured
    step: Prediction  # seconds per step
    minutes: Prediction

    @property
    def step_error(self) -> float:
        """Predicted over measured time of a step, less one: the cost model alone."""
        return self.step.value / self.measured.point.time - 1

    @property
    def minutes_error(self) -> float:
        """Predicted over measured time to the target, less one: convergence included."""
        return self.minutes.value / self.measured.minutes - 1


@functools.cache
def train_samples() -> dict[str, int]:
    """Return samples of an epoch, for every benchmark with published results whose submitted logs agree on them."""
    sizes = {cell.benchmark: data_size(cell.benchmark) for cell in load_published()}
    return {name: size.train for name, size in sizes.items() if name and size and size.train}


def published_points(series: Series, benchmark: str) -> list[Measured]:
    found = [
        _measured(cell)
        for cell in load_published()
        if (cell.round, cell.submitter) == (series.round, series.submitter)
        and cell.benchmark == benchmark
        and family(series.accelerator) == family(cell.hardware.accelerator)
        and cell.score_minutes
    ]
    return sorted(found, key=lambda each: each.point.gpus)


def _measured(cell: PublishedResult) -> Measured:
    side = submission(cell)
    gpus, batch, minutes = side.hardware.accelerators, cell.global_batch, cell.score_minutes
    if not gpus or not batch or not minutes or cell.benchmark is None or side.lengths is None:
        raise ValueError(f"{cell.name} lacks its number of accelerators, its batch, its epochs or its score")
    epochs = side.lengths.estimate
    steps = epochs * train_samples()[cell.benchmark] / batch
    point = Point(gpus=gpus, nodes=side.hardware.nodes or 1, samples_per_gpu=batch / gpus, time=minutes * 60 / steps)
    return Measured(cell=cell, point=point, batch=batch, epochs=epochs, minutes=minutes)


@functools.cache
def checks(benchmark: str) -> tuple[Check, ...]:
    """Return every larger count of every series, predicted from the two smallest counts, and from the smaller half."""
    if benchmark not in train_samples():
        raise unknown("benchmark with published series", benchmark, train_samples())
    found: list[Check] = []
    for series in SERIES:
        measured = published_points(series, benchmark)
        counts = sorted({each.point.gpus for each in measured})
        for fitted in sorted({2, (len(counts) + 1) // 2}):
            if 2 <= fitted < len(counts):
                found += _predicted(series, benchmark, measured, counts[:fitted])
    if not found:
        raise EncoreError(f"too few published results of {benchmark} to predict some from others")
    return tuple(found)


def _predicted(series: Series, benchmark: str, every: list[Measured], counts: list[int]) -> Iterable[Check]:
    small = [each for each in every if each.point.gpus in counts]
    # A hierarchy of one node's GPUs and of nodes, but for TPUs, whose pods of every size are one node in v0.6.
    nodes_known = any((each.cell.hardware.nodes or 1) > 1 for each in every)
    steps = fit_steps([each.point for each in small], "hierarchical" if nodes_known else "tree")
    epochs = fit_epochs([(each.batch, each.epochs) for each in small])
    for each in (each for each in every if each.point.gpus not in counts):
        step, needed = steps.predict(each.point), epochs.predict((1.0, each.batch))
        yield Check(
            series=series,
            fitted_on=tuple(counts),
            measured=each,
            step=step,
            minutes=product((step, needed), train_samples()[benchmark] / each.batch / 60),
        )


def error_table(benchmark: str) -> Table:
    found = checks(benchmark)
    steps = statistics.median(abs(each.step_error) for each in found)
    minutes = statistics.median(abs(each.minutes_error) for each in found)
    held = sum(each.step.holds(each.measured.point.time) for each in found)
    minutes_held = sum(each.minutes.holds(each.measured.minutes) for each in found)
    return Table(
        title=f"Predicted and published: {benchmark}",
        columns=(
            "series", "fitted on", "predicted", "system", "ms per step", "predicted ms", "95 % interval",
            "error", "minutes", "predicted minutes", "error of minutes",
        ),
        rows=tuple(
            (
                each.series.name,
                ", ".join(map(str, each.fitted_on)),
                each.measured.point.gpus,
                f"`{each.measured.cell.system}`",
                f"{each.measured.point.time * 1e3:.3g}",
                f"{each.step.value * 1e3:.3g}",
                f"{_two(each.step.low * 1e3)} to {_two(each.step.high * 1e3)}"
                + ("" if each.step.holds(each.measured.point.time) else " (missed)"),
                f"{each.step_error:+.0%}",
                f"{each.measured.minutes:.3g}",
                f"{each.minutes.value:.3g}",
                f"{each.minutes_error:+.0%}",
            )
            for each in found
        ),
        note=f"Median error, whatever its sign: {steps:.0%} of a step, {minutes:.0%} of the minutes to the target. "
        f"Inside the 95 % interval: {held} of {len(found)} steps, {minutes_held} of {len(found)} times.",
    )  # fmt: skip


def _two(number: float) -> str:
    # Two significant digits, never as a power of ten.
    return f"{float(f'{number:.2g}'):g}"
