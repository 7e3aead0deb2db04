"""Rules for v0.5, which mlperf-logging cannot check, and additional rules for later rounds."""

import itertools
import time
from collections.abc import Iterator, Sequence

from encore.results.findings import Finding, Severity
from encore.results.logs.reader import Event
from encore.results.logs.run_log import ORG_PLACEHOLDER, Reason, RunLog
from encore.results.rules import data_size, rounds_in
from encore.results.table import grouped

_RULES = "training_rules.adoc"
_RESNET_EVAL_EPOCHS = 4
# Events that cannot occur before a run reads its data set. ``block_start`` is checked by the official rules. Sample
# counts are constants, which most submitted logs contain before run_start. ``tracked_stats`` are excluded, too: half of
# the v5.1 logs use them for the times of warm-up and start.
_DATA_WORK = frozenset({"epoch_start", "epoch_stop", "block_stop", "eval_start", "eval_stop", "eval_accuracy"})
_ONCE = ("run_start", "run_stop")
_AT_LEAST_ONCE = ("train_loop", "train_epoch", "eval_start", "eval_accuracy", "eval_target")
_WORK = ("init_start", "model_hp_", "train_")
_DAY_SECONDS = 86400.0
_CACHES = "caches: flush them or reboot before each run"
_REACH = "quality target: the run must reach it"
_TRAIN_ON = "train until the target is reached"
_NO_TIME = f"{_TRAIN_ON}; a run that stops before it has no time"


def small_data_findings(run: RunLog) -> list[Finding]:
    """Find sample counts below the real data set's size; the official checker only requires the event."""
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
            expected=f"{name} of at least {minimum}",
            found=f"{logged:.0f}",
            hint="a run on a small data set tests the code only; for a result, prepare the real data set",
            kind="small_data",
        )
        for name, logged, minimum, unit in counts
        if logged is not None and minimum is not None and logged * unit < minimum and logged not in size.also
    ]


def _finding(
    code: str, line: int | None, rule: str, expected: str, found: str, hint: str, severity: Severity = "error"
) -> Finding:
    rules = f"{_RULES} of v0.5" if code.startswith("v05_") else _RULES
    return Finding(
        code=code, line=line, rule=f"{rules}, {rule}", expected=expected, found=found, hint=hint, severity=severity
    )


def extra_findings(events: Sequence[Event], run: RunLog) -> list[Finding]:
    first = {event.key: event for event in reversed(events)}
    return [
        *_outcome(run, first),
        *_cache(events, first),
        *_identity(run, first),
        *_seed_and_schedule(run),
        *_clock_order(first),
        *_data_before_clock(events, first.get("run_start")),
    ]


# Quality target, which is missing in 0.6.0, and run_stop with status success, which later rulesets do not require
def _outcome(run: RunLog, first: dict[str, Event]) -> Iterator[Finding]:
    if run.reason is Reason.ABORTED:
        yield _finding(
            "run_not_successful",
            first["run_stop"].line if "run_stop" in first else None,
            _REACH,
            "run_stop with status success",
            run.explanation,
            _NO_TIME,
        )
    if run.reason is Reason.TARGET_MISSED and run.round == "v0.6":
        yield _finding(
            "target_missed",
            run.quality[-1].line,
            "quality target of v0.6 (not in the 0.6.0 rule files)",
            _targets(run),
            run.explanation,
            _TRAIN_ON,
        )


def _targets(run: RunLog) -> str:
    return ", ".join(f"{target.name} {target.value:g} ({target.unit})" for target in run.targets)


# Check that caches were cleared before the run: the checker accepts any cache_clear event.
def _cache(events: Sequence[Event], first: dict[str, Event]) -> Iterator[Finding]:
    clears, start = [event for event in events if event.key == "cache_clear"], first.get("run_start")
    if clears and not any(event.value is True or event.value in ("true", "True", 1) for event in clears):
        yield _finding(
            "cache_not_cleared",
            clears[0].line,
            _CACHES,
            "cache_clear true",
            f"cache_clear {clears[0].value!r}",
            "let the launcher drop the page cache (needs root), then log cache_clear true",
            "warning",
        )
    if clears and start and all(event.line > start.line for event in clears):
        yield _finding(
            "cache_cleared_late",
            clears[0].line,
            _CACHES,
            "cache_clear before run_start",
            f"run_start in line {start.line}, cache_clear in line {clears[0].line}",
            "drop the cache before the program starts",
            "warning",
        )


