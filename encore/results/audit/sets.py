"""Rules on the runs in a set: copies, differences and missing files."""

import json
import re
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from encore.results.audit.anomalies import OFF_THE_CLOCK, ROUND_MS, Anomaly, Check, milliseconds, starting_line
from encore.results.format import count_of, join_names
from encore.results.logs.run_log import RunLog
from encore.results.logs.timing import ROUNDED_S, length_of
from encore.results.scores.score import Score
from encore.results.table import grouped

_LEAST_EVALUATIONS, _LEAST_FIGURES, _LEAST_EQUAL_TIMES = 4, 3, 3
_NEARLY = 0.0022
_NEARLY_OF_CHANGE = 0.003
_LITTLE_NOISE = frozenset({"llama31_405b"})  # Valid runs differ by a thousandth
_LEAST_BOUNDARIES = 6
_NEIGHBOURS = 50
_TUNED = re.compile(r"(?:opt|sgd|lars|adam|lamb)_|s_optimizer$|gradient_accumulation_steps$")
_DEFERRED = "DEFERRED"  # Google's logs of v0.5 log some values later under different names
_OUTLIER, _PACE, _APART = 5.0, 1.5, 1.2
_LEAST_RUNS = 3
_SHOWN = 8


# -- copies ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """Event times of a run as fractions of its duration, which are invariant to shifting and scaling the clock."""

    path: Path
    start_s: float
    seconds: float
    events: Hashable  # Name and epoch of each event
    fractions: tuple[float, ...]

    @property
    def middle(self) -> float:
        return self.fractions[len(self.fractions) // 2]


def copies(runs: Iterable[RunLog]) -> Iterator[tuple[Shape, Shape, str]]:
    """Yield each log with the same events as an earlier log, with that log and the change of its clock."""
    for shapes in grouped(filter(None, map(_shape, runs)), lambda shape: shape.events).values():
        order = {id(shape): number for number, shape in enumerate(shapes)}
        clusters: list[list[Shape]] = []
        # Sorted by the middle event, so that equal shapes are close.
        for shape in sorted(shapes, key=lambda shape: shape.middle):
            matches = (cluster for cluster in reversed(clusters[-_NEIGHBOURS:]) if _is_same_shape(shape, cluster[0]))
            if cluster := next(matches, None):
                cluster.append(shape)
            else:
                clusters.append([shape])
        for cluster in clusters:
            first, *duplicates = sorted(cluster, key=lambda shape: order[id(shape)])
            yield from ((copy, first, _describe_change(copy, first)) for copy in duplicates)


def _shape(run: RunLog) -> Shape | None:
    if run.start_s is None or run.stop_s is None or run.stop_s <= run.start_s:
        return None
    events = [(phase.name, phase.epoch, phase.time_s) for phase in run.phases]
    events += [("", point.epoch, point.time_s) for point in run.quality if point.time_s is not None]
    timed = [event for event in events if event[2] > run.start_s and event[2] != run.stop_s]
    if len({time_s for _, _, time_s in timed}) < _LEAST_BOUNDARIES or all(
        milliseconds(time_s) % 1000 == 0 for _, _, time_s in timed
    ):
        return None
    seconds = run.stop_s - run.start_s
    fractions = tuple((time_s - run.start_s) / seconds for _, _, time_s in timed)
    return Shape(run.path, run.start_s, seconds, tuple(event[:2] for event in timed), fractions)


def _is_same_shape(shape: Shape, other: Shape) -> bool:
    tolerance = ROUNDED_S / min(shape.seconds, other.seconds)
    pairs = zip(shape.fractions, other.fractions, strict=True)
    return abs(shape.middle - other.middle) <= tolerance and all(abs(a - b) <= tolerance for a, b in pairs)


# Change of the copy's clock; empty if equal
def _describe_change(copy: Shape, original: Shape) -> str:
    shift, stretch = copy.start_s - original.start_s, copy.seconds / original.seconds
    changes = [f"{abs(shift):.3f} s {'later' if shift > 0 else 'earlier'}"] if abs(shift) > ROUNDED_S else []
    if abs(copy.seconds - original.seconds) > 2 * ROUNDED_S:
        changes.append(f"all times multiplied by {stretch:.4f}")
    return ", ".join(changes)


def shifted_copy(score: Score) -> Iterator[Anomaly]:
    for copy, original, change in copies(score.runs):
        if change:
            yield Anomaly(f"the events of {original.path.name}, {change}", copy.path)


# Logs whose value repeats an earlier log, with the name of that log; None is never a repeat
def _find_repeats(score: Score, get_value: Callable[[RunLog], Hashable | None]) -> Iterator[tuple[RunLog, str]]:
    first_names: dict[Hashable, str] = {}
    for run in score.runs:
        value = get_value(run)
        first = run.path.name if value is None else first_names.setdefault(value, run.path.name)
        if first != run.path.name:
            yield run, first


def same_run(score: Score) -> Iterator[Anomaly]:
    for run, first in _find_repeats(
        score, lambda run: (run.start_s, run.stop_s) if run.start_s and run.stop_s else None
    ):
        yield Anomaly(f"the same run as {first}, to the millisecond", run.path)


def equal_curves(score: Score) -> Iterator[Anomaly]:
    def curve(run: RunLog) -> Hashable | None:
        points = tuple((point.epoch, tuple(point.values.items())) for point in run.quality)
        return points if len({values for _, values in points}) >= _LEAST_EVALUATIONS else None

    for run, first in _find_repeats(score, curve):
        yield Anomaly(f"all {len(run.quality)} evaluations as in {first}", run.path, run.quality[0].line)


def equal_statements(score: Score) -> Iterator[Anomaly]:
    def figures(run: RunLog) -> Hashable | None:
        values = tuple(figure.value for figure in run.stated)
        return values if len(set(values)) >= _LEAST_FIGURES else None

    for run, first in _find_repeats(score, figures):
        yield Anomaly(f"all {len(run.stated)} speed figures as in {first}", run.path, run.stated[0].line)


def equal_seeds(score: Score) -> Iterator[Anomaly]:
    for run, first in _find_repeats(score, lambda run: run.seeds[0] if run.seeds else None):
        yield Anomaly(f"seed {run.seeds[0]} as in {first}", run.path)


def similar_curves(score: Score) -> Iterator[Anomaly]:
    if score.benchmark in _LITTLE_NOISE:
        return
    curves = [(run, [quality for point in run.quality for quality in point.values.values()]) for run in score.runs]
    long = [(run, curve) for run, curve in curves if len(set(curve)) >= _LEAST_EVALUATIONS and min(curve) > 0]
    for number, (run, curve) in enumerate(long):
        # Much less than the qualities themselves change by.
        tolerance = min(_NEARLY, _NEARLY_OF_CHANGE * (max(curve) / min(curve) - 1))
        for other, other_curve in long[:number]:
            is_candidate = len(other_curve) == len(curve) and other_curve != curve
            if is_candidate and all(
                abs(value / quality - 1) < tolerance for value, quality in zip(curve, other_curve, strict=True)
            ):
                message = f"all {len(run.quality)} evaluations within {100 * tolerance:.2g} % of {other.path.name}"
                yield Anomaly(message, run.path, run.quality[0].line)
                break


def equal_times(score: Score) -> Iterator[Anomaly]:
    timed = [(run, milliseconds(run.stop_s - run.start_s)) for run in score.runs if run.start_s and run.stop_s]
    for duration_ms, runs in grouped(timed, lambda timed_run: timed_run[1]).items():
        if len(runs) >= _LEAST_EQUAL_TIMES and duration_ms > 0 and duration_ms % 1000:
            names = join_names([run.path.name for run, _ in runs], _LEAST_EQUAL_TIMES)
            yield Anomaly(f"{len(runs)} runs of {duration_ms / 1000:.3f} s: {names}", runs[-1][0].path)


# -- outliers in settings and times ------------------------------------------------------------------------------------


def differing_values(values: Mapping[str, Callable[[RunLog], str | None]], *, with_line: bool = False) -> Check:
    """Return a check for runs with a value that differs from the most frequent value in the set; None is ignored."""

    def check(score: Score) -> Iterator[Anomaly]:
        for name, value in values.items():
            texts = [(run, text) for run in score.runs if run.events and (text := value(run))]
            usual = statistics.mode(text for _, text in texts) if texts else None
            for run, text in texts:
                if text != usual:
                    line = starting_line(run) if with_line else None
                    yield Anomaly(f"{name} {text}, in most runs of the set {usual}", run.path, line)

    return check


def different_hyperparameters(score: Score) -> Iterator[Anomaly]:
    def value_of(key: str, run: RunLog) -> str | None:
        text = json.dumps(run.hyperparameters.get(key), sort_keys=True)
        return None if key not in run.hyperparameters or _DEFERRED in text else text

    keys = dict.fromkeys(key for run in score.runs for key in run.hyperparameters if _TUNED.match(key))
    yield from differing_values({key: partial(value_of, key) for key in keys})(score)


def outlier(score: Score) -> Iterator[Anomaly]:
    minutes = [(run, run.minutes) for run in score.runs if run.minutes]
    for run, run_minutes in minutes:
        other_minutes = sorted(value for other, value in minutes if other is not run)
        ratio = run_minutes / other_minutes[len(other_minutes) // 2] if other_minutes else 1.0
        if not 1 / _OUTLIER < ratio < _OUTLIER:
            yield Anomaly(f"took {ratio:.4g} times as long as the other runs", run.path)


def different_pace(score: Score) -> Iterator[Anomaly]:
    lengths = [(run, length_of(run)) for run in score.converged]
    converged = [(run, length) for run, length in lengths if length is not None and length.value > 0]
    if len(converged) <= _LEAST_RUNS or score.benchmark in OFF_THE_CLOCK:
        return
    unit = statistics.mode(length.unit for _, length in converged)
    paces = [(run, (run.minutes or 0.0) / length.value) for run, length in converged if length.unit == unit]
    usual = statistics.median(pace for _, pace in paces)
    for run, pace in paces:
        ratio = pace / usual if usual > 0 else 1.0
        if not 1 / _PACE < ratio < _PACE:
            singular = unit.split(" ")[0].rstrip("s")
            yield Anomaly(f"{ratio:.4g} times the minutes per {singular} of the other runs", run.path)


def edited_outlier(score: Score) -> Iterator[Anomaly]:
    for run in score.dropped:
        if not score.score_minutes or not run.minutes or run.start_s is None or run.stop_s is None:
            continue
        ratio = run.minutes / score.score_minutes
        is_round = 0 in (milliseconds(time_s) % ROUND_MS for time_s in (run.start_s, run.stop_s))
        if is_round and not 1 / _APART < ratio < _APART and "mlperf" not in run.dialects:
            message = f"{ratio:.4g} times the score, and run_start or run_stop is a round number"
            yield Anomaly(message, run.path, starting_line(run))


# -- files ----------------------------------------------------------------------------------------------------------


# More runs than required would allow selecting the best ones.
def surplus_files(score: Score) -> Iterator[Anomaly]:
    if score.required is not None and len(score.runs) > score.required:
        yield Anomaly(count_of(len(score.runs), "result file"))


def missing_files(score: Score) -> Iterator[Anomaly]:
    if score.required is not None and len(score.runs) < score.required:
        yield Anomaly(count_of(len(score.runs), "result file"))


# Gaps in the numbers, as if some had been taken out.
def skipped_numbers(score: Score) -> Iterator[Anomaly]:
    matches = [re.fullmatch(r"result_(\d{1,6})\.txt(\.gz)?", run.path.name, re.ASCII) for run in score.runs]
    numbers = [int(match[1]) for match in matches if match is not None]
    if not numbers or None in matches:
        return
    gaps = sorted(set(range(min(*numbers, 1), max(numbers))) - set(numbers))
    if gaps:
        yield Anomaly(f"no result_ file with the number {join_names([*map(str, gaps)], _SHOWN)}")


def odd_name(score: Score) -> Iterator[Anomaly]:
    forms = [(run, re.sub(r"\d+", "0", run.path.name)) for run in score.runs]
    usual = statistics.mode(form for _, form in forms) if forms else None
    yield from (Anomaly(f"most files are named like {usual}", run.path) for run, form in forms if form != usual)


def empty_file(run: RunLog) -> Iterator[Anomaly]:
    if run.events == 0:
        yield Anomaly(run.explanation or "no MLPerf event", run.path)


def damaged_events(run: RunLog) -> Iterator[Anomaly]:
    if run.damaged_events:
        harmless = "; the time is not touched" if run.minutes is not None else ""
        yield Anomaly(f"{count_of(run.damaged_events, 'damaged event')}{harmless}", run.path)


# Success was inferred where run_stop does not state it.
def no_status(run: RunLog) -> Iterator[Anomaly]:
    if run.stops and run.status is None:
        yield Anomaly("success was inferred from the evaluations", run.path, run.stops[0][0])
