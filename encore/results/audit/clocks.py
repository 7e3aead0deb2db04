"""Rules on the times of one log: where the clock starts, and whether it runs as clocks do."""

import bisect
import calendar
import itertools
import math
import time
from collections.abc import Iterator, Sequence

from encore.results.audit.oddities import OFF_THE_CLOCK, Oddity, duration, milliseconds, starting_line
from encore.results.compliance.own_rules import small_data_findings
from encore.results.logs.run_log import Reason, RunLog
from encore.results.logs.timing import intervals_of, length_of
from encore.results.words import count_of

Span = tuple[float, float, float]  # From one evaluation to the next: begin, end, and the epochs or samples in between
_FIRST_ROUND_S = calendar.timegm((2017, 1, 1, 0, 0, 0))
_DAY_S = 86400.0
_LONGEST_S = 60 * _DAY_S
_SLACK_S = 1.0
_IDLE_S = 120.0
_FASTER = 1.2
_MUCH_FASTER = 1.5
_LEAST_EVALUATIONS = 3
_LONG_FIRST = 5.0
_ROUND_MS = 100_000
_LEAST_TIMES = 6
_TRAINING = frozenset(
    {f"{name}_{edge}" for name in ("epoch", "block", "eval") for edge in ("start", "stop")} | {"train_epoch"}
)


def late_start(run: RunLog) -> Iterator[Oddity]:
    """Yield the earliest epoch, block or evaluation before run_start."""
    if run.start_s is None:
        return
    events = [(phase.time_s, phase.line, phase.name) for phase in run.phases if phase.name in _TRAINING]
    events += [(point.time_s, point.line, "eval_accuracy") for point in run.quality if point.time_s is not None]
    first = min(events, default=None)
    if first is not None and first[0] < run.start_s - _SLACK_S:
        found = f"{duration(run.start_s - first[0])} after {first[2]} in line {first[1]}"
        yield Oddity(found, run.path, starting_line(run))


def missing_epochs(run: RunLog) -> Iterator[Oddity]:
    """Yield a log whose first epoch is a later one than 1; blocks alone may be numbered by their last epoch."""
    if run.benchmark in OFF_THE_CLOCK:
        # Minigo's epochs start from a checkpoint of its round.
        return
    blocks = set()
    for phase in run.phases:
        if phase.name == "block_start":
            blocks.add(phase.epoch)
        elif phase.name in ("epoch_start", "train_epoch") and phase.epoch is not None:
            if phase.epoch > 1 and not blocks & {0, 1}:
                yield Oddity(f"the first epoch is number {phase.epoch:g}", run.path, phase.line)
            return


def fast_beginning(run: RunLog) -> Iterator[Oddity]:
    """Yield a log that trained faster up to its first evaluation than between any two of the others.

    With and without the evaluations' own seconds: some train while they evaluate, others wait. Where the log does
    not say when they are, a long first part with one evaluation compares with no short ones of one each.
    """
    spans = spans_of(run)
    if spans and spans[0][2] > _LONG_FIRST * max(length for _, _, length in spans[1:]) and not _has_evaluations(run):
        return
    if spans and (ratio := _above_others(run, spans, 0)) > _FASTER:
        length = length_of(run)
        unit = "samples" if run.quality[0].samples is not None or length is None else length.unit
        first = count_of(spans[0][2], unit.removesuffix("s"))
        yield Oddity(
            f"{first} in the first {duration(spans[0][1] - spans[0][0])}, at least {ratio:.2f} times as fast as "
            "between any two later evaluations",
            run.path,
            run.quality[0].line,
        )


def _has_evaluations(run: RunLog) -> bool:
    return any(phase.name == "eval_start" for phase in run.phases)


def fast_middle(run: RunLog) -> Iterator[Oddity]:
    """Yield a log that trained faster between two evaluations than in any other part, the first one aside."""
    spans = spans_of(run)
    if run.benchmark in OFF_THE_CLOCK or len(spans) <= _LEAST_EVALUATIONS:
        return
    for number in range(1, len(spans)):
        ratio = _above_others(run, spans[1:], number - 1)
        if ratio > _MUCH_FASTER:
            yield Oddity(
                f"{duration(spans[number][1] - spans[number][0])} before this evaluation, {ratio:.2f} times as fast as "
                "between any other two",
                run.path,
                run.quality[number].line,
            )
            return


def spans_of(run: RunLog, least: int = _LEAST_EVALUATIONS) -> list[Span]:
    """Return run_start to the first evaluation, and from each to the next; none where times or lengths are missing.

    Nor are there any of a run on a small data set: its parts are shorter than what a busy machine adds to one of them.
    """
    if small_data_findings(run):
        return []
    points = [(point.time_s, point.samples if point.samples is not None else point.epoch) for point in run.quality]
    known = [(at, length) for at, length in points if at is not None and length is not None]
    if run.start_s is None or run.stop_s is None or len(known) != len(points) or len(known) < least:
        return []
    edges = [(run.start_s, 0.0), *known]
    spans = [(one, two, after - before) for (one, before), (two, after) in itertools.pairwise(edges)]
    if any(two <= one or length <= 0 for one, two, length in spans[1:]) or known[0][0] <= run.start_s:
        return []
    if known[0][1] >= 1 and max((length for _, _, length in spans[1:]), default=1) < 1:
        # DLRM's logs count the epoch that is under way.
        spans[0] = (*spans[0][:2], known[0][1] - 1)
    return spans