# Values that a launcher did not set: the time of cache_clear, the submitter, and a clock of another year
def _identity(run: RunLog, first: dict[str, Event]) -> Iterator[Finding]:
    clear, start, submitter = (first.get(key) for key in ("cache_clear", "run_start", "submission_org"))
    if clear and start and clear.time_s and start.time_s and abs(start.time_s - clear.time_s) > _DAY_SECONDS:
        yield _finding(
            "cache_clear_time",
            clear.line,
            _CACHES,
            f"cache_clear on the day of run_start, {_date(start.time_s)}",
            f"cache_clear on {_date(clear.time_s)}",
            "log cache_clear when the cache is dropped",
            "warning",
        )
    if submitter and str(submitter.value).strip() in ("", ORG_PLACEHOLDER):
        yield _finding(
            "organization_unset",
            submitter.line,
            "logging: each log names its submitter",
            "the submitter in submission_org",
            f"submission_org {submitter.value!r}",
            "set it in the launcher",
            "warning",
        )
    rounds = rounds_in(start.time_s) if start and start.time_s else frozenset()
    if run.round_is_guess and rounds and run.round not in rounds:
        yield _finding(
            "date_of_another_round",
            start.line if start else None,
            "submission: logs are of the round",
            f"a date of the assumed round {run.round}",
            f"{_date(start.time_s if start and start.time_s else 0.0)}: {', '.join(sorted(rounds))}",
            "set the round with --ruleset, or check the clock",
            "warning",
        )


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


def _seed_and_schedule(run: RunLog) -> Iterator[Finding]:
    if not run.seeds and run.benchmark != "minigo":
        yield _finding(
            "no_seed",
            None,
            "random numbers: seeds from the clock or /dev/urandom, and logged",
            "a seed event",
            "none",
            "log seed once, from rank 0",
            "warning",
        )
    if run.benchmark == "resnet" and run.round in ("v0.6", "v0.7"):
        evaluated = [(point.epoch, point.line) for point in run.quality if point.epoch is not None]
        gaps = (pair for pair in itertools.pairwise(evaluated) if pair[1][0] - pair[0][0] > _RESNET_EVAL_EPOCHS)
        gap = next(gaps, None)
        if gap is not None:
            (earlier, _), (later, line) = gap
            yield _finding(
                "resnet_evaluations",
                line,
                "ResNet: evaluation every 4 epochs, offset 0 to 3",
                f"an evaluation by epoch {earlier + _RESNET_EVAL_EPOCHS:g}",
                f"none between epoch {earlier:g} and {later:g}",
                "evaluate every 4 epochs",
                "warning",
            )


# Check the order of init_start, init_stop, run_start and run_stop by their timestamps.
def _clock_order(first: dict[str, Event]) -> Iterator[Finding]:
    for earlier_key, later_key in itertools.pairwise(("init_start", "init_stop", "run_start", "run_stop")):
        earlier, later = first.get(earlier_key), first.get(later_key)
        if earlier and later and earlier.time_s and later.time_s and later.time_s < earlier.time_s:
            yield _finding(
                "clock_order",
                later.line,
                f"timing: {earlier_key} comes before {later_key}",
                f"a time not before that of {earlier_key} in line {earlier.line}",
                f"{earlier.time_s - later.time_s:.3f} s earlier",
                "take both times on the same node, from the same clock",
                "warning",
            )


# Check that the data set was not read before the clock started. All events count, since several ranks log them.
def _data_before_clock(events: Sequence[Event], start: Event | None) -> Iterator[Finding]:
    if start is None:
        return
    event = next((event for event in events if event.key in _DATA_WORK and _is_before(event, start)), None)
    if event is not None:
        yield _finding(
            "data_before_clock",
            event.line,
            "run results: the clock starts before any part of the system touches the data set",
            f"no {event.key} before run_start in line {start.line}",
            f"{event.key} before it",
            "warm up on synthetic data, log run_start, and only then read the data set",
        )


# By timestamps, or by lines if one lacks a timestamp
def _is_before(event: Event, start: Event) -> bool:
    if event.time_s is None or start.time_s is None:
        return event.line < start.line
    return event.time_s < start.time_s


# -- v0.5 -----------------------------------------------------------------------------------------------------------


