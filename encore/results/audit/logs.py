"""Rules on one log: start of the clock, order of the times, qualities, and consistency with its logged speed."""

import bisect
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from encore.results.audit.anomalies import OFF_THE_CLOCK, ROUND_MS, Anomaly, duration, milliseconds, starting_line
from encore.results.compliance.own_rules import small_data_findings
from encore.results.format import count_of
from encore.results.logs.run_log import EARLIEST_S, Reason, RunLog, Stated
from encore.results.logs.timing import SLACK_S, intervals_of, length_of
from encore.results.rules import BLEU_BENCHMARKS

Span = tuple[float, float, float]  # Start and end between two evaluations, and the epochs or samples in between
_IDLE_S = 120.0
_FASTER = 1.2
_MUCH_FASTER = 1.5
_LEAST_EVALUATIONS = 3
_LONG_FIRST = 5.0
_LEAST_TIMES = 6
_TRAINING = frozenset(
    {f"{name}_{edge}" for name in ("epoch", "block", "eval") for edge in ("start", "stop")} | {"train_epoch"}
)


def late_start(run: RunLog) -> Iterator[Anomaly]:
    events = [(phase.time_s, phase.line, phase.name) for phase in run.phases if phase.name in _TRAINING]
    events += [(point.time_s, point.line, "eval_accuracy") for point in run.quality if point.time_s is not None]
    if run.start_s is not None and events and min(events)[0] < run.start_s - SLACK_S:
        time_s, line, name = min(events)
        yield Anomaly(f"{duration(run.start_s - time_s)} after {name} in line {line}", run.path, starting_line(run))


def missing_epochs(run: RunLog) -> Iterator[Anomaly]:
    """Yield a log whose first epoch is later than 1; logs with only blocks may number them by their last epoch."""
    if run.benchmark in OFF_THE_CLOCK:
        # Minigo's epochs start from a checkpoint of the round.
        return
    blocks = set()
    for phase in run.phases:
        if phase.name == "block_start":
            blocks.add(phase.epoch)
        elif phase.name in ("epoch_start", "train_epoch") and phase.epoch is not None:
            if phase.epoch > 1 and not blocks & {0, 1}:
                yield Anomaly(f"the first epoch is number {phase.epoch:g}", run.path, phase.line)
            return


def fast_beginning(run: RunLog) -> Iterator[Anomaly]:
    """Yield a log that trained faster before its first evaluation than between any later two.

    Checked with and without evaluation time: some programs evaluate during training, others wait. Without evaluation
    times in the log, a long first span with one evaluation is not comparable to short spans.
    """
    spans = spans_of(run)
    if (
        spans
        and spans[0][2] > _LONG_FIRST * max(length for _, _, length in spans[1:])
        and not any(phase.name == "eval_start" for phase in run.phases)
    ):
        return
    if spans and (ratio := _ratio_to_others(run, spans, 0)) > _FASTER:
        length = length_of(run)
        unit = "samples" if run.quality[0].samples is not None or length is None else length.unit
        first = count_of(spans[0][2], unit.removesuffix("s"))
        yield Anomaly(
            f"{first} in the first {duration(spans[0][1] - spans[0][0])}, at least {ratio:.2f} times as fast as "
            "between any two later evaluations",
            run.path,
            run.quality[0].line,
        )


def fast_middle(run: RunLog) -> Iterator[Anomaly]:
    spans = spans_of(run)
    if run.benchmark in OFF_THE_CLOCK or len(spans) <= _LEAST_EVALUATIONS:
        return
    # Only the fastest of all can be faster than every other.
    later = spans[1:]
    number = max(range(len(later)), key=lambda index: later[index][2] / (later[index][1] - later[index][0]))
    if (ratio := _ratio_to_others(run, later, number)) > _MUCH_FASTER:
        start, end, _ = later[number]
        yield Anomaly(
            f"{duration(end - start)} before this evaluation, {ratio:.2f} times as fast as between any other two",
            run.path,
            run.quality[number + 1].line,
        )


