"""Rules on what a log states of its own speed: samples per second, and seconds of a step and of a validation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from encore.results.audit.clocks import Span, seconds_without, spans_of
from encore.results.audit.oddities import OFF_THE_CLOCK, Oddity, in_words
from encore.results.logs.run_log import RunLog, Stated
from encore.results.logs.timing import intervals_of

_FASTER = 1.04
"""Of the public logs of v1.0, v1.1, v3.0, v3.1 and v5.0, by which it was chosen, 99 in 100 are at most 1.02."""
_LEAST_S = 3.0
_LARGEST, _LARGEST_PER_GPU = 3.0, 1.18
"""A ratio above it says that the figure is in another unit, such as that of 1 of 6 GPUs, which is 1.2 times 1 of 5."""
_WHOLE_RUN = frozenset({"bert", "dlrm", "dlrm_dcnv2", "gpt3", "maskrcnn"})
"""Their last throughput is of the whole run; that of the others is of the training since the last evaluation."""
_PER_GPU = frozenset({"ssd", "retinanet"})
"""Many of their logs state the throughput of one GPU, and count the training set in batches."""
_MOST_GPUS_LOG2 = 12
_COCO = 117_266.0
"""Images of COCO 2017 with labels: some logs of SSD count them in epochs, and give another number."""


class _Pace(NamedTuple):
    """The figure that the log states, how many times as fast the run trained by the clock, and the seconds of that."""

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


def _pace(run: RunLog, figures: list[Stated]) -> _Pace | None:
    """Compare the figures of one name with the epochs or samples of the evaluations and the seconds between them."""
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


def _training(run: RunLog, spans: Sequence[Span]) -> Iterator[float]:
    """Yield the seconds of training in each span: without evaluations, and with those that run beside the training."""
    stop = run.stop_s or math.inf
    name = "block" if any(phase.name == "block_start" for phase in run.phases) else "epoch"
    alone = seconds_without(list(intervals_of(run.phases, "eval", stop)), spans)
    outside = seconds_without(list(intervals_of(run.phases, name, stop)), spans)
    for (begin, end, _), without, other in zip(spans, alone, outside, strict=True):
        yield max(without, end - begin - other)


def _units(run: RunLog) -> list[float]:
    """Return how many samples one unit of the evaluations' lengths may be: a sample, a batch or the training set."""
    size, batch = max(run.train_samples or 0.0, 1.0), max(run.global_batch or 0.0, 1.0)
    if run.benchmark not in _PER_GPU:
        return [1.0, size, batch, size * batch, _COCO]
    return [of / 2.0**power for of in (size, size * batch) for power in range(_MOST_GPUS_LOG2)]


def _validation(run: RunLog) -> Iterator[Oddity]:
    """Yield a log whose validations took less time by the clock, from their eval_start on, than they state."""
    begins = [phase.time_s for phase in run.phases if phase.name == "eval_start"]
    first = min(begins, default=math.inf)
    figures = [each for each in run.stated if each.name == "validation_time" and each.time_s >= first]
    clock = math.fsum(each.time_s - max(begin for begin in begins if begin <= each.time_s) for each in figures)
    stated = math.fsum(each.value for each in figures)
    if stated > clock * _FASTER and stated - clock > _LEAST_S:
        found = f"{in_words(stated)} of validation by the log itself, {in_words(clock)} by its clock"
        yield Oddity(found, run.path, figures[0].line)
