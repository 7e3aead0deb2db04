"""Time per phase of a run, and training length, from the timestamps in the log.

from encore.results.logs.timing import phases_of, length_of
run = read_run("result_0.txt")
print(phases_of(run)["evaluate_s"], length_of(run))
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from encore.results.logs.run_log import Phase, Quality, RunLog
from encore.results.rules import benchmark_of

_EPOCH_STARTS = ("epoch_start", "train_epoch")
_TRAINING_STARTS = (*_EPOCH_STARTS, "block_start")
# Runs never have this many epochs: larger numbers are steps or samples.
_STEPS_FROM = {"unet3d": 10_000}
_STEPS_FROM_ELSE = 1000
_STEPS_BELOW = 100_000  # Benchmarks that count samples have larger numbers
SLACK_S = 1.0
ROUNDED_S = 0.0016  # Largest difference between equal times that are both rounded to a millisecond
MOST_POINTS = 30  # Points per plotted curve
_COUNTS_SAMPLES = frozenset({"bert"})  # NVIDIA's BERT of v0.7 writes epoch 1, and the samples trained as train_samples


# Run phases; start, train and evaluate add up to the run's time.
PHASES = (
    "init_s",  # From init_start to init_stop, off the clock
    "start_s",  # From run_start to the first epoch
    "train_s",  # On the clock, neither starting nor evaluating
    "evaluate_s",  # Evaluations, including evaluations during training
    "first_epoch_s",
    "epoch_s",  # Median epoch after the first, without evaluations
    "evaluation_s",  # One evaluation: the median
)


@dataclass(frozen=True)
class Length:
    """Training length until the target was reached."""

    value: float
    unit: str  # Epochs or samples as counted by the log, otherwise evaluations


class Mark(NamedTuple):
    """Training progress at ``seconds`` after run_start; ``evaluated``: an evaluation finished."""

    seconds: float
    length: float
    evaluated: bool = False


@dataclass(frozen=True)
class Curve:
    """Quality over minutes since run_start, for evaluations on the clock; the last one decided the run."""

    minutes: tuple[float, ...] = ()
    # As long as ``minutes``, by the names of the targets: "value", or "BBOX" and "SEGM" of Mask R-CNN.
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def phases_of(run: RunLog) -> dict[str, float]:
    """Return seconds by name in PHASES, as far as the log contains them."""
    from_init = list(itertools.dropwhile(lambda phase: phase.name != "init_start", run.phases))
    ready = next((phase for phase in from_init if phase.name == "init_stop"), None)
    durations = {"init_s": ready.time_s - from_init[0].time_s if ready else None}
    if run.start_s is not None and run.stop_s is not None:
        start, stop = run.start_s, run.stop_s
        phases = [phase for phase in run.phases if start <= phase.time_s <= stop]
        first = min((phase.time_s for phase in phases if phase.name in _TRAINING_STARTS), default=None)
        evaluations = list(intervals_of(phases, "eval", stop))
        epochs = _epochs(phases, evaluations, stop)
        durations |= {
            "start_s": first - start if first is not None else None,
            "train_s": stop - first - _total_overlap(evaluations) if first is not None else None,
            "evaluate_s": _total_overlap(evaluations) if evaluations else None,
            "first_epoch_s": epochs[0] if len(epochs) > 1 else None,
            "epoch_s": statistics.median(epochs[1:]) if len(epochs) > 1 else None,
            "evaluation_s": statistics.median(end - eval_start for eval_start, end in evaluations)
            if evaluations
            else None,
        }
    return {name: value for name, value in durations.items() if value is not None}


def mean_phases(runs: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the mean seconds per phase over the runs with that phase. A score is a mean as well: they add up to it."""
    by_name = {name: [value for phases in runs if (value := phases.get(name)) is not None] for name in PHASES}
    # Runs without evaluations on the clock count as 0 s.
    return {
        name: math.fsum(values) / (len(runs) if name == "evaluate_s" else len(values))
        for name, values in by_name.items()
        if values
    }


def length_of(run: RunLog) -> Length | None:
    """Return the epochs or samples until the evaluation that met the target, or until the last evaluation."""
    point = deciding(run)
    return None if point is None else _length_at(run, point)


