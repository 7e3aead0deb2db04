"""Measured results of study points with intervals, and their comparison with printed figures."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from encore.lab.studies.definition import Study, Value
from encore.lab.studies.folder import Folder
from encore.results.published.published import StudyFigure, load_figures
from encore.results.statistics import Sample, interval, ratio_of
from encore.results.table import grouped

_BUSY = 0.1  # fraction of the cores from which other programs affect the times: a rank has one of several cores


@dataclass(frozen=True)
class Drift:
    """Pooled variation between passes of a point, which the blocks of a single process cannot show."""

    cv: float  # standard deviation of a pass, relative to the mean of the point
    freedom: int


@dataclass(frozen=True)
class Result:
    study: Study
    axes: Mapping[str, Value]
    passes: Sequence[Mapping[str, Any]]  # measurements by pass
    drift: Drift | None = None  # None: no point has more than one pass

    @property
    def first_pass(self) -> Mapping[str, Any]:
        return self.passes[0]

    @property
    def ranks(self) -> int:
        return int(self.axes[self.study.program.ranks])

    @property
    def is_timed(self) -> bool:
        """Whether steps were timed; a search for the largest batch times none."""
        return "step_seconds" in self.first_pass

    @property
    def step(self) -> Sample:
        """Seconds per step: one value per pass; with a single pass one value per block."""
        return self._sample([pass_["step_seconds"] for pass_ in self.passes])

    def _sample(self, blocks: Sequence[Sequence[float]]) -> Sample:
        if self.drift is None:
            return Sample.of(blocks[0])
        sample = Sample.of([statistics.fmean(block) for block in blocks])
        # A small difference between two passes can be coincidence: use at least the pooled variation.
        spread = max(sample.cv or 0.0, self.drift.cv) * sample.estimate
        return replace(sample, spread=spread, spread_count=self.drift.freedom + 1)

    def steps(self, weak: bool = False) -> float:
        """Return the steps per epoch: images over the global batch; ``weak``: this number of images per device."""
        joint = int(self.axes[self.study.epoch.batch]) * self.ranks
        return self.study.epoch.images * (self.ranks if weak else 1) / joint

    def epoch(self, weak: bool = False) -> Sample:
        """Return seconds per epoch: steps times step time, plus the extra time of the first step."""
        first = statistics.fmean(float(pass_["first_step_seconds"]) for pass_ in self.passes)
        # The spread of the fixed cost is unknown: only the spread of the steps is used.
        fixed = max(0.0, first - self.step.estimate)
        blocks = [[value * self.steps(weak) + fixed for value in pass_["step_seconds"]] for pass_ in self.passes]
        return self._sample(blocks)

    def stage(self, name: str) -> float:
        """Return the mean seconds of a step stage: fp_bp, wu, step (both, synchronized), metric."""
        return statistics.fmean(value for pass_ in self.passes for value in pass_["stages"][name])

    def operators(self, name: str) -> float | None:
        """Return operator seconds per step and device by stage: fp, bp, wu; None: not profiled."""
        seconds = [float(pass_["operators"][name]) for pass_ in self.passes if pass_.get("operators")]
        return statistics.fmean(seconds) if seconds else None

    @property
    def background_load(self) -> tuple[float, int] | None:
        """Mean cores used by other programs in the busiest pass, and all cores; None: not recorded."""
        loads = [
            (float(pass_["others_cores"]), int(pass_["cores"])) for pass_ in self.passes if "others_cores" in pass_
        ]
        return max(loads, default=None)

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs took more than a tenth of the processors while it was measured."""
        return self.background_load is not None and self.background_load[0] > _BUSY * self.background_load[1]

    def memory(self, when: str) -> tuple[float, float | None]:
        """Return memory in GB of device 0, and the mean of the other devices (None for a single device or process)."""
        first, *rest = self.first_pass["memory_mib"][when]
        unit = 2**20 / 1e9
        return first * unit, sum(rest) / len(rest) * unit if rest else None

    @property
    def gradient_bytes(self) -> int:
        width = 2 if self.axes.get("precision") == "fp16" else 4
        return width * int(self.first_pass["network"]["weights"])


def read(folder: Folder[Study]) -> list[Result]:
    """Return all measured points, including those with a single pass."""
    results = [Result(folder.study, point.axes, folder.measurements(point)) for point in folder.study.points()]
    measured = [result for result in results if result.passes]
    apart = drift(measured)
    return [replace(result, drift=apart) for result in measured]