def spans_of(run: RunLog, min_evaluations: int = _LEAST_EVALUATIONS) -> list[Span]:
    """Return the spans from run_start to the first evaluation and between evaluations; empty if times are missing.

    Also empty for toy data sets: the spans are shorter than the noise of a busy machine.
    """
    if small_data_findings(run):
        return []
    points = [(point.time_s, point.samples if point.samples is not None else point.epoch) for point in run.quality]
    timed = [(time_s, length) for time_s, length in points if time_s is not None and length is not None]
    if run.start_s is None or run.stop_s is None or len(timed) != len(points) or len(timed) < min_evaluations:
        return []
    edges = [(run.start_s, 0.0), *timed]
    spans = [(start, end, current - previous) for (start, previous), (end, current) in itertools.pairwise(edges)]
    if any(end <= start or length <= 0 for start, end, length in spans[1:]) or timed[0][0] <= run.start_s:
        return []
    if timed[0][1] >= 1 and max((length for _, _, length in spans[1:]), default=1) < 1:
        # DLRM's logs count the epoch that is under way.
        spans[0] = (*spans[0][:2], timed[0][1] - 1)
    return spans


# Span speed relative to the fastest other span, with or without evaluations, whichever is lower
def _ratio_to_others(run: RunLog, spans: Sequence[Span], number: int) -> float:
    ratio = _ratio_to_fastest(spans, [end - start for start, end, _ in spans], number)
    if ratio <= _FASTER:
        return ratio
    evaluations = list(intervals_of(run.phases, "eval", run.stop_s or math.inf))
    return min(ratio, _ratio_to_fastest(spans, list(seconds_without(evaluations, spans)), number))


def _ratio_to_fastest(spans: Sequence[Span], times: Sequence[float], number: int) -> float:
    rates = [
        length / seconds if seconds > 0 else math.inf for (_, _, length), seconds in zip(spans, times, strict=True)
    ]
    fastest = max(rates[:number] + rates[number + 1 :])
    return rates[number] / fastest if 0 < fastest < math.inf else 0.0


def seconds_without(intervals: Sequence[tuple[float, float]], spans: Sequence[Span]) -> Iterator[float]:
    """Yield the seconds per span outside the intervals. Both are sorted and do not overlap."""
    starts = [start for start, _ in intervals]
    for span_start, span_end, _ in spans:
        overlapping = intervals[
            max(bisect.bisect_right(starts, span_start) - 1, 0) : bisect.bisect_left(starts, span_end)
        ]
        yield (
            span_end
            - span_start
            - math.fsum(max(min(span_end, stop) - max(span_start, start), 0.0) for start, stop in overlapping)
        )


def idle_before_start(run: RunLog) -> Iterator[Anomaly]:
    ends = [phase.time_s for phase in run.phases if phase.name == "init_stop"]
    if run.start_s is not None and ends and run.start_s - max(ends) > _IDLE_S:
        yield Anomaly(f"{duration(run.start_s - max(ends))} after init_stop", run.path, starting_line(run))


def implausible_time(run: RunLog) -> Iterator[Anomaly]:
    line = starting_line(run)
    if run.reason is Reason.CLOCK:
        yield Anomaly(run.explanation, run.path, run.untimely_line or line)
    elif run.start_s is not None and run.start_s < EARLIEST_S:
        # HugeCTR's times count from the start of the process; their difference is the score.
        yield Anomaly(time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run.start_s)), run.path, line)


def clock_backwards(run: RunLog) -> Iterator[Anomaly]:
    if run.benchmark in OFF_THE_CLOCK:
        return
    events = [(phase.line, phase.time_s, phase.name) for phase in run.phases]
    if run.benchmark != "dlrm":
        # HugeCTR's converter writes the throughput of DLRM's epochs after their end.
        events += [(stated.line, stated.time_s, stated.name) for stated in run.stated]
    latest: tuple[int, float, str] | None = None
    for line, time_s, name in sorted(events):
        if name == "run_stop":
            # Rank 0 may write it first, before buffered lines of other ranks.
            continue
        if latest is not None and time_s < latest[1] - SLACK_S:
            step = duration(latest[1] - time_s)
            yield Anomaly(f"{name} {step} before {latest[2]} in line {latest[0]}", run.path, line)
            return
        # Events before run_start are checked by late_start.
        if name != "run_start" and (latest is None or time_s > latest[1]):
            latest = line, time_s, name


def round_start(run: RunLog) -> Iterator[Anomaly]:
    if run.start_s is not None and run.start_s > 0 and milliseconds(run.start_s) % ROUND_MS == 0:
        yield Anomaly(
            f"the round number {milliseconds(run.start_s)} ms: written by hand?", run.path, starting_line(run)
        )


def round_times(run: RunLog) -> Iterator[Anomaly]:
    times = [phase.time_s for phase in run.phases]
    are_whole_seconds = all(milliseconds(time_s) % 1000 == 0 for time_s in times)
    if "mlperf" not in run.dialects and len(times) >= _LEAST_TIMES and are_whole_seconds:
        yield Anomaly(f"{len(times)} times, all whole seconds", run.path, starting_line(run))


