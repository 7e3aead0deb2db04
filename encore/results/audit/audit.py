"""Audit scored sets of runs.

from encore.results.audit.audit import audit_path
for audit in audit_path("results/20260101T120000Z-resnet-mxnet-dgxa100"):
    for finding in audit.findings:
        print(finding.severity, finding.rule, finding.location, finding.found)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from typing_extensions import TypedDict

from encore.results.audit import declarations, logs, plausibility, published_runs, sets
from encore.results.audit.anomalies import Anomaly, Rule, per_log
from encore.results.audit.sets import copies
from encore.results.findings import Finding, FindingJson, Severity, no_error, rate_of, severity_at
from encore.results.scores.score import Score, score_folder
from encore.results.table import grouped

_ONE_CLOCK = "take every time from the clock of the process that logs it, in milliseconds since 1970"
_KEEP = "keep the log as the training wrote it; if it is lost, repeat the run"
_OWN_RUN = "run each experiment separately with a new seed, and keep the log"
_DECLARE = "declare the values of the configuration that ran, and the precision of the kernels"
_ALIKE = "run all experiments of a set with one program, configuration and system"

# Names as in data/audit_rates.json and in the findings
RULES = (
    Rule(
        name="late_start",
        meaning="an epoch, a block or an evaluation more than a second before `run_start`",
        severity="error",
        expected="run_start before the first training event",
        hint="log run_start before the first sample is read; if the log was edited, repeat the run",
        check=per_log(logs.late_start),
    ),
    Rule(
        name="missing_epochs",
        meaning="the first epoch in the log is not number 0 or 1",
        severity="error",
        expected="epochs from the first one on",
        hint=_KEEP,
        check=per_log(logs.missing_epochs),
    ),
    Rule(
        name="fast_beginning",
        meaning="training before the first evaluation more than 1.2 times as fast as between any later evaluations",
        severity="error",
        expected="the first part, which includes the start-up, no faster than the rest",
        hint="log run_start before the first sample is read; a run resumed from a checkpoint is not a complete run",
        check=per_log(logs.fast_beginning),
    ),
    Rule(
        name="fast_middle",
        meaning="training between two evaluations more than 1.5 times as fast as between any other two",
        severity="error",
        expected="a constant speed between evaluations",
        hint=_KEEP,
        check=per_log(logs.fast_middle),
    ),
    Rule(
        name="faster_than_stated",
        meaning="training or validation more than 1.04 times as fast by the clock as by the throughput, step time or "
        "validation time in the same log",
        severity="error",
        expected="the speed stated in the log",
        hint=_KEEP,
        check=per_log(logs.faster_than_stated),
    ),
    Rule(
        name="slower_than_stated",
        meaning="training for more than a minute at less than 0.55 times the throughput or step time in the same log",
        severity="warning",
        expected="the speed stated in the log",
        hint="correct the unit of the stated speed; if the log was edited, repeat the run",
        check=per_log(logs.slower_than_stated),
    ),
    Rule(
        name="idle_before_start",
        meaning="more than 2 minutes from `init_stop` to `run_start`",
        severity="warning",
        expected="run_start right after init_stop",
        hint="log init_stop at the end of the initialization, and start the clock before the data are touched",
        check=per_log(logs.idle_before_start),
    ),
    Rule(
        name="implausible_time",
        meaning="a start before 2017 or in the future, more than 60 days, or a stop that is not after the start",
        severity="error",
        expected="a time between the first round and today",
        hint=_ONE_CLOCK,
        check=per_log(logs.implausible_time),
    ),
    Rule(
        name="clock_backwards",
        meaning="an event more than a second older than one above it in the file",
        severity="error",
        expected="times that do not decrease",
        hint=_ONE_CLOCK,
        check=per_log(logs.clock_backwards),
    ),
    Rule(
        name="round_start",
        meaning="`run_start` at a multiple of 100 seconds",
        severity="error",
        expected="a time that is not a multiple of 100 s",
        hint=_KEEP,
        check=per_log(logs.round_start),
    ),
    Rule(
        name="round_times",
        meaning="all times in the log are whole seconds",
        severity="warning",
        expected="times in milliseconds",
        hint=_ONE_CLOCK,
        check=per_log(logs.round_times),
    ),
    Rule(
        name="several_starts",
        meaning="`run_start` events with different times",
        severity="warning",
        expected="one run_start",
        hint="let only rank 0 log run_start",
        check=per_log(logs.repeated_event("run_start")),
    ),
    Rule(
        name="several_stops",
        meaning="`run_stop` events with different times",
        severity="warning",
        expected="one run_stop",
        hint="let only rank 0 log run_stop",
        check=per_log(logs.repeated_event("run_stop")),
    ),
    Rule(
        name="target_after_stop",
        meaning="the only evaluations that meet the target come after `run_stop`",
        severity="error",
        expected="an evaluation that meets the target before run_stop",
        hint="log run_stop after the evaluation that met the target",
        check=per_log(logs.target_after_stop),
    ),
    Rule(
        name="quality_units",
        meaning="a quality outside the range of the metric, such as 75.9 for a fraction, or not a number",
        severity="error",
        expected="the quality in the unit of the target",
        hint="log the quality in the unit that the round's rules use",
        check=per_log(logs.quality_units),
    ),
    Rule(
        name="same_run",
        meaning="two logs with the same start and stop",
        severity="error",
        expected="a different run in each file",
        hint=_OWN_RUN,
        check=sets.same_run,
    ),
    Rule(
        name="shifted_copy",
        meaning="two logs with the same time between all events, shifted or scaled",
        severity="error",
        expected="a different run in each file",
        hint=_OWN_RUN,
        check=sets.shifted_copy,
    ),
    Rule(
        name="equal_curves",
        meaning="two logs with equal qualities in all evaluations, with at least 4 distinct values",
        severity="error",
        expected="different evaluations in each run",
        hint=_OWN_RUN,
        check=sets.equal_curves,
    ),
    Rule(
        name="equal_statements",
        meaning="two logs with equal throughputs, step and validation times, with at least 3 distinct values",
        severity="error",
        expected="different figures in each run",
        hint=_OWN_RUN,
        check=sets.equal_statements,
    ),
    Rule(
        name="similar_curves",
        meaning="two logs whose qualities differ by less than 0.22 % in all evaluations, but change much more in a run",
        severity="error",
        expected="different evaluations in each run",
        hint=_OWN_RUN,
        check=sets.similar_curves,
    ),
    Rule(
        name="equal_times",
        meaning="three or more runs of the same time, to the millisecond",
        severity="error",
        expected="runs that differ in time",
        hint=_OWN_RUN,
        check=sets.equal_times,
    ),
    Rule(
        name="copy_of_another_set",
        meaning="a log that is also in a different set of the tree, or in a folder given as `--against`",
        severity="warning",
        expected="different runs in each set",
        hint=_OWN_RUN,
    ),
    Rule(
        name="altered_copy_of_another_set",
        meaning="the same, shifted in time or with all times multiplied",
        severity="error",
        expected="different runs in each set",
        hint=_OWN_RUN,
    ),
    Rule(
        name="published_run",
        meaning="runs with the times of a public set, but in a different folder",
        severity="warning",
        expected="new runs",
        hint="state the public set of these runs",
        check=published_runs.published_run,
        in_digests=True,
    ),
    Rule(
        name="altered_published_run",
        meaning="the same with all times multiplied or on a different platform, or a run with the evaluations of a "
        "public run and such times",
        severity="error",
        expected="new runs",
        hint=_OWN_RUN,
        check=published_runs.altered_published_run,
        in_digests=True,
    ),
    Rule(
        name="published_curve",
        meaning="a log with the qualities of a public run, at least 4 distinct, but different times or a different end",
        severity="error",
        expected="evaluations of a new run",
        hint=_OWN_RUN,
        check=published_runs.published_curve,
        in_digests=True,
    ),
    Rule(
        name="equal_seeds",
        meaning="two logs with the same seed",
        severity="warning",
        expected="a different seed in each log, from the clock or /dev/urandom",
        hint="generate and log a new seed for each run",
        check=sets.equal_seeds,
    ),
    Rule(
        name="edited_outlier",
        meaning="a dropped run, 1.2 times away from the score, that starts or stops at a multiple of 100 seconds",
        severity="error",
        expected="a dropped run with times similar to the other runs",
        hint=_KEEP,
        check=sets.edited_outlier,
    ),
    Rule(
        name="outlier",
        meaning="a run that is five times as long as the other runs, or a fifth",
        severity="error",
        expected="similar run times",
        hint="look for the cause of the delay; if the times were edited, repeat the run",
        check=sets.outlier,
    ),
    Rule(
        name="different_pace",
        meaning="one run with 1.5 times the minutes per epoch of the other runs, or less than two thirds",
        severity="warning",
        expected="epochs that take about the same time in all runs",
        hint="look for the cause of the delay, or for skipped work",
        check=sets.different_pace,
    ),
    Rule(
        name="different_system",
        meaning="runs with different platforms, submitters or divisions in the same set",
        severity="error",
        expected="one system, submitter and division",
        hint=_ALIKE,
        check=sets.differing_values(
            {
                "submission_platform": attrgetter("platform"),
                "submission_org": attrgetter("org"),
                "submission_division": attrgetter("division"),
            }
        ),
    ),
    Rule(
        name="different_batch",
        meaning="runs with different global batches in the same set",
        severity="error",
        expected="one global batch",
        hint=_ALIKE,
        check=sets.differing_values(
            {"global batch": lambda run: f"{run.global_batch:g}" if run.global_batch is not None else None}
        ),
    ),
    Rule(
        name="different_hyperparameters",
        meaning="runs with different optimizer settings in the same set",
        severity="warning",
        expected="one set of hyperparameters",
        hint=_ALIKE,
        check=sets.different_hyperparameters,
    ),
    Rule(
        name="different_program",
        meaning="runs in the same set that log `run_start` from different lines of the program",
        severity="warning",
        expected="one version of the program",
        hint=_ALIKE,
        check=sets.differing_values({"run_start was logged from": attrgetter("source")}, with_line=True),
    ),
    Rule(
        name="different_format",
        meaning="runs with different dialects in the same set",
        severity="error",
        expected="one dialect",
        hint=_ALIKE,
        check=sets.differing_values({"lines in the dialect": lambda run: " and ".join(sorted(run.dialects))}),
    ),
    Rule(
        name="surplus_files",
        meaning="more result files than the round scores",
        severity="error",
        expected="the number of result files that the round requires",
        hint="keep the planned runs in order, not the best ones",
        check=sets.surplus_files,
    ),
    Rule(
        name="missing_files",
        meaning="fewer result files than the round scores",
        severity="note",
        expected="the number of result files that the round requires",
        hint="run the missing experiments",
        check=sets.missing_files,
    ),
    Rule(
        name="skipped_numbers",
        meaning="gaps in the numbers of the result files",
        severity="warning",
        expected="result_0.txt, result_1.txt ... without gaps",
        hint="submit all runs in the order in which they ran",
        check=sets.skipped_numbers,
    ),
    Rule(
        name="odd_name",
        meaning="a result file with a different name pattern",
        severity="warning",
        expected="result_0.txt, result_1.txt ...",
        hint="remove the file, or number it like the other files",
        check=sets.odd_name,
    ),
    Rule(
        name="empty_file",
        meaning="a result file without any event",
        severity="error",
        expected="a log in each result file",
        hint="remove the file, or replace it with the log of the run",
        check=per_log(sets.empty_file),
    ),
    Rule(
        name="damaged_events",
        meaning="damaged events that do not affect the time",
        severity="warning",
        expected="complete events",
        hint="let only rank 0 write events, with one write per line",
        check=per_log(sets.damaged_events),
    ),
    Rule(
        name="no_status",
        meaning="`run_stop` without a status",
        severity="note",
        expected="run_stop with status success or aborted",
        hint="log the status with run_stop",
        check=per_log(sets.no_status),
    ),
    Rule(
        name="declared_parallelism",
        meaning="a parallelism that is not a positive integer, or with a product that does not divide the number of "
        "accelerators in the system description",
        severity="error",
        expected="parallelism that divides the accelerators",
        hint=_DECLARE,
        check=declarations.declared_parallelism,
    ),
    Rule(
        name="declared_batch",
        meaning="a micro-batch times data-parallel ranks and accumulation steps that is not the global batch",
        severity="error",
        expected="micro-batch x data-parallel ranks x accumulation steps = global batch",
        hint=_DECLARE,
        check=declarations.declared_batch,
    ),
    Rule(
        name="declared_hardware",
        meaning="a precision of linear layers or attention that the accelerator's matrix units lack",
        severity="error",
        expected="a precision that the accelerator has",
        hint=_DECLARE,
        check=declarations.declared_hardware,
    ),
    Rule(
        name="above_peak",
        meaning="trained samples that need more than the peak rate of all accelerators in the system description",
        severity="warning",
        expected="at most the peak rate of the data sheet at the declared precision, else in any",
        hint="correct the number or model of the accelerators, or the unit of the samples in the log",
        check=plausibility.above_peak,
    ),
    Rule(
        name="contradicted_system",
        meaning="a system description whose accelerator model differs from the platform or the folder's name, or whose "
        "number of nodes or accelerators differs by a factor of 2 or more from those, from the batch sizes or from all "
        "public nodes with this accelerator",
        severity="warning",
        expected="one model and number of accelerators in all places",
        hint="correct the system description, or the name or batch size that differs from it",
        check=plausibility.contradicted_system,
    ),
    Rule(
        name="above_published",
        meaning="a training speed per accelerator above 1.1 times the fastest public set with the same accelerator "
        "model and at least 0.5 times the accelerators",
        severity="warning",
        expected="at most the speed of the public sets",
        hint="correct the number or model of the accelerators, the unit of the samples or the times in the log",
        check=plausibility.above_published,
        in_digests=True,
    ),
    Rule(
        name="below_published",
        meaning="a training speed per accelerator below 0.91 times the slowest public set with the same accelerator "
        "model and 0.5 to 2 times the accelerators",
        severity="note",
        expected="at least the speed of the slowest public set",
        hint="correct the number or model of the accelerators, or find the cause with encore compare",
        check=plausibility.below_published,
        in_digests=True,
    ),
    Rule(
        name="declared_script",
        meaning="a declaration that the script it names contradicts",
        severity="error",
        expected="the values of the script in `config_filename`",
        hint=_DECLARE,
        check=declarations.declared_script,
    ),
    Rule(
        name="declared_run",
        meaning="a declaration that the configuration in `run.json` contradicts",
        severity="error",
        expected="the `evidence` of run.json",
        hint=_DECLARE,
        check=declarations.declared_run,
    ),
    Rule(
        name="declared_kernels",
        meaning="a precision that the kernels or operators of a profile in the folder contradict",
        severity="error",
        expected="the lowest precision of the profiled step",
        hint=_DECLARE,
        check=declarations.declared_kernels,
    ),
    Rule(
        name="missing_config",
        meaning="a `config_filename` that is not in the tree of the submission",
        severity="warning",
        expected="the name of a submitted file",
        hint=_DECLARE,
        check=declarations.missing_config,
    ),
    Rule(
        name="unreadable_profile",
        meaning="an unreadable profile in a folder of logs that declare a precision",
        severity="warning",
        expected="a trace of torch.profiler, or cuda_gpu_kern_sum of nsys as CSV",
        hint="write the profile again: encore bench NAME --profile FILE",
        check=declarations.unreadable_profile,
    ),
)


_COPY_RULE, _ALTERED_COPY_RULE = (rule for rule in RULES if rule.check is None)
_ORDER: tuple[Severity, ...] = ("error", "warning", "note")


class AuditJson(TypedDict):
    """Findings of the audit for a run set."""

    folder: str
    round: str | None
    round_is_guess: bool
    benchmark: str | None
    runs: int
    passed: bool  # Without an error
    findings: list[FindingJson]


@dataclass(frozen=True)
class Audit:
    score: Score
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return no_error(self.findings)

    def counts(self) -> dict[Severity, int]:
        return {severity: sum(finding.severity == severity for finding in self.findings) for severity in _ORDER}

    def as_json(self) -> AuditJson:
        return {
            "folder": str(self.score.folder),
            "round": self.score.round,
            "round_is_guess": self.score.round_is_guess,
            "benchmark": self.score.benchmark,
            "runs": len(self.score.runs),
            "passed": self.passed,
            "findings": [finding.as_json() for finding in self.findings],
        }


def audit_path(path: str | Path, against: Iterable[Path] = ()) -> list[Audit]:
    """Audit every set of logs at or below ``path``, and search for copies of its logs below ``against``."""
    other_scores = [score for folder in against for score in score_folder(folder)]
    return audit_scores(score_folder(path), other_scores)


def audit_scores(scores: Sequence[Score], other_scores: Sequence[Score] = ()) -> list[Audit]:
    """Audit scored sets, including copies between sets and from ``other_scores``."""
    foreign = grouped(_find_copies(scores, other_scores), lambda pair: pair[0])
    audits = []
    for score in scores:
        findings = [*audit_score(score, in_digests=True), *(finding for _, finding in foreign.get(score.folder, []))]
        audits.append(Audit(score, tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.severity)))))
    return audits


def audit_score(score: Score, *, in_digests: bool = False) -> tuple[Finding, ...]:
    """Return the findings for one set, errors first. ``in_digests``: also search the public sets."""
    checks = [(rule, rule.check) for rule in RULES if rule.check is not None and (in_digests or not rule.in_digests)]
    findings = [_finding(rule, anomaly) for rule, check in checks for anomaly in check(score)]
    return tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.severity)))


def _finding(rule: Rule, anomaly: Anomaly) -> Finding:
    rate = rate_of("audit", rule.name)
    return Finding(
        line=anomaly.line,
        rule=rule.name,
        expected=rule.expected,
        found=anomaly.found,
        hint=rule.hint,
        severity=severity_at(rate, rule.severity),
        kind="audit",
        path=anomaly.path,
        rate=rate,
    )


# Logs that are in another set as well, with the folder of the copy
def _find_copies(scores: Sequence[Score], other_scores: Sequence[Score]) -> Iterator[tuple[Path, Finding]]:
    folders = {score.folder.resolve() for score in scores}
    separate = [score for score in other_scores if score.folder.resolve() not in folders]
    for copy, original, change in copies(run for score in (*separate, *scores) for run in score.runs):
        if copy.path.parent != original.path.parent:
            anomaly = Anomaly(f"the events of {original.path}{f', {change}' if change else ''}", copy.path)
            yield copy.path.parent, _finding(_ALTERED_COPY_RULE if change else _COPY_RULE, anomaly)
