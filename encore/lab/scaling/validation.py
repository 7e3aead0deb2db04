"""Validation of the cost model on published results: fitted to smaller counts, compared with larger counts.

    from encore.lab.scaling.validation import error_table
    print(error_table("resnet").as_markdown())

``python -m encore.cli.documentation`` writes the table into docs/scaling.md.
"""

import functools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from encore.errors import EncoreError, unknown_name
from encore.lab.scaling.cost_model import Point, Prediction, fit_epochs, fit_steps, product
from encore.results.compare.run_set import submission
from encore.results.published.published import PublishedResult, load_published
from encore.results.published.systems import family
from encore.results.rules import data_size
from encore.results.table import Table


@dataclass(frozen=True)
class Series:
    """Published results of a benchmark at different scales: same round, submitter and accelerator."""

    round: str
    submitter: str
    accelerator: str

    @property
    def name(self) -> str:
        return f"{self.round} {self.submitter} {self.accelerator}"


# TPUs of v0.7 are omitted: a pod is one node in one description and hundreds in the next.
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
    """Published result and the prediction from smaller results of the same series."""

    series: Series
    fitted_on: tuple[int, ...]
    measured: Measured
    step: Prediction  # seconds per step
    minutes: Prediction

    @property
    def step_error(self) -> float:
        """Relative error of the predicted step time: cost model only."""
        return self.step.value / self.measured.point.time - 1

    @property
    def minutes_error(self) -> float:
        """Predicted over measured time to the target, less one: convergence included."""
        return self.minutes.value / self.measured.minutes - 1


@functools.cache
def train_samples() -> dict[str, int]:
    """Return the samples per epoch of all benchmarks with published results and consistent submitted logs."""
    sizes = {cell.benchmark: data_size(cell.benchmark) for cell in load_published()}
    return {name: size.train for name, size in sizes.items() if name and size and size.train}


def published_points(series: Series, benchmark: str) -> list[Measured]:
    points = [
        _read_measurement(cell)
        for cell in load_published()
        if (cell.round, cell.submitter) == (series.round, series.submitter)
        and cell.benchmark == benchmark
        and family(series.accelerator) == family(cell.hardware.accelerator)
        and cell.score_minutes
    ]
    return sorted(points, key=lambda measured: measured.point.gpus)


def _read_measurement(cell: PublishedResult) -> Measured:
    run = submission(cell)
    gpus, batch, minutes = run.hardware.accelerators, cell.global_batch, cell.score_minutes
    if not gpus or not batch or not minutes or cell.benchmark is None or run.lengths is None:
        raise ValueError(f"{cell.name} lacks the number of accelerators, batch, epochs or score")
    epochs = run.lengths.estimate
    steps = epochs * train_samples()[cell.benchmark] / batch
    point = Point(gpus=gpus, nodes=run.hardware.nodes or 1, samples_per_gpu=batch / gpus, time=minutes * 60 / steps)
    return Measured(cell=cell, point=point, batch=batch, epochs=epochs, minutes=minutes)


@functools.cache
def checks(benchmark: str) -> tuple[Check, ...]:
    """Return every larger count of every series, predicted from the two smallest counts, and from the smaller half."""
    if benchmark not in train_samples():
        raise unknown_name("benchmark with published series", benchmark, train_samples())
    results: list[Check] = []
    for series in SERIES:
        measured = published_points(series, benchmark)
        counts = sorted({result.point.gpus for result in measured})
        for fitted in sorted({2, (len(counts) + 1) // 2}):
            if 2 <= fitted < len(counts):
                results += _predict_series(series, benchmark, measured, counts[:fitted])
    if not results:
        raise EncoreError(f"not enough published results of {benchmark} for predictions")
    return tuple(results)


def _predict_series(series: Series, benchmark: str, measured: list[Measured], counts: list[int]) -> Iterable[Check]:
    small = [result for result in measured if result.point.gpus in counts]
    # Hierarchical within and between nodes, except TPUs: pods of all sizes are one node in v0.6.
    nodes_known = any((result.cell.hardware.nodes or 1) > 1 for result in measured)
    steps = fit_steps([result.point for result in small], "hierarchical" if nodes_known else "tree")
    epochs = fit_epochs([(result.batch, result.epochs) for result in small])
    for result in (result for result in measured if result.point.gpus not in counts):
        step, needed = steps.predict(result.point), epochs.predict((1.0, result.batch))
        yield Check(
            series=series,
            fitted_on=tuple(counts),
            measured=result,
            step=step,
            minutes=product((step, needed), train_samples()[benchmark] / result.batch / 60),
        )


def error_table(benchmark: str) -> Table:
    results = checks(benchmark)
    steps = statistics.median(abs(check.step_error) for check in results)
    minutes = statistics.median(abs(check.minutes_error) for check in results)
    covered = sum(check.step.holds(check.measured.point.time) for check in results)
    minutes_covered = sum(check.minutes.holds(check.measured.minutes) for check in results)
    return Table(
        title=f"Predicted and published: {benchmark}",
        columns=(
            "series", "fitted on", "predicted", "system", "ms per step", "predicted ms", "95 % interval",
            "error", "minutes", "predicted minutes", "error of minutes",
        ),
        rows=tuple(
            (
                check.series.name,
                ", ".join(map(str, check.fitted_on)),
                check.measured.point.gpus,
                f"`{check.measured.cell.system}`",
                f"{check.measured.point.time * 1e3:.3g}",
                f"{check.step.value * 1e3:.3g}",
                f"{_two_digits(check.step.low * 1e3)} to {_two_digits(check.step.high * 1e3)}"
                + ("" if check.step.holds(check.measured.point.time) else " (missed)"),
                f"{check.step_error:+.0%}",
                f"{check.measured.minutes:.3g}",
                f"{check.minutes.value:.3g}",
                f"{check.minutes_error:+.0%}",
            )
            for check in results
        ),
        note=f"Median error, whatever its sign: {steps:.0%} of a step, {minutes:.0%} of the minutes to the target. "
        f"Inside the 95 % interval: {covered} of {len(results)} steps, {minutes_covered} of {len(results)} times.",
    )  # fmt: skip


def _two_digits(number: float) -> str:
    # Two significant digits without an exponent.
    return f"{float(f'{number:.2g}'):g}"
