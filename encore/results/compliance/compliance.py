"""Check a log against the rules of its round.

    from encore.results.compliance.compliance import check
    report = check("result_0.txt")
    for finding in report.findings:
        print(finding.line, finding.expected, finding.found, finding.hint)

v0.6 and later are checked with mlperf-logging's checker and a few additional rules; v0.5 only with rules in Encore.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path

from encore.errors import EncoreError
from encore.results.compliance import official
from encore.results.compliance.own_rules import check_v05, extra_findings, small_data_findings
from encore.results.findings import ComplianceReport, Finding, rate_of, severity_at
from encore.results.format import count_of, format_distinct
from encore.results.logs.parallel import OnRead, map_files
from encore.results.logs.reader import Event, OnDamage, read_events
from encore.results.logs.run_log import Reason, RunLog, is_nonnumeric, read_run
from encore.results.rules import ROUNDS, targets_of
from encore.results.scores.score import Score, find_sets, score_logs

_MAX_EVENTS = 500_000
# Findings about missed or different quality targets and shorter samples
_SMALLER = frozenset(
    {official.TARGET_NOT_MET, official.SEQUENCE_LENGTH, "target_missed", "v05_target_missed", "v05_eval_target",
     "cache_not_cleared", "v05_cache_not_cleared"}
)  # fmt: skip


def check(path: str | PathLike[str], ruleset: str | None = None) -> ComplianceReport:
    """Check the log at ``path`` against ``ruleset``, such as ``0.7.0``; by default the round detected from the log."""
    log = _Log(Path(path), ruleset)
    if problem := _unusable_log(log.run):
        raise problem
    return _report(log)


def read_and_check(path: Path, ruleset: str | None = None) -> tuple[RunLog, ComplianceReport]:
    """Combine ``read_run`` and ``check`` in one pass. A log that cannot be checked yields one finding."""
    log = _Log(path, ruleset)
    problem = _unusable_log(log.run)
    if problem is None:
        return log.run, _report(log)
    finding = Finding(
        line=None,
        rule="every result file of a set is a log",
        expected=problem.expected or "a readable log",
        found=problem.found,
        hint=problem.hint,
        kind="reading",
    )
    return log.run, ComplianceReport(
        path=path, ruleset=None, ruleset_found="not looked for", checker="none", findings=(finding,)
    )


def score_and_check(
    path: str | PathLike[str], ruleset: str | None = None, on_read: OnRead | None = None
) -> tuple[list[Score], list[ComplianceReport]]:
    """Score the sets at or below ``path`` and check their logs in one pass."""
    sets = list(find_sets(Path(path)))
    files = [file for _, set_files in sets for file in set_files]
    checked = map_files(partial(read_and_check, ruleset=ruleset), files, on_read)
    scores: list[Score] = []
    reports: list[ComplianceReport] = []
    for folder, set_files in sets:
        results = [*itertools.islice(checked, len(set_files))]
        scores += score_logs(folder, [run for run, _ in results])
        reports += unify_rulesets([report for _, report in results])
    return scores, reports


# A log that is read once, for its summary and for the rules, which need all events at once
class _Log:
    def __init__(self, path: Path, ruleset: str | None) -> None:
        self.events: list[Event] = []
        self.damaged: list[Finding] = []
        self.requested = parse_ruleset(ruleset)
        self.run = read_run(path, f"v{self.requested.removesuffix('.0')}" if self.requested else None, self._read)

    def _read(self, path: Path, on_damage: OnDamage) -> Iterator[Event]:
        def note(line: int, text: str) -> None:
            on_damage(line, text)
            if max(len(self.events), len(self.damaged)) < _MAX_EVENTS:
                self.damaged.append(_damaged_event(line, text))

        for number, event in enumerate(read_events(path, note)):
            if number < _MAX_EVENTS:
                self.events.append(event)
            elif number == _MAX_EVENTS:
                text = f"more than {_MAX_EVENTS} events: the rest was not checked"
                self.damaged.append(_damaged_event(event.line, text))
            yield event


def _unusable_log(run: RunLog) -> EncoreError | None:
    if run.reason is Reason.UNREADABLE:
        return EncoreError(f"cannot read {run.path}: {run.explanation}", hint="check the path and its permissions")
    if not run.events:
        damage = f": {run.explanation}" if run.reason is Reason.DAMAGED else ""
        return EncoreError(
            f"no MLPerf event in {run.path}{damage}",
            expected=":::MLLOG, :::MLL or :::MLPv0.5.0 lines",
            hint="name a result file such as result_0.txt",
        )
    return None


def _report(log: _Log) -> ComplianceReport:
    ruleset = log.requested or (f"{log.run.round.removeprefix('v')}.0" if log.run.round else None)
    findings, checker = _findings(log, ruleset)
    return ComplianceReport(
        path=log.run.path,
        ruleset=ruleset,
        ruleset_found="as asked for" if log.requested else log.run.round_found,
        ruleset_is_guess=log.run.round_is_guess,
        checker=checker,
        findings=tuple(sorted(findings, key=lambda finding: (finding.line is None, finding.line or 0))),
    )


def unify_rulesets(reports: Sequence[ComplianceReport]) -> Sequence[ComplianceReport]:
    """Return reports with a common ruleset: guessed rulesets are replaced by the most frequent guess."""
    guessed = Counter(report.ruleset for report in reports if report.ruleset_is_guess)
    if len(guessed) < 2:
        return reports
    ruleset = guessed.most_common(1)[0][0]
    source = "inferred from the other logs of the folder"
    return [
        replace(read_and_check(report.path, ruleset)[1], ruleset_found=source, ruleset_is_guess=True)
        if report.ruleset_is_guess and report.ruleset != ruleset
        else report
        for report in reports
    ]


def parse_ruleset(ruleset: str | None) -> str | None:
    """Convert ``0.7`` or ``v0.7`` to ``0.7.0``; EncoreError if the ruleset does not exist."""
    if ruleset is None:
        return None
    text = ruleset.removeprefix("v")
    text = text if text.count(".") == 2 else f"{text}.0"
    rulesets = [f"{round_.removeprefix('v')}.0" for round_ in ROUNDS]
    available = [name for name in rulesets if name == "0.5.0" or name in official.rulesets()]
    if text not in available:
        raise EncoreError(
            f"unknown ruleset {ruleset!r}",
            expected=", ".join(available),
            hint="omit --ruleset to detect it",
        )
    return text


def _findings(log: _Log, ruleset: str | None) -> tuple[list[Finding], str]:
    run, events = log.run, log.events
    if ruleset is None:
        unknown_round = Finding(
            line=None,
            rule="the rules depend on the round",
            expected="a log that identifies the round",
            found=run.round_found,
            hint="set it: --ruleset 0.7.0",
        )
        return [unknown_round, *_impossible_clock(run)], "none"
    small = small_data_findings(run)
    findings = [*log.damaged, *(list(_missing_times(events)) or _impossible_clock(run)), *_nonnumeric_quality(run)]
    if ruleset == "0.5.0":
        findings += [*check_v05(events, run), *small]
        checker = "Encore's own rules of v0.5"
    else:
        # The checker fails on text; then it is unknown whether the target was met.
        numbers = [event._replace(value=math.nan) if is_nonnumeric(event) else event for event in events]
        checked = official.check_events(numbers, ruleset, run.benchmark)
        findings += [
            _with_best_quality(finding, run)
            for finding in checked
            if not (run.nonnumeric and finding.code == official.TARGET_NOT_MET)
        ]
        findings += [*extra_findings(events, run), *small]
        checker = f"{official.version()} and Encore's own rules"
    if small and run.status == "success":
        # With toy data, the run reached its configured target, but missed the round's target and has shorter samples;
        # caches are not dropped, which needs root.
        # Runs that missed their configured target, or were stopped or killed, are not excused.
        findings = [
            replace(finding, kind="small_data") if finding.code in _SMALLER else finding for finding in findings
        ]
    rates = [(finding, rate_of("check", finding.code)) for finding in findings]
    return [
        finding if rate is None else replace(finding, rate=rate, severity=severity_at(rate, finding.severity))
        for finding, rate in rates
    ], checker


def _damaged_event(line: int, text: str) -> Finding:
    return Finding(
        line=line,
        code="damaged_event",
        rule="the log format of the round",
        expected="a complete event on the line",
        found=text[:120].strip(),
        hint="let only rank 0 write events, with one write per line",
        kind="reading",
    )


def _missing_times(events: list[Event]) -> Iterator[Finding]:
    if without_time := [event for event in events if event.time_s is None]:
        yield Finding(
            line=without_time[0].line,
            code="no_time",
            rule="the log format of the round",
            expected="time_ms, the milliseconds since 1970, in every event",
            found=f"{count_of(len(without_time), 'event')} without a time, first {without_time[0].key}",
            hint="write the events with mlperf_logging.mllog",
            kind="reading",
        )


def _impossible_clock(run: RunLog) -> Iterator[Finding]:
    # Same rule as in encore.results.logs.run_log: `score` does not return a time and `audit` reports an error
    if run.reason is Reason.CLOCK:
        yield Finding(
            line=run.untimely_line or next((line for line, _ in run.starts), None),
            code="impossible_clock",
            rule="training_rules.adoc, timing: the time from run_start to run_stop",
            expected="run_start and run_stop in milliseconds since 1970, run_stop after run_start",
            found=run.explanation,
            hint="take both times from the clock of the process that logs them",
        )


def _nonnumeric_quality(run: RunLog) -> Iterator[Finding]:
    for line, value in run.nonnumeric[:1]:
        remaining = f", and {len(run.nonnumeric) - 1} more" if len(run.nonnumeric) > 1 else ""
        yield Finding(
            line=line,
            code="nonnumeric_quality",
            rule="the log format of the round",
            expected="eval_accuracy with a number",
            found=f"{value}{remaining}",
            hint="log the value as a JSON number, not as text, null or NaN",
        )


# Add the best quality to the checker's finding about a missed target.
def _with_best_quality(finding: Finding, run: RunLog) -> Finding:
    if finding.code != official.TARGET_NOT_MET or run.round is None or run.benchmark is None:
        return finding
    # The open division has different targets, but the checker requires the closed division's targets.
    targets = run.targets or targets_of(run.round, run.benchmark, run.global_batch)
    values = [point.values for point in run.quality if targets and targets[0].name in point.values]
    if not values:
        return finding
    best = (max if targets[0].higher_is_better else min)(values, key=lambda qualities: qualities[targets[0].name])
    reached = format_distinct(best, {target.name: target.value for target in targets})
    goal = " and ".join(f"{target.name} {target.value:g} ({target.unit})" for target in targets)
    return replace(
        finding,
        expected=f"an evaluation that reaches {goal}",
        found=f"the best of {count_of(len(values), 'evaluation')} has {reached}",
    )