def repeated_event(name: str) -> Callable[[RunLog], Iterator[Anomaly]]:
    """Return a check for ``run_start`` or ``run_stop`` events with different times."""

    def check(run: RunLog) -> Iterator[Anomaly]:
        events = run.starts if name == "run_start" else run.stops
        line = next((line for line, seconds in events if seconds != events[0][1]), None)
        if line is not None:
            times = len({seconds for _, seconds in events})
            yield Anomaly(f"{len(events)} {name} events with {times} times: the first one counts", run.path, line)

    return check


_UNBOUNDED = ("perplexity", "entropy", "loss", "FID")  # Parts of the units of targets that are no fractions
_PERCENT = 100.0


def target_after_stop(run: RunLog) -> Iterator[Anomaly]:
    if run.stop_s is None or not run.targets or not run.converged or run.benchmark in OFF_THE_CLOCK:
        return
    times = [(point.time_s, point.line) for point in run.met if point.time_s is not None]
    if times and len(times) == len(run.met) and min(times)[0] > run.stop_s + SLACK_S:
        seconds, line = min(times)
        yield Anomaly(f"{duration(seconds - run.stop_s)} after run_stop", run.path, line)


def quality_units(run: RunLog) -> Iterator[Anomaly]:
    if run.nonnumeric:
        line, value = run.nonnumeric[0]
        yield Anomaly(f"{value} is not a number", run.path, line)
    max_quality = _PERCENT if run.benchmark in BLEU_BENCHMARKS else 1.0
    for target in run.targets:
        values = [(point.values[target.name], point.line) for point in run.quality if target.name in point.values]
        if any(unit in target.unit for unit in _UNBOUNDED):
            wrong = [entry for entry in values if entry[0] < 0]
        elif target.higher_is_better:
            wrong = [entry for entry in values if not 0 <= entry[0] <= max_quality]
        else:
            # A word error rate may start above 1, but must end below.
            wrong = [entry for entry in values if entry[0] < 0] or (
                values[-1:] if values and min(values)[0] > 1 else []
            )
        if wrong:
            percent = ": per cent?" if 1 < wrong[0][0] <= _PERCENT else ""
            yield Anomaly(f"{wrong[0][0]:g} for {target.unit}{percent}", run.path, wrong[0][1])


# From public logs of v1.0, v1.1, v3.0, v3.1 and v5.0: 99 of 100 are 1.02 or less.
_FASTER_THAN_STATED = 1.04
# Evaluations and pauses between epochs: U-Net3D has 0.57 to 0.8 in public logs. Shorter runs wait longer in relation.
_SLOWER_THAN_STATED, _LEAST_SLOWER_S = 0.55, 60.0
_LEAST_S = 3.0
# A larger ratio means another unit, such as the throughput of 1 of 6 GPUs, which is 1.2x that of 1 of 5.
_LARGEST, _LARGEST_PER_GPU = 3.0, 1.18
# Benchmarks whose last throughput is for the complete run, not since the last evaluation
_WHOLE_RUN = frozenset({"bert", "dlrm", "dlrm_dcnv2", "gpt3", "maskrcnn"})
# Throughput since the last value, evaluation included: 40 reference logs of mlcommons/training
_WITH_EVALUATION = frozenset({"gpt_oss_20b"})
# Many logs contain the throughput per GPU and count the training set in batches.
_PER_GPU = frozenset({"ssd", "retinanet"})
_MOST_GPUS_LOG2 = 12
_COCO = 117_266.0  # Images of COCO 2017 with labels: most logs of Mask R-CNN have another number of train_samples


# Logged figure, speed by timestamps relative to it, and seconds
class _Pace(NamedTuple):
    stated: float
    ratio: float
    seconds: float


def faster_than_stated(run: RunLog) -> Iterator[Anomaly]:
    if run.benchmark in OFF_THE_CLOCK:
        return
    largest = _LARGEST_PER_GPU if run.benchmark in _PER_GPU else _LARGEST

    def differs(pace: _Pace) -> bool:
        return _FASTER_THAN_STATED < pace.ratio < largest and (pace.ratio - 1) * pace.seconds > _LEAST_S

    yield from itertools.islice(itertools.chain(_wrong_pace(run, differs), _validation(run)), 1)


