"""Rules of our own: those of v0.5, for which mlperf-logging has no checker, and what its checker does not look at."""

import itertools
from collections.abc import Iterator, Sequence

from encore.results.findings import Finding, Severity
from encore.results.logs.reader import Event
from encore.results.logs.run_log import Reason, RunLog
from encore.results.rules import data_size

_RULES = "training_rules.adoc"
_RESNET_EVAL_EPOCHS = 4
# Events that no run has before it reads its data set. ``block_start`` is checked by the official rules; sample counts
# are no evidence: they are constants of the data set, which most submitted logs have before run_start; nor are
# ``tracked_stats``, by which half of the logs of v5.1 give the times of warm-up and start.
_DATA_WORK = frozenset({"epoch_start", "epoch_stop", "block_stop", "eval_start", "eval_stop", "eval_accuracy"})


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
            hint="a run on a small data set tries the code out; for a result, prepare the real data set",
            kind="small_data",
        )
        for name, logged, wanted, each in counts
        if logged is not None and wanted is not None and logged * each < wanted and logged not in size.also
    ]


def extra_findings(events: Sequence[Event], run: RunLog) -> list[Finding]:
    return [
        *_outcome(events, run),
        *_cache(events),
        *_seed(run),
        *_resnet_schedule(run),
        *_order(events),
        *_data_before_clock(events),
    ]


# Check the quality target, which 0.6.0 lacks, and that run_stop says success, which no later ruleset asks.
def _outcome(events: Sequence[Event], run: RunLog) -> Iterator[Finding]:
    if run.reason is Reason.ABORTED:
        yield Finding(
            code="run_not_successful",
            line=next((event.line for event in events if event.key == "run_stop"), None),
            rule=f"{_RULES}, quality target: the run must reach it",
            expected="run_stop with status success",
            found=run.explanation,
            hint="train until the target is reached; a run that stops before it has no time",
        )
    if run.reason is Reason.TARGET_MISSED and run.round == "v0.6":
        yield Finding(
            code="target_missed",
            line=run.quality[-1].line,
            rule=f"{_RULES}, quality target of v0.6 (not in the 0.6.0 rule files)",
            expected=", ".join(f"{target.name} {target.value:g} ({target.unit})" for target in run.targets),
            found=run.explanation,
            hint="train until the target is reached",
        )


# Check that caches were cleared before the run: the checker takes any cache_clear, anywhere.
def _cache(events: Sequence[Event]) -> Iterator[Finding]:
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
            hint="let the launcher drop the page cache (needs root), then log cache_clear true",
            severity="warning",
        )
    if clears and start and all(event.line > start.line for event in clears):
        yield Finding(
            code="cache_cleared_late",
            line=clears[0].line,
            rule=rule,
            expected="cache_clear before run_start",
            found=f"run_start in line {start.line}, cache_clear in line {clears[0].line}",
            hint="drop the cache before the program starts",
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
            hint="log seed once, from rank 0",
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
                hint="evaluate every 4 epochs",
                severity="warning",
            )
            return


# Check that run_start is not older than init_stop, nor run_stop than run_start, by their own times.
def _order(events: Sequence[Event]) -> Iterator[Finding]:
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
                hint="take both times on the same node, from the same clock",
                severity="warning",
            )


# Check that nothing read the data set before the clock started, as far as the log shows it.
def _data_before_clock(events: Sequence[Event]) -> Iterator[Finding]:
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
                hint="warm up on synthetic data, log run_start, and only then read the data set",
            )
            return


# Compare by the events' own times, or by their lines where one has none.
def _is_before(event: Event, start: Event) -> bool:
    if event.time_s is None or start.time_s is None:
        return event.line < start.line
    return event.time_s < start.time_s


_RULES_V05 = "training_rules.adoc of v0.5"
_ONCE = ("run_start", "run_stop")
_AT_LEAST_ONCE = ("train_loop", "train_epoch", "eval_start", "eval_accuracy", "eval_target")
_WORK = ("init_start", "model_hp_", "train_")


def check_v05(events: Sequence[Event], run: RunLog) -> list[Finding]:
    """Return findings about a v0.5 log; events that a logger wrote twice count once."""
    distinct = list({(event.time_s, event.key, repr(event.value)): event for event in reversed(events)}.values())
    distinct.reverse()
    by_key: dict[str, list[Event]] = {}
    for event in distinct:
        by_key.setdefault(event.key, []).append(event)
    return [*_counts(by_key), *_clock(distinct, by_key), *_evaluations(by_key, run), *_outcome_v05(run)]