def _length_at(run: RunLog, point: Quality) -> Length | None:
    logged = point.epoch
    if run.benchmark in _COUNTS_SAMPLES and (logged is None or logged <= 1):
        samples = point.samples or run.train_samples
        return Length(value=samples, unit="samples") if samples else None
    if logged is None:
        return Length(value=point.samples, unit="samples") if point.samples else _count_length(run, point)
    if logged >= _STEPS_FROM.get(run.benchmark or "", _STEPS_FROM_ELSE):
        return Length(value=logged, unit="steps or samples")
    epoch = _fractional_epoch(run, point, logged) or _zero_based_epoch(run, point, logged) or logged
    return Length(value=epoch, unit="epochs") if epoch > 0 else _count_length(run, point)


def deciding(run: RunLog) -> Quality | None:
    """Return the evaluation that ended the run: the last one on the clock.

    If no evaluation on the clock met the target, return the first that did: Minigo's checkpoints are evaluated
    later, until the first that reaches the target. If the target is unknown (open division), return the last.
    """
    met = run.met if run.targets else run.met[-1:]
    limit = math.inf if run.stop_s is None else run.stop_s + SLACK_S
    on_time = [point for point in run.quality if point.time_s is None or point.time_s <= limit]
    if run.converged and met and not any(point in on_time for point in met):
        return met[0]
    evaluations = on_time or run.quality
    return evaluations[-1] if evaluations else None


def curve_of(run: RunLog, max_points: int = MOST_POINTS) -> Curve:
    """Return quality over time, reduced to ``max_points``; keeps the first and the deciding evaluation."""
    points: list[tuple[tuple[float | None, float | None], float, dict[str, float]]] = []
    for point in run.quality:
        if run.start_s is None or point.time_s is None or point.time_s > (run.stop_s or math.inf) + SLACK_S:
            continue
        position, minutes = (point.epoch, point.samples), (point.time_s - run.start_s) / 60
        if points and points[-1][0] == position != (None, None) and not points[-1][2].keys() & point.values.keys():
            # Some logs have a separate line per evaluation metric.
            points[-1] = (position, minutes, {**points[-1][2], **point.values})
        else:
            points.append((position, minutes, dict(point.values)))
    names = tuple(points[-1][2]) if points else ()
    complete = [(minutes, values) for _, minutes, values in points if all(name in values for name in names)]
    if len(complete) > max_points:
        complete = [complete[round(number * (len(complete) - 1) / (max_points - 1))] for number in range(max_points)]
    return Curve(
        minutes=tuple(minutes for minutes, _ in complete),
        values={name: tuple(values[name] for _, values in complete) for name in names},
    )


def marks_of(run: RunLog, further: Sequence[Mark] = ()) -> list[Mark]:
    """Return increasing training progress over time, in units of ``Benchmark.points_in``.

    ``further`` are marks from other sources, such as Encore's metrics. Empty if the log counts in other units.
    """
    benchmark = benchmark_of(run.benchmark)
    start, unit = run.start_s, benchmark.points_in if benchmark else "epochs"
    if start is None:
        return []
    candidates = [*_evaluation_marks(run, unit, start), *_progress_marks(run, unit, start), *further]
    # Some logs count one batch less at an evaluation than at the end of the block before it.
    slack = max(run.global_batch or 0.0, 0.0) if unit == "samples" else 0.0
    marks: list[Mark] = []
    for mark in sorted(candidates):
        previous, last = [Mark(0.0, 0.0), Mark(0.0, 0.0), *marks][-2:]
        if mark.seconds > last.seconds and mark.length > last.length:
            marks.append(mark)
        elif marks and mark.evaluated and mark.length >= last.length - slack and mark.length > previous.length:
            marks[-1] = mark  # Time of a block's end that includes the evaluation
    return marks


def in_unit(length: Length, unit: str, train_samples: float | None, batch: float | None) -> float | None:
    """Return a length in epochs or samples, None where the log counts in neither; ``batch`` is the global one."""
    value = length.value
    if length.unit == unit:
        return value
    if length.unit == "steps or samples" and unit == "samples":
        # Samples are a multiple of the batch, but for BERT's of the millions; TPU logs count steps.
        return value * batch if batch and value % batch and value < _STEPS_BELOW else value
    by_samples = length.unit in ("samples", "steps or samples") and unit == "epochs"
    return value / train_samples if by_samples and train_samples else None


def _evaluation_marks(run: RunLog, unit: str, start: float) -> Iterator[Mark]:
    for point in run.quality:
        length = _length_at(run, point) if point.time_s is not None else None
        value = in_unit(length, unit, run.train_samples, run.global_batch) if length else None
        if value and value > 0 and point.time_s is not None:
            yield Mark(point.time_s - start, value, True)


