"""Rules of v0.6 and later that mlperf-logging's checker does not look at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from encore.results.findings import Finding
from encore.results.logs.reader import Event
from encore.results.logs.run_log import Reason, RunLog
from encore.results.rules import data_size

_RULES = "training_rules.adoc"
_RESNET_EVAL_EPOCHS = 4
_DATA_WORK = frozenset({"epoch_start", "epoch_stop", "block_stop", "eval_start", "eval_stop", "eval_accuracy"})
"""Events that no run has before it reads its data set. ``block_start`` is checked by the official rules; sample counts
are no evidence: they are constants of the data set, which most submitted logs have before run_start; nor are
``tracked_stats``, by which half of the logs of v5.1 give the times of warm-up and start."""


def small_data_findings(run: RunLog) -> list[Finding]:
    """Find sample counts below the real data set's; the official checker asks only that there is one."""
    size = data_size(run.benchmark, run.round)
    if size is None:
        return []
    batch = run.global_batch if size.in_batches and run.global_batch else 1.0
    counts = (
        ("train_samples", run.train_samples, size.least_train or size.train, batch),
        ("eval_samples", run.eval_samples, size.least_evaluate or size.evaluate, 1.0),
    )
    return [
        Finding(
            code="small_data",
            line=None,
            rule=f"{_RULES}, data set: the benchmark's own, complete ({size.source})",
            expected=f"{name} of at least {wanted}",
            found=f"{logged:.0f}",
            remedy="a run on a small data set tries the code out; for a result, prepare the real data set",
            kind="small_data",
        )
        for name, logged, wanted, each in counts
        if logged is not None and wanted is not None and logged * each < wanted and logged not in size.also
    ]


def extra_findings(events: Sequence[Event], run: RunLog) -> list[Finding]:
    """Return findings of our own rules."""
    return [
        *_outcome(events, run),
        *_cache(events),
        *_seed(run),
        *_resnet_schedule(run),
        *_order(events),
        *_data_before_clock(events),
    ]


def _outcome(events: Sequence[Event], run: RunLog) -> Iterator[Finding]:
    """Check the quality target, which 0.6.0 lacks, and that run_stop says success, which no later ruleset asks."""
    if run.reason is Reason.ABORTED:
        yield Finding(
            code="run_not_successful",
            line=next((event.line for event in events if event.key == "run_stop"), None),
            rule=f"{_RULES}, quality target: the run must reach it",
            expected="run_stop with status success",
            found=run.explanation,
            remedy="train until the target is reached; a run that stops before it has no time",
        )
    if run.reason is Reason.TARGET_MISSED and run.round == "v0.6":
        yield Finding(
            code="target_missed",
            line=run.quality[-1].line,
            rule=f"{_RULES}, quality target of v0.6 (not in the 0.6.0 rule files)",
            expected=", ".join(f"{target.name} {target.value:g} ({target.unit})" for target in run.targets),
            found=run.explanation,
            remedy="train until the target is reached",
        )


def _cache(events: Sequence[Event]) -> Iterator[Finding]:
    """Check that caches were cleared before the run: the checker takes any cache_clear, anywhere."""
    clears = [event for event in events if event.key == "cache_clear"]
    start = next((event for event in events if event.key == "run_start"), None)
    rule = f"{_RULES}, caches: flush them or reboot before each run"
    if clears and not any(event.value is True or event.value in ("true", "True", 1) for event in clears):
        yield Finding(
            code="cache_not_cleared",
            line=clears[0].line,
            rule=rule,
            expected="cache_clear true",
            found=f"cache_clear {clears[0].value!r}",
            remedy="let the launcher drop the page cache (needs root), then log cache_clear true",
            severity="warning",
        )
    if clears and start and all(event.line > start.line for event in clears):
        yield Finding(
            code="cache_cleared_late",
            line=clears[0].line,
            rule=rule,
            expected="cache_clear before run_start",
            found=f"run_start in line {start.line}, cache_clear in line {clears[0].line}",
            remedy="drop the cache before the program starts",
            severity="warning",
        )


def _seed(run: RunLog) -> Iterator[Finding]:
    if not run.seeds and run.benchmark != "minigo":
        yield Finding(
            code="no_seed",
            line=None,
            rule=f"{_RULES}, random numbers: seeds from the clock or /dev/urandom, and logged",
            expected="a seed event",
            found="none",
            remedy="log seed once, from rank 0",
            severity="warning",
        )


def _resnet_schedule(run: RunLog) -> Iterator[Finding]:
    if run.benchmark != "resnet" or run.round not in ("v0.6", "v0.7"):
        return
    epochs = [point.epoch for point in run.quality if point.epoch is not None]
    for earlier, later in itertools.pairwise(epochs):
        if later - earlier > _RESNET_EVAL_EPOCHS:
            yield Finding(
                code="resnet_evaluations",
                line=next(point.line for point in run.quality if point.epoch == later),
                rule=f"{_RULES}, ResNet: evaluation every 4 epochs, offset 0 to 3",
                expected=f"an evaluation by epoch {earlier + _RESNET_EVAL_EPOCHS:g}",
                found=f"none between epoch {earlier:g} and {later:g}",
                remedy="evaluate every 4 epochs",
                severity="warning",
            )
            return


def _order(events: Sequence[Event]) -> Iterator[Finding]:
    """Check that run_start is not older than init_stop, nor run_stop than run_start, by their own times."""
    first: dict[str, Event] = {}
    for event in events:
        first.setdefault(event.key, event)
    for before, after in (("init_start", "init_stop"), ("init_stop", "run_start"), ("run_start", "run_stop")):
        one, two = first.get(before), first.get(after)
        if one and two and one.time_s and two.time_s and two.time_s < one.time_s:
            yield Finding(
                code="clock_order",
                line=two.line,
                rule=f"{_RULES}, timing: {before} comes before {after}",
                expected=f"a time not before that of {before} in line {one.line}",
                found=f"{one.time_s - two.time_s:.3f} s earlier",
                remedy="take both times on the same node, from the same clock",
                severity="warning",
            )


def _data_before_clock(events: Sequence[Event]) -> Iterator[Finding]:
    """Check that nothing read the data set before the clock started, as far as the log shows it."""
    start = next((event for event in events if event.key == "run_start"), None)
    if start is None:
        return
    for event in events:
        if event.key in _DATA_WORK and _is_before(event, start):
            yield Finding(
                code="data_before_clock",
                line=event.line,
                rule=f"{_RULES}, run results: the clock starts before any part of the system touches the data set",
                expected=f"no {event.key} before run_start in line {start.line}",
                found=f"{event.key} before it",
                remedy="warm up on synthetic data, log run_start, and only then read the data set",
            )
            return


def _is_before(event: Event, start: Event) -> bool:
    """Compare by the events' own times, or by their lines where one has none."""
    if event.time_s is None or start.time_s is None:
        return event.line < start.line
    return event.time_s < start.time_s