def _counts(by_key: dict[str, list[Event]]) -> Iterator[Finding]:
    for key in _ONCE:
        found = by_key.get(key, [])
        if len(found) != 1:
            yield _finding(
                "clock_once",
                found[1].line if len(found) > 1 else None,
                "timing: one clock, started and stopped once",
                f"exactly one {key} event",
                f"{len(found)} of them" if found else "none",
                f"log {key} once, from rank 0",
            )
    for key in _AT_LEAST_ONCE:
        if key not in by_key:
            yield _finding("event_missing", None, "logging", f"at least one {key} event", "none", f"log {key}")
    if "run_clear_caches" not in by_key:
        yield _finding(
            "no_cache_clear",
            None,
            "caches: flush them or reboot before each run",
            "a run_clear_caches event",
            "none",
            "drop the page cache before the run and log run_clear_caches",
        )
    elif all(event.value is False for event in by_key["run_clear_caches"]):
        yield _finding(
            "cache_not_cleared",
            by_key["run_clear_caches"][0].line,
            "caches: flush them or reboot before each run",
            "run_clear_caches without a value, or true",
            "run_clear_caches false",
            "let the launcher drop the page cache (needs root)",
            "warning",
        )
    for key, hint in (
        ("run_final", "log run_final last of all"),
        ("run_set_random_seed", "log the seed used"),
    ):
        if key not in by_key:
            yield _finding("event_wanted", None, "logging", f"a {key} event", "none", hint, "warning")


# Check that the model is built in the run: v0.5 has no untimed initialisation.
def _clock(events: Sequence[Event], by_key: dict[str, list[Event]]) -> Iterator[Finding]:
    start = next(iter(by_key.get("run_start", [])), None)
    if start is None:
        return
    for clear in by_key.get("run_clear_caches", [])[:1]:
        if clear.line > start.line:
            yield _finding(
                "cache_cleared_late",
                clear.line,
                "caches: flush them before the run",
                "run_clear_caches before run_start",
                f"run_start in line {start.line}",
                "drop the cache before the program starts",
            )
    for event in events:
        if event.line >= start.line:
            break
        if event.key.startswith(_WORK):
            yield _finding(
                "data_before_clock",
                event.line,
                "timing: the clock starts before any benchmark-specific work, model construction included",
                f"no {event.key} before run_start (line {start.line})",
                f"{event.key} {start.time_s - event.time_s:.1f} s before it"
                if start.time_s and event.time_s
                else f"{event.key} before it",
                "log run_start first",
                "warning",
            )
            return
    for stop in by_key.get("run_stop", [])[:1]:
        if stop.time_s is not None and start.time_s is not None and stop.time_s <= start.time_s:
            yield _finding(
                "clock_order",
                stop.line,
                "timing",
                "run_stop after run_start",
                f"{start.time_s - stop.time_s:.3f} s before it",
                "take both times from the same clock",
            )


def _evaluations(by_key: dict[str, list[Event]], run: RunLog) -> Iterator[Finding]:
    for event in by_key.get("eval_accuracy", []):
        if not (isinstance(event.value, dict) and {"epoch", "value"} <= set(event.value)):
            yield _finding(
                "evaluation_form",
                event.line,
                "logging",
                'eval_accuracy: {"epoch": E, "value": V}',
                str(event.value)[:120],
                "log the epoch and the value",
            )
            return
    wanted = {target.value for target in run.targets}
    for event in by_key.get("eval_target", []):
        value = event.value
        if wanted and isinstance(value, int | float) and len(wanted) == 1 and value not in wanted:
            yield _finding(
                "eval_target",
                event.line,
                "quality target",
                f"eval_target {next(iter(wanted)):g}",
                f"{value:g}",
                "train to the target of the round",
            )
            return


def _outcome_v05(run: RunLog) -> Iterator[Finding]:
    if run.reason in (Reason.ABORTED, Reason.TARGET_MISSED, Reason.NO_QUALITY):
        yield _finding(
            "target_missed",
            run.quality[-1].line if run.quality else None,
            "quality target: the run must reach it",
            ", ".join(f"{target.name} {target.value:g} ({target.unit})" for target in run.targets) or "success",
            run.explanation,
            "train until the target is reached; a run that stops before it has no time",
        )


def _finding(
    code: str, line: int | None, rule: str, expected: str, found: str, hint: str, severity: Severity = "error"
) -> Finding:
    return Finding(
        code=f"v05_{code}",
        line=line,
        rule=f"{_RULES_V05}, {rule}",
        expected=expected,
        found=found,
        hint=hint,
        severity=severity,
    )
