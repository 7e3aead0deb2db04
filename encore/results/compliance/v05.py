"""The rules of v0.5, for which mlperf-logging has no checker.

They follow the text of the v0.5 rules and what the submitted logs of that round have in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from encore.results.findings import Finding, Severity
from encore.results.logs.reader import Event
from encore.results.logs.run_log import Reason, RunLog

_RULES = "training_rules.adoc of v0.5"
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
    return [*_counts(by_key), *_clock(distinct, by_key), *_evaluations(by_key, run), *_outcome(run)]


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
    for key, remedy in (
        ("run_final", "log run_final last of all"),
        ("run_set_random_seed", "log the seed used"),
    ):
        if key not in by_key:
            yield _finding("event_wanted", None, "logging", f"a {key} event", "none", remedy, "warning")


def _clock(events: Sequence[Event], by_key: dict[str, list[Event]]) -> Iterator[Finding]:
    """Check that the model is built in the run: v0.5 has no untimed initialisation."""
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


def _outcome(run: RunLog) -> Iterator[Finding]:
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
    code: str, line: int | None, rule: str, expected: str, found: str, remedy: str, severity: Severity = "error"
) -> Finding:
    return Finding(
        code=f"v05_{code}",
        line=line,
        rule=f"{_RULES}, {rule}",
        expected=expected,
        found=found,
        remedy=remedy,
        severity=severity,
    )