# Progress marks between evaluations.
def _progress_marks(run: RunLog, unit: str, start: float) -> Iterator[Mark]:
    batch, steps = run.global_batch or 0.0, [progress.step for progress in run.progress if progress.step]
    # NeMo's v5.1 logs have samples in ``step``, other logs have steps.
    by_samples = batch > 1 and len(steps) > 1 and all(step % batch == 0 for step in steps)
    # 3D U-Net's logs since v3.1 have samples in a block's epoch.
    epochs, size = [progress.epoch for progress in run.progress if progress.epoch], run.train_samples or 0.0
    divisor = size if size > 1 and len(epochs) > 1 and all(epoch % size == 0 for epoch in epochs) else 1.0
    for progress in run.progress:
        samples = progress.samples or (progress.step if by_samples else None)
        if length := samples if unit == "samples" else (progress.epoch or 0.0) / divisor:
            yield Mark(progress.time_s - start, length)
    if unit == "epochs":
        epochs_started: dict[float, None] = {}
        for phase in run.phases:
            if phase.name in _EPOCH_STARTS:
                epochs_started.setdefault(phase.time_s if phase.epoch is None else phase.epoch)
                yield Mark(phase.time_s - start, len(epochs_started) - 1.0)


# Numbers of the epochs started before the evaluation.
def _started_epochs(run: RunLog, point: Quality) -> list[float | None]:
    until = math.inf if point.time_s is None else point.time_s
    return [phase.epoch for phase in run.phases if phase.name in _EPOCH_STARTS and phase.time_s <= until]


# Epochs started before the evaluation; number of evaluations for logs without epochs.
def _count_length(run: RunLog, point: Quality) -> Length:
    epochs_started = len(_started_epochs(run, point))
    return Length(
        value=float(epochs_started or run.quality.index(point) + 1), unit="epochs" if epochs_started else "evaluations"
    )


# Epochs started before the evaluation, in logs that number epochs from 0 without gaps. Such logs number evaluations
# from 1, from 0, or from -1 (NVIDIA's Transformer of v0.5).
def _zero_based_epoch(run: RunLog, point: Quality, logged: float) -> float | None:
    labels = [epoch for epoch in _started_epochs(run, point) if epoch is not None]
    is_contiguous = bool(labels) and labels == list(range(len(labels)))
    return float(len(labels)) if is_contiguous and abs(logged - labels[-1]) <= 1 else None


# Completed epochs at an evaluation inside an epoch, for logs with fractional epoch numbers. Example: NVIDIA's DLRM of
# v0.7 has 1.9 after nine tenths of epoch 1, with epochs numbered from 1.
def _fractional_epoch(run: RunLog, point: Quality, logged: float) -> float | None:
    until = math.inf if point.time_s is None else point.time_s
    # Some logs round times, and the epoch seems to end before its evaluation.
    eval_starts = [phase.time_s for phase in run.phases if phase.name == "eval_start" and phase.time_s <= until]
    until = max(eval_starts, default=until)
    names = ("epoch_start", "epoch_stop")
    bounds = [
        (phase.name, phase.epoch)
        for phase in run.phases
        if phase.name in names and phase.epoch is not None and phase.time_s <= until
    ]
    if not bounds or bounds[-1][0] == "epoch_stop":
        return None
    first, current = bounds[0][1], bounds[-1][1]
    return logged - first if first in (0, 1) and current < logged <= current + 1 else None


def intervals_of(phases: Sequence[Phase], name: str, stop: float) -> Iterator[tuple[float, float]]:
    """Yield intervals from start to end events; starts of several ranks before one end are merged."""
    start: float | None = None
    for phase in sorted(phases, key=lambda phase: phase.time_s):
        if phase.name == f"{name}_start" and start is None:
            start = phase.time_s
        elif phase.name == f"{name}_stop" and start is not None:
            yield start, phase.time_s
            start = None
    if start is not None:
        yield start, stop


def _total_overlap(intervals: Sequence[tuple[float, float]], low: float = 0.0, high: float = float("inf")) -> float:
    return sum(max(min(end, high) - max(start, low), 0.0) for start, end in intervals)


# Seconds per epoch, from start to next start, without evaluations.
def _epochs(phases: Sequence[Phase], evaluations: Sequence[tuple[float, float]], stop: float) -> list[float]:
    starts: dict[float | None, float] = {}
    for phase in phases:
        if phase.name in _EPOCH_STARTS:
            starts.setdefault(phase.epoch, phase.time_s)
    times = sorted(starts.values())
    edges = [*times, stop]
    return [end - start - _total_overlap(evaluations, start, end) for start, end in itertools.pairwise(edges)]
