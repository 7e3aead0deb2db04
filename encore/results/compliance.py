"""Check a log against the rules of its round.

    from encore.results.compliance import check
    report = check("result_0.txt")
    for finding in report.findings:
        print(finding.line, finding.expected, finding.found, finding.remedy)

From v0.6 on mlperf-logging's checker decides, with a few rules of our own in addition; v0.5 has only our own.
"""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path

from encore.errors import EncoreError
from encore.results import official
from encore.results.compliance_v05 import check_v05
from encore.results.extra_rules import extra_findings, small_data_findings
from encore.results.findings import ComplianceReport, Finding
from encore.results.reader import Event, read_events
from encore.results.run_log import Reason, RunLog, read_run

__all__ = ["ComplianceReport", "Finding", "check", "check_log_of_many", "ruleset_of"]

_MAX_EVENTS = 500_000


def ruleset_of(round_: str | None) -> str | None:
    """Return ``v0.7`` -> ``0.7.0``."""
    return f"{round_.removeprefix('v')}.0" if round_ else None


def check(path: str | PathLike[str], ruleset: str | None = None) -> ComplianceReport:
    """Check the log at ``path`` against ``ruleset``, such as ``0.7.0``, or the one found from the log."""
    path = Path(path)
    if ruleset is not None:
        ruleset = _known(ruleset)
    run = read_run(path, f"v{ruleset.removesuffix('.0')}" if ruleset else None)
    if run.reason is Reason.UNREADABLE:
        raise EncoreError(f"cannot read {path}: {run.explanation}", remedy="check the path and its permissions")
    if run.reason is Reason.NO_EVENTS:
        raise EncoreError(
            f"no MLPerf event in {path}",
            expected=":::MLLOG, :::MLL or :::MLPv0.5.0 lines",
            remedy="name a result file such as result_0.txt",
        )
    chosen = ruleset or ruleset_of(run.round)
    findings, checker = _findings(path, run, chosen)
    return ComplianceReport(
        path=path,
        ruleset=chosen,
        ruleset_found="as asked for" if ruleset else run.round_found,
        checker=checker,
        findings=tuple(sorted(findings, key=lambda each: (each.line is None, each.line or 0))),
    )


def check_log_of_many(path: Path, ruleset: str | None = None) -> ComplianceReport:
    """Check a log as ``check`` does, but report a file that cannot be checked as one finding."""
    try:
        return check(path, ruleset)
    except EncoreError as error:
        if ruleset is not None:
            _known(ruleset)
        finding = Finding(
            line=None,
            rule="every result file of a set is a log",
            expected=error.expected or "a readable log",
            found=error.found,
            remedy=error.remedy,
            kind="reading",
        )
        return ComplianceReport(
            path=path, ruleset=None, ruleset_found="not looked for", checker="none", findings=(finding,)
        )


def _known(ruleset: str) -> str:
    text = ruleset.removeprefix("v")
    text = text if text.count(".") == 2 else f"{text}.0"
    known = ("0.5.0", *official.rulesets())
    if text not in known:
        raise EncoreError(
            f"there is no ruleset {ruleset!r}",
            expected=", ".join(known),
            remedy="leave --ruleset out to find it",
        )
    return text


def _findings(path: Path, run: RunLog, ruleset: str | None) -> tuple[list[Finding], str]:
    findings: list[Finding] = []
    if ruleset is None:
        return [_unknown_round(run)], "none"
    damaged: list[Finding] = []
    events = _events(path, damaged)
    small = small_data_findings(run)
    findings += [*damaged, *_timeless(events)]
    if ruleset == "0.5.0":
        return [
            *findings,
            *_marked(check_v05(events, run), bool(small)),
            *small,
        ], "Encore's own rules of v0.5"
    reported = [_with_best(each, run) for each in official.check_events(events, ruleset, run.benchmark)]
    findings += _marked(reported, bool(small))
    findings += _marked(extra_findings(events, run), bool(small))
    return [*findings, *small], f"{official.version()} and Encore's own rules"


def _events(path: Path, damaged: list[Finding]) -> list[Event]:
    """Return the events for the checker, which needs them all at once: at most ``_MAX_EVENTS`` of them."""

    def note(line: int, text: str) -> None:
        if len(damaged) < _MAX_EVENTS:
            damaged.append(_damaged_event(line, text))

    events: list[Event] = []
    for event in read_events(path, note):
        if len(events) == _MAX_EVENTS:
            damaged.append(_damaged_event(event.line, f"more than {_MAX_EVENTS} events: the rest was not checked"))
            break
        events.append(event)
    return events


def _damaged_event(line: int, text: str) -> Finding:
    return Finding(
        line=line,
        rule="the log format of the round",
        expected="a whole event on the line",
        found=text[:120].strip(),
        remedy="let only rank 0 write events, each as one line in one write",
        kind="reading",
    )


def _timeless(events: list[Event]) -> list[Finding]:
    first = next((event for event in events if event.time_s is None), None)
    if first is None:
        return []
    return [
        Finding(
            line=first.line,
            rule="the log format of the round",
            expected="time_ms, the milliseconds since 1970, in every event",
            found=f"{sum(event.time_s is None for event in events)} events without it, first {first.key}",
            remedy="write the events with mlperf_logging.mllog",
            kind="reading",
        )
    ]


def _marked(findings: list[Finding], small: bool) -> list[Finding]:
    """Mark findings that small data causes: a missed quality target is the data set's doing."""
    if not small:
        return findings
    about_quality = ("eval_accuracy: v['value'] >=", "eval_accuracy: v['value'] <=", "quality target")
    return [
        replace(each, kind="small_data")
        if each.kind == "rule" and any(text in each.rule for text in about_quality)
        else each
        for each in findings
    ]


def _with_best(finding: Finding, run: RunLog) -> Finding:
    """Say how good the best evaluation was, where the checker says that none is good enough."""
    if finding.line is not None or "eval_accuracy: " not in finding.rule or not run.quality or not run.targets:
        return finding
    first = run.targets[0]
    values = [point.values for point in run.quality if first.name in point.values]
    if not values:
        return finding
    best = (max if first.higher_is_better else min)(values, key=lambda each: each[first.name])
    reached = ", ".join(f"{name} {value:.5g}" for name, value in best.items())
    wanted = " and ".join(f"{target.name} {target.value:g} ({target.unit})" for target in run.targets)
    return replace(
        finding,
        expected=f"an evaluation that reaches {wanted}",
        found=f"the best of {len(values)} evaluations has {reached}",
    )


def _unknown_round(run: RunLog) -> Finding:
    return Finding(
        line=None,
        rule="each round has rules of its own",
        expected="a log that names its round",
        found=run.round_found,
        remedy="name it: --ruleset 0.7.0",
    )
