"""Rules on runs that are the same run: by their seeds, their evaluations, or the seconds between their events."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from encore.results.audit.oddities import Oddity, milliseconds
from encore.results.logs.run_log import RunLog
from encore.results.scores.score import Score

_LEAST_EVALUATIONS = 4
_LEAST_EQUAL_TIMES = 3
_LEAST_FIGURES = 3
_NEARLY = 0.0022
_NEARLY_OF_CHANGE = 0.003
_LITTLE_NOISE = frozenset({"llama31_405b"})  # Its honest runs differ by a thousandth
_LEAST_BOUNDARIES = 6
_NEIGHBOURS = 50
_TOLERANCE_S = 0.0016  # Two times of a copy are each rounded to a millisecond after the shift


@dataclass(frozen=True, slots=True)
class Shape:
    """The boundaries of a run, in fractions of its time: a shift or a stretch of the clock leaves them as they are."""

    path: Path
    start_s: float
    seconds: float
    fractions: tuple[float, ...]


# Yield each log with something that an earlier one has too, and the name of that one; None is nothing.
def _again(score: Score, of: Callable[[RunLog], Hashable | None]) -> Iterator[tuple[RunLog, str]]:
    seen: dict[Hashable, str] = {}
    for run in score.runs:
        found = of(run)
        first = run.path.name if found is None else seen.setdefault(found, run.path.name)
        if first != run.path.name:
            yield run, first


def same_run(score: Score) -> Iterator[Oddity]:
    """Yield a log with the start and the stop of another one, to the millisecond."""
    for run, first in _again(score, lambda run: (run.start_s, run.stop_s) if run.start_s and run.stop_s else None):
        yield Oddity(f"the same run as {first}, to the millisecond", run.path)


def shifted_copy(score: Score) -> Iterator[Oddity]:
    """Yield a log whose events have the same distances as those of another one, at another time of day."""
    for copy, original, how in copies(score.runs):
        if how:
            yield Oddity(f"the events of {original.path.name}, {how}", copy.path)


def equal_curves(score: Score) -> Iterator[Oddity]:
    """Yield a log whose evaluations are those of another one, to the last digit."""

    def curve(run: RunLog) -> Hashable | None:
        found = tuple((point.epoch, tuple(point.values.items())) for point in run.quality)
        return found if len({values for _, values in found}) >= _LEAST_EVALUATIONS else None

    for run, first in _again(score, curve):
        yield Oddity(f"all {len(run.quality)} evaluations as in {first}", run.path, run.quality[0].line)


def equal_statements(score: Score) -> Iterator[Oddity]:
    """Yield a log that states the same figures of its speed as another one, to the last digit."""

    def figures(run: RunLog) -> Hashable | None:
        found = tuple(each.value for each in run.stated)
        return found if len(set(found)) >= _LEAST_FIGURES else None

    for run, first in _again(score, figures):
        yield Oddity(f"all {len(run.stated)} figures of its speed as in {first}", run.path, run.stated[0].line)


def similar_curves(score: Score) -> Iterator[Oddity]:
    """Yield a log whose evaluations are those of another one but for little, much less than they change by."""
    if score.benchmark in _LITTLE_NOISE:
        return
    curves = [(run, [each for point in run.quality for each in point.values.values()]) for run in score.runs]
    long = [(run, curve) for run, curve in curves if len(set(curve)) >= _LEAST_EVALUATIONS and min(curve) > 0]
    for number, (run, curve) in enumerate(long):
        most = min(_NEARLY, _NEARLY_OF_CHANGE * (max(curve) / min(curve) - 1))
        for other, theirs in long[:number]:
            if len(theirs) == len(curve) and theirs != curve and _all_within(most, curve, theirs):
                found = f"all {len(run.quality)} evaluations within {100 * most:.2g} % of {other.path.name}"
                yield Oddity(found, run.path, run.quality[0].line)
                break


def _all_within(most: float, one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(first / second - 1) < most for first, second in zip(one, other, strict=True))


def equal_times(score: Score) -> Iterator[Oddity]:
    """Yield three or more runs that took the same time, to the millisecond."""
    found = defaultdict(list)
    for run in score.runs:
        if run.start_s is not None and run.stop_s is not None and run.stop_s > run.start_s:
            found[milliseconds(run.stop_s - run.start_s)].append(run)
    for taken, runs in found.items():
        if len(runs) >= _LEAST_EQUAL_TIMES and taken % 1000:
            names = ", ".join(run.path.name for run in runs[:_LEAST_EQUAL_TIMES])
            more = f" and {len(runs) - _LEAST_EQUAL_TIMES} more" if len(runs) > _LEAST_EQUAL_TIMES else ""
            yield Oddity(f"{len(runs)} runs of {taken / 1000:.3f} s: {names}{more}", runs[-1].path)


def equal_seeds(score: Score) -> Iterator[Oddity]:
    """Yield a log with the seed of another one."""
    for run, first in _again(score, lambda run: run.seeds[0] if run.seeds else None):
        yield Oddity(f"seed {run.seeds[0]} as in {first}", run.path)


def copies(runs: Iterable[RunLog]) -> Iterator[tuple[Shape, Shape, str]]:
    """Yield each log whose events are those of an earlier one, with it and how its clock differs, if it does."""
    alike: dict[Hashable, list[Shape]] = defaultdict(list)
    for run in runs:
        shape = _shape(run)
        if shape is not None:
            alike[shape[0]].append(shape[1])
    for shapes in alike.values():
        order = {id(shape): number for number, shape in enumerate(shapes)}
        for same in _clusters(sorted(shapes, key=_middle)):
            first, *others = sorted(same, key=lambda shape: order[id(shape)])
            for copy in others:
                yield copy, first, _how(copy, first)


def _shape(run: RunLog) -> tuple[tuple[Hashable, ...], Shape] | None:
    if run.start_s is None or run.stop_s is None or run.stop_s <= run.start_s:
        return None
    events = [(phase.name, phase.epoch, phase.time_s) for phase in run.phases]
    events += [("", point.epoch, point.time_s) for point in run.quality if point.time_s is not None]
    inside = [event for event in events if event[2] > run.start_s and event[2] != run.stop_s]
    seconds = run.stop_s - run.start_s
    if len({at for _, _, at in inside}) < _LEAST_BOUNDARIES or all(milliseconds(at) % 1000 == 0 for _, _, at in inside):
        return None
    fractions = tuple((at - run.start_s) / seconds for _, _, at in inside)
    return tuple((name, epoch) for name, epoch, _ in inside), Shape(run.path, run.start_s, seconds, fractions)


def _middle(shape: Shape) -> float:
    return shape.fractions[len(shape.fractions) // 2]


# Yield the shapes that are equal; they come in the order of their middle boundary, so that equals are near.
def _clusters(shapes: Sequence[Shape]) -> Iterator[list[Shape]]:
    clusters: list[list[Shape]] = []
    for shape in shapes:
        for cluster in reversed(clusters[-_NEIGHBOURS:]):
            if _equal(shape, cluster[0]):
                cluster.append(shape)
                break
        else:
            clusters.append([shape])
    yield from (cluster for cluster in clusters if len(cluster) > 1)


def _equal(shape: Shape, other: Shape) -> bool:
    near = _TOLERANCE_S / min(shape.seconds, other.seconds)
    if abs(_middle(shape) - _middle(other)) > near:
        return False
    return all(abs(one - two) <= near for one, two in zip(shape.fractions, other.fractions, strict=True))


# How the copy's clock differs, or nothing where it does not.
def _how(copy: Shape, original: Shape) -> str:
    shift, stretch = copy.start_s - original.start_s, copy.seconds / original.seconds
    words = [f"{abs(shift):.3f} s {'later' if shift > 0 else 'earlier'}"] if abs(shift) > _TOLERANCE_S else []
    if abs(copy.seconds - original.seconds) > 2 * _TOLERANCE_S:
        words.append(f"all times multiplied by {stretch:.4f}")
    return ", ".join(words)
