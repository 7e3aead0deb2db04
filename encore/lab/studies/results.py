"""What was measured at the points of a study, with intervals, and how printed figures compare with it."""

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

_BUSY = 0.1  # share of the processors from which on others' programs are seen in a time: a rank has one of some cores


@dataclass(frozen=True)
class Drift:
    """How far the passes of a point are apart, over all points: what blocks of steps of one process cannot show."""

    cv: float  # standard deviation of a pass, as a share of the mean of a point's passes
    freedom: int


@dataclass(frozen=True)
class Result:
    study: Study
    axes: Mapping[str, Value]
    passes: Sequence[Mapping[str, Any]]  # what each pass has measured
    drift: Drift | None = None  # None: no point has more than one pass

    @property
    def found(self) -> Mapping[str, Any]:
        return self.passes[0]

    @property
    def ranks(self) -> int:
        return int(self.axes[self.study.program.ranks])

    @property
    def is_timed(self) -> bool:
        """Whether steps were timed; a search for the largest batch times none."""
        return "step_seconds" in self.found

    @property
    def step(self) -> Sample:
        """Seconds of a step, by its passes; of one pass by its blocks."""
        return self._sample([each["step_seconds"] for each in self.passes])

    def _sample(self, blocks: Sequence[Sequence[float]]) -> Sample:
        if self.drift is None:
            return Sample.of(blocks[0])
        found = Sample.of([statistics.fmean(each) for each in blocks])
        # Two passes of one point happen to be alike, and are no better for it.
        spread = max(found.cv or 0.0, self.drift.cv) * found.estimate
        return replace(found, spread=spread, spread_count=self.drift.freedom + 1)

    def steps(self, weak: bool = False) -> float:
        """Return the steps of an epoch: all images over the joint batch; with ``weak`` each device has as many."""
        joint = int(self.axes[self.study.epoch.batch]) * self.ranks
        return self.study.epoch.images * (self.ranks if weak else 1) / joint

    def epoch(self, weak: bool = False) -> Sample:
        """Return seconds of an epoch: its steps, and once what the first step takes longer than the others."""
        first = statistics.fmean(float(each["first_step_seconds"]) for each in self.passes)
        # The fixed cost has no spread of its own: that of the steps is what is known.
        fixed = max(0.0, first - self.step.estimate)
        blocks = [[value * self.steps(weak) + fixed for value in each["step_seconds"]] for each in self.passes]
        return self._sample(blocks)

    def stage(self, name: str) -> float:
        """Return the mean seconds of a stage of a step: fp_bp, wu, step (both, with waits), metric."""
        return statistics.fmean(value for each in self.passes for value in each["stages"][name])

    def operators(self, name: str) -> float | None:
        """Return seconds of the operators of a stage in a step of one device: fp, bp, wu; None: not profiled."""
        found = [float(each["operators"][name]) for each in self.passes if each.get("operators")]
        return statistics.fmean(found) if found else None

    @property
    def others(self) -> tuple[float, int] | None:
        """Cores that other programs used in the pass with most, in the mean, and all cores; None: not recorded."""
        found = [(float(each["others_cores"]), int(each["cores"])) for each in self.passes if "others_cores" in each]
        return max(found, default=None)

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs took more than a tenth of the processors while it was measured."""
        return self.others is not None and self.others[0] > _BUSY * self.others[1]

    def memory(self, when: str) -> tuple[float, float | None]:
        """Return memory in GB of device 0 and the mean of the others (None: there are none, or one process has all)."""
        first, *others = self.found["memory_mib"][when]
        unit = 2**20 / 1e9
        return first * unit, sum(others) / len(others) * unit if others else None

    @property
    def gradient_bytes(self) -> int:
        width = 2 if self.axes.get("precision") == "fp16" else 4
        return width * int(self.found["network"]["weights"])


def read(folder: Folder[Study]) -> list[Result]:
    """Return every point that was measured, if in one pass alone."""
    found = [Result(folder.study, point.axes, folder.measurements(point)) for point in folder.study.points()]
    measured = [each for each in found if each.passes]
    apart = drift(measured)
    return [replace(each, drift=apart) for each in measured]


def drift(results: Sequence[Result]) -> Drift | None:
    squares, freedom = 0.0, 0
    for each in results:
        if each.is_timed and len(each.passes) > 1:
            means = [statistics.fmean(one["step_seconds"]) for one in each.passes]
            squares += statistics.variance(means) / statistics.fmean(means) ** 2 * (len(means) - 1)
            freedom += len(means) - 1
    return Drift(math.sqrt(squares / freedom), freedom) if freedom else None


Interval = tuple[float, float | None, float | None]  # a value, and where it is from and to


def in_series(results: Sequence[Result], series: Sequence[str]) -> dict[tuple[Value, ...], list[Result]]:
    return grouped(results, lambda each: tuple(each.axes[axis] for axis in series))


def ratio(over: Sample, under: Sample) -> Interval:
    """Return over / under and its interval, which is None and None without a spread."""
    found = ratio_of(over, under)
    if found is None:
        return float("nan"), None, None
    low, high = found.interval() or (None, None)
    return found.value, low, high


def in_percent(value: float | None) -> float | None:
    return None if value is None else 100 * (value - 1)


def bounds(sample: Sample) -> tuple[float | None, float | None]:
    """Return the interval of a sample, which is None and None without a spread."""
    return interval(sample) or (None, None)


@dataclass(frozen=True)
class Ours:
    axes: Mapping[str, Value]
    value: float
    low: float | None  # None, as ``high``: a single reading, which has no interval
    high: float | None
    quantity: str = ""  # of the printed figures; empty: the question's


@dataclass(frozen=True)
class Printed:
    """A printed figure and our value at the same point; None where that was not measured."""

    figure: StudyFigure
    ours: Ours | None

    @property
    def has_interval(self) -> bool:
        return self.ours is not None and self.ours.low is not None and self.ours.high is not None

    @property
    def is_beyond(self) -> bool:
        """Whether our whole interval is on the wrong side of the figure."""
        if self.ours is None or self.ours.low is None or self.ours.high is None:
            return False
        too_large = self.ours.low > self.figure.value and not self.figure.relation.startswith(">")
        return too_large or (self.ours.high < self.figure.value and not self.figure.relation.startswith("<"))

    @property
    def difference(self) -> str:
        """How the figure compares with our interval, or with our value where that has none."""
        if self.ours is None:
            return "not measured here"
        value, printed, is_bound = self.ours.value, self.figure.value, self.figure.relation[:1] in ("<", ">")
        if not self.has_interval:
            compared = f"ours is {value / printed:.2f} times the printed" if printed else f"printed is {printed:g}"
            return f"no interval: {compared}"
        if not self.is_beyond:
            return "agrees" if is_bound else "within the interval"
        larger = value > printed
        if is_bound:
            return f"beyond the interval: ours is {'above' if larger else 'below'} {printed:g}"
        return f"beyond the interval: ours is {'larger' if larger else 'smaller'}"

    @property
    def row(self) -> tuple[Any, ...]:
        """Model, GPUs, batch, context, printed, our point, ours, from, to, difference."""
        figure, ours = self.figure, self.ours
        text = f"{'' if figure.relation == '=' else figure.relation + ' '}{figure.printed} {figure.unit}".strip()
        values = (", ".join(map(str, ours.axes.values())), ours.value, ours.low, ours.high) if ours else (None,) * 4
        return (figure.model, figure.gpus, figure.batch, figure.context, text, *values, self.difference)


def printed(study: Study, quantity: str, ours: Sequence[Ours]) -> list[Printed]:
    """Return the printed figures of a quantity, each with our value where the point is the same."""
    if study.published is None or not quantity:
        return []
    return [
        Printed(figure, next((each for each in ours if _is_same(study, figure, each.axes)), None))
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
            axis in axes and figure.context in words.values() and words.get(str(axes[axis])) != figure.context
            for axis, words in rules.context.items()
        )
    )