# How many times as fast one span is as the fastest other one, with or without evaluations: the less.
def _above_others(run: RunLog, spans: Sequence[Span], number: int) -> float:
    ratio = _to_fastest(spans, [end - begin for begin, end, _ in spans], number)
    if ratio <= _FASTER:
        return ratio
    evaluations = list(intervals_of(run.phases, "eval", run.stop_s or math.inf))
    return min(ratio, _to_fastest(spans, list(seconds_without(evaluations, spans)), number))


def _to_fastest(spans: Sequence[Span], times: Sequence[float], number: int) -> float:
    rates = [
        length / seconds if seconds > 0 else math.inf for (_, _, length), seconds in zip(spans, times, strict=True)
    ]
    fastest = max(rates[:number] + rates[number + 1 :])
    return rates[number] / fastest if 0 < fastest < math.inf else 0.0


def seconds_without(intervals: Sequence[tuple[float, float]], spans: Sequence[Span]) -> Iterator[float]:
    """Yield the seconds of each span without those of the intervals in it; both are in order and do not overlap."""
    begins = [begin for begin, _ in intervals]
    for begin, end, _ in spans:
        inside = intervals[max(bisect.bisect_right(begins, begin) - 1, 0) : bisect.bisect_left(begins, end)]
        yield end - begin - math.fsum(max(min(end, stop) - max(begin, start), 0.0) for start, stop in inside)


def idle_before_start(run: RunLog) -> Iterator[Oddity]:
    """Yield a long wait between the end of the initialization and run_start."""
    ends = [phase.time_s for phase in run.phases if phase.name == "init_stop"]
    if run.start_s is not None and ends and run.start_s - max(ends) > _IDLE_S:
        yield Oddity(f"{duration(run.start_s - max(ends))} after init_stop", run.path, starting_line(run))


def implausible_time(run: RunLog) -> Iterator[Oddity]:
    """Yield a start before MLPerf or in the future, a run of months, and a clock that gives no time."""
    line = starting_line(run)
    if run.reason is Reason.CLOCK:
        yield Oddity(run.explanation, run.path, run.untimely_line or line)
        return
    if run.start_s is None:
        return
    if run.start_s < _FIRST_ROUND_S:
        unit = ": seconds where milliseconds belong" if run.start_s >= _FIRST_ROUND_S / 1000 else ""
        yield Oddity(f"{_date(run.start_s)}{unit}", run.path, line)
    elif run.start_s > time.time() + _DAY_S:
        yield Oddity(f"{_date(run.start_s)}, in the future", run.path, line)
    if run.stop_s is not None and run.stop_s - run.start_s > _LONGEST_S:
        yield Oddity(f"a run of {duration(run.stop_s - run.start_s)}", run.path, run.stops[0][0] if run.stops else line)


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) + " UTC"
    except (OverflowError, OSError, ValueError):
        return f"{seconds:.4g} s"


def clock_backwards(run: RunLog) -> Iterator[Oddity]:
    """Yield the first event in the file that is older than one above it, by its own time."""
    if run.benchmark in OFF_THE_CLOCK:
        return
    events = [(phase.line, phase.time_s, phase.name) for phase in run.phases]
    if run.benchmark != "dlrm":
        # HugeCTR's converter writes the throughput of DLRM's epochs behind their end.
        events += [(each.line, each.time_s, each.name) for each in run.stated]
    latest: tuple[int, float, str] | None = None
    for line, at, name in sorted(events):
        if name == "run_stop":
            # Rank 0 may write it first, and what others buffered comes after it.
            continue
        if latest is not None and at < latest[1] - _SLACK_S:
            back = duration(latest[1] - at)
            yield Oddity(f"{name} {back} before {latest[2]} in line {latest[0]}", run.path, line)
            return
        # What comes before run_start is for late_start to find.
        if name != "run_start" and (latest is None or at > latest[1]):
            latest = line, at, name


def round_start(run: RunLog) -> Iterator[Oddity]:
    """Yield a run_start that no clock gives once in 100,000 times."""
    if run.start_s is not None and run.start_s > 0 and milliseconds(run.start_s) % _ROUND_MS == 0:
        yield Oddity(f"the round number {milliseconds(run.start_s)} ms: written by hand?", run.path, starting_line(run))


def round_times(run: RunLog) -> Iterator[Oddity]:
    """Yield a log in which every time is a whole second, where its format has milliseconds."""
    times = [phase.time_s for phase in run.phases]
    whole = all(milliseconds(each) % 1000 == 0 for each in times)
    if "mlperf" not in run.dialects and len(times) >= _LEAST_TIMES and whole:
        yield Oddity(f"{len(times)} times, each a whole second", run.path, starting_line(run))


def several_starts(run: RunLog) -> Iterator[Oddity]:
    """Yield run_start events with different times."""
    yield from _several(run, "run_start", run.starts)


def several_stops(run: RunLog) -> Iterator[Oddity]:
    """Yield run_stop events with different times."""
    yield from _several(run, "run_stop", run.stops)


def _several(run: RunLog, name: str, events: Sequence[tuple[int, float]]) -> Iterator[Oddity]:
    distinct = {seconds for _, seconds in events}
    if len(distinct) > 1:
        line = next(line for line, seconds in events if seconds != events[0][1])
        yield Oddity(f"{len(events)} {name} events with {len(distinct)} times: the first one counts", run.path, line)
