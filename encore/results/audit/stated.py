"""Rules on what a log states: its qualities, and its own speed, as samples per second or seconds of a step."""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from encore.results.audit.clocks import Span, seconds_without, spans_of
from encore.results.audit.oddities import OFF_THE_CLOCK, Oddity, duration
from encore.results.logs.run_log import RunLog, Stated
from encore.results.logs.timing import intervals_of
from encore.results.rules import BLEU_BENCHMARKS

_SLACK_S = 1.0
_UNBOUNDED = ("perplexity", "entropy", "loss", "FID")  # Parts of the units of targets that are no fractions
_PERCENT = 100.0


def target_after_stop(run: RunLog) -> Iterator[Oddity]:
    """Yield a log whose target was met by no evaluation before run_stop, but by one after it."""
    if run.stop_s is None or not run.targets or not run.converged or run.benchmark in OFF_THE_CLOCK:
        return
    met = [point for point in run.quality if all(target.met_by(point.values) for target in run.targets)]
    times = [point.time_s for point in met if point.time_s is not None]
    if met and len(times) == len(met) and min(times) > run.stop_s + _SLACK_S:
        first = min(met, key=lambda point: point.time_s or 0.0)
        yield Oddity(f"{duration(min(times) - run.stop_s)} after run_stop", run.path, first.line)


def quality_units(run: RunLog) -> Iterator[Oddity]:
    """Yield a quality outside of what its metric can be, such as per cent in place of a fraction."""
    most = _PERCENT if run.benchmark in BLEU_BENCHMARKS else 1.0
    for target in run.targets:
        values = [(point.values[target.name], point.line) for point in run.quality if target.name in point.values]
        if any(unit in target.unit for unit in _UNBOUNDED):
            wrong = [each for each in values if each[0] < 0]
        elif target.higher_is_better:
            wrong = [each for each in values if not 0 <= each[0] <= most]
        else:
            # A word error rate may begin above 1, and ends below it.
            wrong = [each for each in values if each[0] < 0] or (values[-1:] if values and min(values)[0] > 1 else [])
        if wrong:
            percent = ": per cent?" if 1 < wrong[0][0] <= _PERCENT else ""
            yield Oddity(f"{wrong[0][0]:g} for {target.unit}{percent}", run.path, wrong[0][1])


# Of the public logs of v1.0, v1.1, v3.0, v3.1 and v5.0, by which it was chosen, 99 in 100 are at most 1.02.
_FASTER = 1.04
_LEAST_S = 3.0
# A ratio above it says that the figure is in another unit, such as that of 1 of 6 GPUs, which is 1.2 times 1 of 5.
_LARGEST, _LARGEST_PER_GPU = 3.0, 1.18
# Their last throughput is of the whole run; that of the others is of the training since the last evaluation.
_WHOLE_RUN = frozenset({"bert", "dlrm", "dlrm_dcnv2", "gpt3", "maskrcnn"})
# Many of their logs state the throughput of one GPU, and count the training set in batches.
_PER_GPU = frozenset({"ssd", "retinanet"})
_MOST_GPUS_LOG2 = 12
_COCO = 117_266.0  # Images of COCO 2017 with labels: some logs of SSD count them in epochs, and give another number


# The figure that the log states, how many times as fast the run trained by the clock, and the seconds of that.
class _Pace(NamedTuple):
    stated: float
    ratio: float
    seconds: float


def faster_than_stated(run: RunLog) -> Iterator[Oddity]:
    """Yield a log in which training or validation took less time than the figures of the log itself say."""
    if run.benchmark in OFF_THE_CLOCK:
        return
    largest = _LARGEST_PER_GPU if run.benchmark in _PER_GPU else _LARGEST
    for name in ("throughput", "imgs_sec", "train_step_time"):
        figures = [each for each in run.stated if each.name == name and each.time_s >= (run.start_s or 0.0)]
        pace = _pace(run, figures) if figures else None
        if pace is not None and _FASTER < pace.ratio < largest and (pace.ratio - 1) * pace.seconds > _LEAST_S:
            found = f"{name} {pace.stated:.6g} by the log itself, {pace.ratio:.3f} times as fast by its clock"
            yield Oddity(found, run.path, figures[0].line)
            return
    yield from _validation(run)


# Compare the figures of one name with the epochs or samples of the evaluations and the seconds between them.
def _pace(run: RunLog, figures: list[Stated]) -> _Pace | None:
    spans = spans_of(run, least=1)
    lengths = [length for _, _, length in spans]
    if not spans or lengths[0] <= 0:
        return None
    stated = statistics.median(each.value for each in figures)
    if run.benchmark in _WHOLE_RUN:
        stated = max(stated, figures[-1].value)
        lengths, seconds = [math.fsum(lengths)], [spans[-1][1] - spans[0][0]]
    else:
        seconds = list(_training(run, spans))
    paces = [length / taken for length, taken in zip(lengths, seconds, strict=True) if taken > 0]
    speed = (run.global_batch or 0.0) / stated if figures[0].name == "train_step_time" else stated
    if not paces or speed <= 0:
        return None
    ratio = statistics.median(paces[1:] or paces) / speed
    nearest = min((ratio * unit for unit in _units(run)), key=lambda each: abs(math.log(each)))
    return _Pace(stated, nearest, math.fsum(seconds))


# Yield the seconds of training in each span: without evaluations, and with those that run during the training.
def _training(run: RunLog, spans: Sequence[Span]) -> Iterator[float]:
    stop = run.stop_s or math.inf
    name = "block" if any(phase.name == "block_start" for phase in run.phases) else "epoch"
    alone = seconds_without(list(intervals_of(run.phases, "eval", stop)), spans)
    outside = seconds_without(list(intervals_of(run.phases, name, stop)), spans)
    for (begin, end, _), without, other in zip(spans, alone, outside, strict=True):
        yield max(without, end - begin - other)


# How many samples one unit of the evaluations' lengths may be: a sample, a batch or the training set.
def _units(run: RunLog) -> list[float]:
    size, batch = max(run.train_samples or 0.0, 1.0), max(run.global_batch or 0.0, 1.0)
    if run.benchmark not in _PER_GPU:
        return [1.0, size, batch, size * batch, _COCO]
    return [of / 2.0**power for of in (size, size * batch) for power in range(_MOST_GPUS_LOG2)]


# Yield a log whose validations took less time by the clock, from their eval_start on, than they state.
def _validation(run: RunLog) -> Iterator[Oddity]:
    begins = [phase.time_s for phase in run.phases if phase.name == "eval_start"]
    first = min(begins, default=math.inf)
    figures = [each for each in run.stated if each.name == "validation_time" and each.time_s >= first]
    clock = math.fsum(each.time_s - max(begin for begin in begins if begin <= each.time_s) for each in figures)
    stated = math.fsum(each.value for each in figures)
    if stated > clock * _FASTER and stated - clock > _LEAST_S:
        found = f"{duration(stated)} of validation by the log itself, {duration(clock)} by its clock"
        yield Oddity(found, run.path, figures[0].line)