def check_v05(events: Sequence[Event], run: RunLog) -> list[Finding]:
    """Return findings about a v0.5 log; duplicate events count once."""
    distinct = list({(event.time_s, event.key, repr(event.value)): event for event in reversed(events)}.values())[::-1]
    by_key = grouped(distinct, lambda event: event.key)
    first = {key: key_events[0] for key, key_events in by_key.items()}
    return [*_counts_v05(by_key), *_clock_v05(distinct, first), *_evaluations_v05(by_key, run), *_outcome_v05(run)]


def _counts_v05(by_key: dict[str, list[Event]]) -> Iterator[Finding]:
    for key in _ONCE:
        key_events = by_key.get(key, [])
        if len(key_events) != 1:
            yield _finding(
                "v05_clock_once",
                key_events[1].line if key_events else None,
                "timing: one clock, started and stopped once",
                f"exactly one {key} event",
                f"{len(key_events)} of them" if key_events else "none",
                f"log {key} once, from rank 0",
            )
    for key in _AT_LEAST_ONCE:
        if key not in by_key:
            yield _finding("v05_event_missing", None, "logging", f"at least one {key} event", "none", f"log {key}")
    if "run_clear_caches" not in by_key:
        yield _finding(
            "v05_no_cache_clear",
            None,
            _CACHES,
            "a run_clear_caches event",
            "none",
            "drop the page cache before the run and log run_clear_caches",
        )
    elif all(event.value is False for event in by_key["run_clear_caches"]):
        yield _finding(
            "v05_cache_not_cleared",
            by_key["run_clear_caches"][0].line,
            _CACHES,
            "run_clear_caches without a value, or true",
            "run_clear_caches false",
            "let the launcher drop the page cache (needs root)",
            "warning",
        )
    for key, hint in (("run_final", "log run_final last of all"), ("run_set_random_seed", "log the seed used")):
        if key not in by_key:
            yield _finding("v05_event_wanted", None, "logging", f"a {key} event", "none", hint, "warning")


# Check that the model is built during the run: v0.5 does not have an untimed initialization.
def _clock_v05(events: Sequence[Event], first: dict[str, Event]) -> Iterator[Finding]:
    start, clear, stop = (first.get(key) for key in ("run_start", "run_clear_caches", "run_stop"))
    if start is None:
        return
    if clear is not None and clear.line > start.line:
        yield _finding(
            "v05_cache_cleared_late",
            clear.line,
            "caches: flush them before the run",
            "run_clear_caches before run_start",
            f"run_start in line {start.line}",
            "drop the cache before the program starts",
        )
    early = next((event for event in events if event.line < start.line and event.key.startswith(_WORK)), None)
    if early is not None:
        earlier = f" {start.time_s - early.time_s:.1f} s" if start.time_s and early.time_s else ""
        yield _finding(
            "v05_data_before_clock",
            early.line,
            "timing: the clock starts before any benchmark-specific work, model construction included",
            f"no {early.key} before run_start (line {start.line})",
            f"{early.key}{earlier} before it",
            "log run_start first",
            "warning",
        )
    elif stop and stop.time_s is not None and start.time_s is not None and stop.time_s <= start.time_s:
        yield _finding(
            "v05_clock_order",
            stop.line,
            "timing",
            "run_stop after run_start",
            f"{start.time_s - stop.time_s:.3f} s before it",
            "take both times from the same clock",
        )


def _evaluations_v05(by_key: dict[str, list[Event]], run: RunLog) -> Iterator[Finding]:
    for event in by_key.get("eval_accuracy", []):
        if not (isinstance(event.value, dict) and {"epoch", "value"} <= set(event.value)):
            yield _finding(
                "v05_evaluation_form",
                event.line,
                "logging",
                'eval_accuracy: {"epoch": E, "value": V}',
                str(event.value)[:120],
                "log the epoch and the value",
            )
            return
    target_values = {target.value for target in run.targets}
    if len(target_values) != 1:
        return
    for event in by_key.get("eval_target", []):
        if isinstance(event.value, int | float) and event.value not in target_values:
            yield _finding(
                "v05_eval_target",
                event.line,
                "quality target",
                f"eval_target {next(iter(target_values)):g}",
                f"{event.value:g}",
                "train to the target of the round",
            )
            return


def _outcome_v05(run: RunLog) -> Iterator[Finding]:
    if run.reason in (Reason.ABORTED, Reason.TARGET_MISSED, Reason.NO_QUALITY):
        yield _finding(
            "v05_target_missed",
            run.quality[-1].line if run.quality else None,
            _REACH,
            _targets(run) or "success",
            run.explanation,
            _NO_TIME,
        )