def drift(results: Sequence[Result]) -> Drift | None:
    timed = [result.passes for result in results if result.is_timed and len(result.passes) > 1]
    means = [[statistics.fmean(pass_["step_seconds"]) for pass_ in passes] for passes in timed]
    squares = sum(statistics.variance(m) / statistics.fmean(m) ** 2 * (len(m) - 1) for m in means)
    freedom = sum(len(m) - 1 for m in means)
    return Drift(math.sqrt(squares / freedom), freedom) if freedom else None


Interval = tuple[float, float | None, float | None]  # a value, and where it is from and to


def group_by_series(results: Sequence[Result], series: Sequence[str]) -> dict[tuple[Value, ...], list[Result]]:
    return grouped(results, lambda result: tuple(result.axes[axis] for axis in series))


def ratio(over: Sample, under: Sample) -> Interval:
    """Return over / under with its interval, None and None without a spread."""
    sample = ratio_of(over, under)
    if sample is None:
        return float("nan"), None, None
    low, high = sample.interval() or (None, None)
    return sample.value, low, high


def to_percent(value: float | None) -> float | None:
    return None if value is None else 100 * (value - 1)


def bounds(sample: Sample) -> tuple[float | None, float | None]:
    """Return the sample's interval, None and None without a spread."""
    return interval(sample) or (None, None)


@dataclass(frozen=True)
class Measurement:
    axes: Mapping[str, Value]
    value: float
    low: float | None  # None, like ``high``: single measurement without an interval
    high: float | None
    quantity: str = ""  # of the printed figures; empty: the question's


@dataclass(frozen=True)
class PrintedComparison:
    """A printed figure and our value at the same point; None where that was not measured."""

    figure: StudyFigure
    measurement: Measurement | None

    @property
    def has_interval(self) -> bool:
        return self.measurement is not None and self.measurement.low is not None and self.measurement.high is not None

    @property
    def is_beyond(self) -> bool:
        """Whether the complete measured interval is on the wrong side of the printed figure."""
        if self.measurement is None or self.measurement.low is None or self.measurement.high is None:
            return False
        too_large = self.measurement.low > self.figure.value and not self.figure.relation.startswith(">")
        return too_large or (self.measurement.high < self.figure.value and not self.figure.relation.startswith("<"))

    @property
    def difference(self) -> str:
        """How the figure compares with our interval, or with our value where that has none."""
        if self.measurement is None:
            return "not measured here"
        value, printed, is_bound = self.measurement.value, self.figure.value, self.figure.relation[:1] in ("<", ">")
        if not self.has_interval:
            compared = f"ours is {value / printed:.2f} times the printed" if printed else f"printed is {printed:g}"
            return f"no interval: {compared}"
        if not self.is_beyond:
            return "agrees" if is_bound else "within the interval"
        bound, size = ("above", "larger") if value > printed else ("below", "smaller")
        return f"beyond the interval: ours is {f'{bound} {printed:g}' if is_bound else size}"

    @property
    def row(self) -> tuple[Any, ...]:
        """Model, GPUs, batch, context, printed, our point, ours, from, to, difference."""
        figure, measured = self.figure, self.measurement
        text = f"{'' if figure.relation == '=' else figure.relation + ' '}{figure.printed} {figure.unit}".strip()
        values = (
            (", ".join(map(str, measured.axes.values())), measured.value, measured.low, measured.high)
            if measured
            else (None,) * 4
        )
        return (figure.model, figure.gpus, figure.batch, figure.context, text, *values, self.difference)


def compare_printed(study: Study, quantity: str, measurements: Sequence[Measurement]) -> list[PrintedComparison]:
    """Return the printed figures for a quantity with the measurements of the same points."""
    if study.published is None or not quantity:
        return []
    return [
        PrintedComparison(
            figure,
            next((measurement for measurement in measurements if _is_same(study, figure, measurement.axes)), None),
        )
        for figure in load_figures()
        if figure.source == study.published.source and figure.quantity == quantity
    ]


def _is_same(study: Study, figure: StudyFigure, axes: Mapping[str, Value]) -> bool:
    rules = study.published
    assert rules is not None
    model = str(axes.get(rules.model, ""))
    return (
        rules.models.get(model, model) == figure.model
        and figure.gpus in (None, axes.get(study.program.ranks))
        and figure.batch in (None, axes.get(study.epoch.batch))
        and not any(
            axis in axes and figure.context in terms.values() and terms.get(str(axes[axis])) != figure.context
            for axis, terms in rules.context.items()
        )
    )