def slower_than_stated(run: RunLog) -> Iterator[Anomaly]:
    if run.benchmark in OFF_THE_CLOCK | _PER_GPU:
        return
    longest = 66 * run.elapsed_minutes if run.elapsed_minutes else math.inf  # Longer: evaluated after run_stop

    def differs(pace: _Pace) -> bool:
        return pace.ratio < _SLOWER_THAN_STATED and _LEAST_SLOWER_S < pace.seconds < longest

    yield from itertools.islice(_wrong_pace(run, differs), 1)


# Stated throughputs and step times that differ from the speed by the timestamps; ``differs`` compares both
def _wrong_pace(run: RunLog, differs: Callable[[_Pace], bool]) -> Iterator[Anomaly]:
    for name in ("throughput", "imgs_sec", "train_step_time"):
        figures = [figure for figure in run.stated if figure.name == name and figure.time_s >= (run.start_s or 0.0)]
        if figures and (pace := _pace(run, figures)) is not None and differs(pace):
            message = f"{name} {pace.stated:.6g} in the log, {pace.ratio:.3f} times as fast by the timestamps"
            yield Anomaly(message, run.path, figures[0].line)


# Compare the figures with the epochs or samples between evaluations and their timestamps.
def _pace(run: RunLog, figures: list[Stated]) -> _Pace | None:
    spans = spans_of(run, min_evaluations=1)
    lengths = [length for _, _, length in spans]
    if not spans or lengths[0] <= 0:
        return None
    stated = statistics.median(figure.value for figure in figures)
    # A single figure after the end, as in AMD's Llama logs of v6.0, is for the complete run.
    is_total = len(figures) == 1 and figures[0].time_s >= (run.stop_s or math.inf)
    if run.benchmark in _WHOLE_RUN or is_total:
        stated = max(stated, figures[-1].value)
        lengths, seconds = [math.fsum(lengths)], [spans[-1][1] - spans[0][0]]
    elif run.benchmark in _WITH_EVALUATION and figures[0].name == "throughput":
        seconds = [end - start for start, end, _ in spans]
    else:
        seconds = list(_training_seconds(run, spans))
    paces = [length / span_seconds for length, span_seconds in zip(lengths, seconds, strict=True) if span_seconds > 0]
    speed = (run.global_batch or 0.0) / stated if figures[0].name == "train_step_time" else stated
    if not paces or speed <= 0:
        return None
    ratio = statistics.median(paces[1:] or paces) / speed
    nearest = min((ratio * unit for unit in _unit_sizes(run)), key=lambda scaled: abs(math.log(scaled)))
    return _Pace(stated, nearest, math.fsum(seconds))


# Seconds of training per span: without evaluations, except those that overlap with training
def _training_seconds(run: RunLog, spans: Sequence[Span]) -> Iterator[float]:
    stop = run.stop_s or math.inf
    name = "block" if any(phase.name == "block_start" for phase in run.phases) else "epoch"
    without_evaluations = seconds_without(list(intervals_of(run.phases, "eval", stop)), spans)
    outside = seconds_without(list(intervals_of(run.phases, name, stop)), spans)
    for (start, end, _), without, other in zip(spans, without_evaluations, outside, strict=True):
        yield max(without, end - start - other)


# Samples per unit of the evaluations' lengths: a sample, a batch or the training set
def _unit_sizes(run: RunLog) -> list[float]:
    size, batch = max(run.train_samples or 0.0, 1.0), max(run.global_batch or 0.0, 1.0)
    if run.benchmark not in _PER_GPU:
        size = _COCO if run.benchmark == "maskrcnn" else size
        return [1.0, size, batch, size * batch]
    return [samples / 2.0**power for samples in (size, size * batch) for power in range(_MOST_GPUS_LOG2)]


# Validations that took less time by the timestamps, from eval_start on, than logged
def _validation(run: RunLog) -> Iterator[Anomaly]:
    starts = [phase.time_s for phase in run.phases if phase.name == "eval_start"]
    first = min(starts, default=math.inf)
    figures = [figure for figure in run.stated if figure.name == "validation_time" and figure.time_s >= first]
    clock = math.fsum(figure.time_s - max(start for start in starts if start <= figure.time_s) for figure in figures)
    stated = math.fsum(figure.value for figure in figures)
    if stated > clock * _FASTER_THAN_STATED and stated - clock > _LEAST_S:
        message = f"{duration(stated)} of validation in the log, {duration(clock)} by the timestamps"
        yield Anomaly(message, run.path, figures[0].line)
