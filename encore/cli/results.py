"""``encore score``, ``check``, ``audit`` and ``compare``: result logs read and judged."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.padding import Padding

from encore.cli import extensions, options
from encore.cli.layout import console, minutes_text, reading, say, show, text, write_json
from encore.errors import EncoreError, ExitCode
from encore.files import is_archive, unpacked
from encore.results.audit.audit import Audit, audit_path, audit_score
from encore.results.compare.compare import Comparison, ComparisonJson, Verdict, compare_with, format_certainty
from encore.results.compare.compare import compare as compare_named
from encore.results.compare.expected import LossVerdict
from encore.results.compare.explain import Difference, explain
from encore.results.compare.nearest import AS_GIVEN
from encore.results.compare.run_set import load_run_set
from encore.results.compliance.compliance import check as check_alone
from encore.results.compliance.compliance import parse_ruleset, score_and_check
from encore.results.compliance.convergence import FIRST_RULESET, Convergence, Outcome, convergence_of, report_of
from encore.results.findings import FORMATS, ComplianceReport, Finding, ReportJson
from encore.results.format import count_of, figure, round_of
from encore.results.scores.power import Energy, energy_of
from encore.results.scores.score import Score, ScoreJson, find_sets, judge_folder, official_score_text
from encore.results.table import Table, grouped

_PLACES = 3
_COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}

# Names of logs, of scaling.json and system descriptions, and of measured power.
_SCORED = re.compile(r"\.(?:txt|log|out|json|csv)(?:\.gz)?$", re.IGNORECASE)

# Score, audit findings and energy for a run set.
_Shown = tuple[Score, Sequence[Finding], Energy | None]

PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="A log, a folder of logs, or a tree.")]


class ScoredSet(ScoreJson):
    """Score of a run set by the rules of its round."""

    energy: Energy | None  # Only with power logs


class CheckedSet(ReportJson):
    """All findings about a set."""

    convergence: Convergence  # Comparison with the reference convergence points


class Compared(ComparisonJson):
    """A run set compared with a submission or a second run set."""

    noise: list[dict[str, Any]]  # Losses and evaluations of the runs, compared with the other side
    loss_curve: LossVerdict | None  # Training losses so far, also of unfinished runs; null without losses on one side


class Explained(Compared):
    """Additional fields if there is a second side, with the causes of differences."""

    differences: tuple[Difference, ...]  # The heaviest first
    unknown: tuple[str, ...]  # Causes that could not be checked


def score(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A log, a folder or tree of logs, or an archive.")],
    round_: Annotated[str | None, typer.Option("--round", help="Score by this round's rules, such as v0.7.")] = None,
    as_json: options.Json = False,
    as_csv: options.Csv = False,
) -> None:
    """Score result logs by the rules of their round. JSON: an object for one run set, a list for a tree.

    Exits with 1 if a log has impossible times or a quality that is not a number.

    Examples:

      encore score results/20260101T120000Z-resnet-mxnet-cpu

      encore score training_results_v0.7/NVIDIA/results --json

      encore score training_results_v4.1/NVIDIA/results --csv > scores.csv
    """
    options.one_format(json=as_json, csv=as_csv)
    with unpacked(path, _SCORED) if is_archive(path) else nullcontext(path) as folder:
        with reading() as on_read:
            scored = judge_folder(folder, _judged, options.known_round(round_), on_read)
        if folder != path:
            # Show paths in the archive, because unpacked files are temporary.
            scored = [
                (replace(run_set, folder=path / run_set.folder.relative_to(folder)), findings, energy)
                for run_set, findings, energy in scored
            ]
    if as_csv:
        sys.stdout.write(_as_csv(scored))
    elif as_json:
        entries: list[ScoredSet] = [
            {**run_set.as_json(findings), "energy": energy} for run_set, findings, energy in scored
        ]
        write_json("score", entries[0] if len(entries) == 1 else entries)
    else:
        _print_scores(scored)
        for run_set, _, energy in scored:
            if energy is not None:
                _print_energy(console(), run_set, energy)
    # `check` and `audit` report the same faults as errors.
    is_impossible = any(run.has_impossible_values for run_set, _, _ in scored for run in run_set.runs)
    raise typer.Exit(ExitCode.FAILED if is_impossible else ExitCode.REACHED)


def check(
    path: PathArgument,
    ruleset: Annotated[str | None, typer.Option(help="Such as 0.7.0; found from the log by default.")] = None,
    package: Annotated[
        bool, typer.Option("--package", help="Check a submission tree: layout, systems, code, every set.")
    ] = False,
    details: Annotated[
        bool,
        typer.Option("--details", help="For a tree: list all logs, warnings and notes instead of one line per set."),
    ] = False,
    as_json: options.Json = False,
    format_: options.Format = "text",
) -> None:
    """Check result logs against the rules of their round, and explain the findings.

    Exits with 1 on errors other than those caused by the data set.

    Examples:

      encore check results/20260101T120000Z-resnet-mxnet-cpu/result_0.txt

      encore check result_0.txt --ruleset 0.7.0 --json

      encore check training_results_v4.1/NVIDIA --package

      encore check training_results_v5.1/NVIDIA --format sarif > check.sarif
    """
    form, ruleset = options.one_form(format_, as_json), parse_ruleset(ruleset)
    if not path.exists():
        raise EncoreError(f"{path} does not exist", expected="a result log or log folder", hint="check the path")
    if package:
        _finish(extensions.load("check --package")(path, ruleset), [], form, details=True)
    sets = [files for _, files in find_sets(path)]
    if not sets:
        raise EncoreError(f"no result log in {path}", expected="result_0.txt, result_1.txt ...")
    if len(sets) == len(sets[0]) == 1:
        _finish([check_alone(sets[0][0], ruleset)], [], form, details=True)
    with reading() as on_read:
        scores, reports = score_and_check(path, ruleset, on_read)
    with_points = any((report.ruleset or "") >= FIRST_RULESET for report in reports)
    convergences = [convergence_of(score) for score in scores] if with_points else []
    _finish(
        reports,
        [convergence for convergence in convergences if convergence is not None],
        form,
        details=details or len(sets) == 1,
    )


# Write the reports; exit with 1 where one has an error that better data would not cure.
def _finish(reports: Sequence[ComplianceReport], sets: Sequence[Convergence], form: str, *, details: bool) -> NoReturn:
    if form in FORMATS:
        all_reports = [*reports, *map(report_of, sets)]
        sys.stdout.write(FORMATS[form]([(report.path, report.findings) for report in all_reports]) + "\n")
    elif form == "json":
        of_sets: list[CheckedSet] = [
            {**report_of(convergence).as_json(), "convergence": convergence} for convergence in sets
        ]
        entries = [*(report.as_json() for report in reports), *of_sets]
        write_json("check", entries[0] if len(entries) == 1 else entries)
    else:
        _print_reports(reports, sets, details=details)
    raise typer.Exit(ExitCode.REACHED if all(report.passed_but_for_data for report in reports) else ExitCode.FAILED)


def _print_scores(scored: Sequence[_Shown]) -> None:
    screen, scores = console(), [score for score, _, _ in scored]
    minutes = ("raw minutes", "official") if any(score.scaling_factor for score in scores) else ("minutes",)
    numbers = (*minutes, "runs", "converged")
    rows = (
        (
            round_of(score.round, score.round_is_guess),
            score.benchmark or "?",
            *map(minutes_text, (score.score_minutes, score.official_minutes)[: len(minutes)]),
            f"{len(score.runs)}" + (f"/{score.required}" if score.required else ""),
            len(score.converged),
            score.folder,
        )
        for score in scores
    )
    show(screen, "Scores", ("round", "benchmark", *numbers, "folder"), rows, numbers=numbers)
    for score, findings, _ in scored:
        _print_runs(screen, score, findings, detail=len(scores) == 1)


# Keep only the printed data of the logs: passing the full logs between processes takes longer than reading them.
def _judged(score: Score) -> _Shown:
    findings, energy = audit_score(score), energy_of(score)
    for run in score.runs:
        run.phases, run.stated, run.progress, run.hyperparameters = [], [], [], {}
    return score, findings, energy


# One row per set: unrounded values of the table, and the reason for a missing score.
def _as_csv(scored: Sequence[_Shown]) -> str:
    columns = (
        "round", "round_is_guess", "benchmark", "folder", "runs", "required", "converged", "score_minutes",
        "scaling_factor", "official_minutes", "energy_kilojoules", "missing", "flags",
    )  # fmt: skip
    rows = []
    for score, findings, energy in scored:
        fields: dict[str, Any] = {**score.as_json(findings)}
        of_runs = [f"{run['file']}: {flag}" for run in fields["runs"] for flag in run["flags"]]
        fields |= {"runs": len(score.runs), "flags": "; ".join([*fields["flags"], *of_runs])}
        fields["energy_kilojoules"] = energy.kilojoules if energy else None
        rows.append(tuple(fields[name] for name in columns))
    return Table(title="Scores", columns=columns, rows=tuple(rows)).as_csv()


def _print_energy(screen: Console, score: Score, energy: Energy) -> None:
    if energy.kilojoules is None:
        line, style = f"no energy: {energy.missing}", "yellow"
    else:
        factor = f", official {energy.official_kilojoules:,.0f} kJ" if energy.official_kilojoules is not None else ""
        nodes = count_of(energy.nodes or 0, "node")
        line, style = f"energy {energy.kilojoules:,.0f} kJ{factor}; {energy.watts:,.0f} W, {nodes}", ""
    say(screen, text(f"{score.folder}: {line}", style))


# Print all runs for a single set, else only anomalies.
def _print_runs(screen: Console, score: Score, findings: Sequence[Finding], *, detail: bool) -> None:
    location = score.folder.name if detail else str(score.folder)
    if score.missing:
        say(screen, text(f"{location}: no score: {score.missing}", "yellow"))
    if score.round_is_guess:
        how = next(run.round_found for run in score.runs if run.round_is_guess)
        say(screen, text(f"{location}: {score.round} is {how}: --round sets it", "yellow"))
    if detail and score.official_minutes is not None and score.scaling_factor is not None:
        official = official_score_text(score.official_minutes, score.scaling_factor)
        say(screen, text(f"{location}: raw score {minutes_text(score.score_minutes)} minutes, {official}"))
    for flag in score.flags:
        say(screen, text(f"{location}: {flag.text}", "yellow"))
    for line, style in summary(findings):
        say(screen, text(f"{location}: {line}", style))
    uses = {id(run): use for use in ("counted", "dropped") for run in getattr(score, use)}
    for run in score.runs if detail else ():
        use = uses.get(id(run), "")
        minutes = f"{run.minutes:10.3f} min" if run.minutes is not None else f"{'-':>10}    "
        say(screen, text(f"  {run.path.name:<16} {minutes}  {use:<8} {run.explanation}".rstrip()))


# Print one verdict per log, or per set in a tree, then the findings with their logs and lines.
def _print_reports(reports: Sequence[ComplianceReport], sets: Sequence[Convergence], *, details: bool) -> None:
    screen = console()
    locations: dict[Finding, list[str]] = {}
    if details:
        for report in reports:
            _print_verdict(screen, report)
    else:
        _print_sets(screen, reports)
    for convergence in sets:
        style = "green" if convergence.outcome is Outcome.PASSED else "yellow"
        if details or style == "yellow":
            say(screen, text(f"{convergence.folder}: reference convergence: {convergence.outcome.value}", style))
            for line in convergence.explanation:
                say(screen, text(f"    {line}"))
    for report in [*reports, *map(report_of, sets)]:
        for finding in report.findings:
            if details or finding.severity == "error":
                line = f" line {finding.line}" if finding.line is not None and details else ""
                name = report.path.name if details else f"{report.path.parent.name}/{report.path.name}"
                locations.setdefault(replace(finding, line=None), []).append(f"{name}{line}")
    for finding, paths in sorted(locations.items(), key=lambda item: 0 if details else -len(item[1])):
        remainder = f" and {len(paths) - _PLACES} more" if len(paths) > _PLACES else ""
        style = _COLOURS[finding.severity]
        say(screen, text(f"{finding.label}, {', '.join(paths[:_PLACES])}{remainder}: {finding.found}", style))
        for label, text_of_label in (("expected", finding.expected), ("rule", finding.rule), ("hint", finding.hint)):
            say(screen, text(f"    {label + ':':<9} {text_of_label}"))
    if len(reports) > 1:
        passed = sum(report.passed for report in reports)
        remainder = "" if details else "; --details lists every log, with warnings"
        say(screen, text(f"{passed} of {count_of(len(reports), 'log')} pass{remainder}"))


# Print the number of passing logs per folder.
def _print_sets(screen: Console, reports: Sequence[ComplianceReport]) -> None:
    folders = grouped(reports, lambda report: report.path.parent)
    numbers, above, rows = ("logs", "pass", "errors", "warnings"), os.path.commonpath(folders), []
    for folder, set_reports in folders.items():
        severities = [finding.severity for report in set_reports for finding in report.findings]
        passed = sum(report.passed for report in set_reports)
        rulesets = ", ".join(sorted({report.ruleset or "?" for report in set_reports}))
        counts = (len(set_reports), text(passed, "" if passed == len(set_reports) else "red"))
        rows.append(
            (rulesets, *counts, severities.count("error"), severities.count("warning"), folder.relative_to(above))
        )
    show(screen, "Checked", ("ruleset", *numbers, "folder"), rows, numbers=numbers)


def _print_verdict(screen: Console, report: ComplianceReport) -> None:
    kinds = ["small" if finding.kind == "small_data" else finding.severity for finding in report.findings]
    errors, small, warnings = map(kinds.count, ("error", "small", "warning"))
    verdict = "passed" if report.passed else "failed" if errors else "passed but for the data set"
    counts = f"{count_of(errors, 'error')}, {small} from small data, {count_of(warnings, 'warning')}"
    ruleset = f"ruleset {report.ruleset or 'not known'}, {report.ruleset_found}"
    say(
        screen,
        text(f"{report.path}: {verdict}", "red" if errors else "green"),
        text(f"({counts}; {ruleset})"),
    )


# -- audit ------------------------------------------------------------------------------------------------------------


def audit(
    path: PathArgument,
    against: Annotated[
        list[Path] | None,
        typer.Option("--against", metavar="DIR", help="Also search this log folder for copies of the logs."),
    ] = None,
    as_json: options.Json = False,
    format_: options.Format = "text",
) -> None:
    """Detect late starts, copies, impossible clocks and edited outliers in result logs.

    Exits with 1 on errors. JSON: an object for one run set, a list for a tree.

    Examples:

      encore audit results/20260101T120000Z-resnet-mxnet-cpu

      encore audit my_logs --against training_results_v0.7 --json

      encore audit training_results_v5.1/NVIDIA --format sarif > audit.sarif
    """
    form = options.one_form(format_, as_json)
    audits = audit_path(path, against or ())
    if form in FORMATS:
        sys.stdout.write(
            FORMATS[form]([(audit_report.score.folder, audit_report.findings) for audit_report in audits]) + "\n"
        )
    elif form == "json":
        entries = [audit_report.as_json() for audit_report in audits]
        write_json("audit", entries[0] if len(entries) == 1 else entries)
    else:
        _print_audits(console(), audits)
    raise typer.Exit(ExitCode.REACHED if all(audit_report.passed for audit_report in audits) else ExitCode.FAILED)


def summary(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Yield one line per rule with errors or warnings, and the style of the line."""
    for rule, group in grouped(findings, lambda finding: finding.rule).items():
        first = group[0]
        if first.severity != "note":
            location = f", {first.location}" if first.location else ""
            remainder = f", and {len(group) - 1} more" if len(group) > 1 else ""
            yield f"audit, {first.severity}, {rule}{location}: {first.found}{remainder}", _COLOURS[first.severity]


# Print the sets with findings, grouped by rule, then a summary.
def _print_audits(screen: Console, audits: Sequence[Audit]) -> None:
    for audit_report in audits:
        if audit_report.findings or len(audits) == 1:
            _print_audit(screen, audit_report)
    counts = [audit_report.counts() for audit_report in audits]
    total = ", ".join(count_of(sum(count[severity] for count in counts), severity) for severity in counts[0])
    logs = count_of(sum(len(audit_report.score.runs) for audit_report in audits), "log")
    sets = count_of(len(audits), "set")
    say(screen, text(f"{sets}, {logs}: {total}", "" if all(audit_report.passed for audit_report in audits) else "red"))


def _print_audit(screen: Console, audit: Audit) -> None:
    score = audit.score
    round_ = round_of(score.round, score.round_is_guess)
    say(screen, text(f"{score.folder}", "bold"), text(f"({round_} {score.benchmark or '?'})"))
    for rule, findings in grouped(audit.findings, lambda finding: finding.rule).items():
        first = findings[0]
        often = f"{first.rate:.2%} of the public sets have it" if first.rate else "no measured public set has it"
        frequency = text(f"({'frequency on public sets unknown' if first.rate is None else often})", "dim")
        say(screen, text(f"  {first.severity}: {rule}", _COLOURS[first.severity]), frequency)
        locations = [
            f"{entry.location}: {entry.found}" if entry.location else entry.found for entry in findings[:_PLACES]
        ]
        remainder = [f"and {len(findings) - _PLACES} more"] if len(findings) > _PLACES else []
        for line in (*locations, *remainder, f"expected: {first.expected}", f"hint:     {first.hint}"):
            # Wrapped on a terminal only
            if screen.is_terminal:
                screen.print(Padding.indent(text(line), 4))
            else:
                say(screen, text(f"    {line}"))


# -- compare ----------------------------------------------------------------------------------------------------------


_VERDICT_STYLES = {
    "reproduced": "bold green",
    "same runs": "bold",
    "undecided": "bold yellow",
    "faster": "bold green",
    "slower": "bold red",
    "converges differently": "bold red",
    "not converged": "bold red",
    "not comparable": "bold yellow",
}
_DIFFERENCES = 10  # Without --all


def compare(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder or log folder.")],
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="OTHER",
            help="Run folder, log folder, or submission name from `encore published`. Default: the nearest submission.",
        ),
    ] = None,
    logs: options.Logs = None,
    tolerance: Annotated[
        float, typer.Option(min=0.1, max=100.0, help="Maximum difference in percent that counts as reproduced.")
    ] = 5.0,
    everything: Annotated[
        bool, typer.Option("--all", help="Print all differences, also of runs that are not comparable.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Compare a run with a submission or a second run: verdict, confidence and causes of differences.

    Examples:

      encore compare results/20260101T120000Z-resnet-mxnet-dgxa100

      encore compare my_logs v0.7/NVIDIA/dgxa100_ngc20.06_mxnet --json

      encore compare results/20260101T120000Z-resnet-mxnet-cpu results/20260102T090000Z-resnet-mxnet-cpu

      encore compare my_logs training_results_v4.0/NVIDIA/results/dgxh100_ngc24.04_pytorch/unet3d
    """
    # Imported here because it needs NumPy, unlike the other commands.
    from encore.results.compare.loss_curve import loss_verdict
    from encore.results.compare.noise import noise_of

    if logs is not None and not logs.is_dir():
        raise EncoreError(f"{logs} is not a directory", expected="a folder of submitted logs")
    current = load_run_set(run)
    if other is not None and Path(other).exists():
        comparison = compare_with(current, load_run_set(Path(other)), AS_GIVEN, tolerance / 100)
    else:
        comparison = compare_named(current, other, logs, tolerance / 100)
    screen = console()
    if not as_json:
        _print_comparison(screen, comparison)
        if comparison.verdict is Verdict.NOT_COMPARABLE and not everything:
            say(screen, text("--all prints the figures and the differences", "dim"))
            return
        _print_factors(screen, comparison)
    explanation, noise, losses = None, [], None
    if (baseline := comparison.baseline) is not None:
        explanation, noise = explain(current, baseline), noise_of(current, baseline)
        losses = loss_verdict(current, baseline)
    if as_json:
        content: Compared = {
            **comparison.as_json(),
            "noise": [value.as_json() for value in noise],
            "loss_curve": losses,
        }
        if explanation is not None:
            content = Explained(**content, differences=explanation.differences, unknown=explanation.unknown)
        write_json("comparison", content)
        return
    if losses is not None:
        say(screen, text(str(losses), "yellow" if losses.verdict == "differs" else ""))
    for value in noise:
        title, *lines = value.lines()
        say(screen, text(title, "bold"))
        for line in lines:
            say(screen, text(line, "yellow" if "first outside" in line else ""))
    if explanation is not None:
        differences = explanation.differences
        visible = differences if everything else differences[:_DIFFERENCES]
        say(screen, text("differences, by weight:" if differences else "no difference found", "bold"))
        for number, difference in enumerate(visible, 1):
            say(screen, text(f"{number:3}. {difference.area:<15} {difference.sentence}"))
        if len(visible) < len(differences):
            say(screen, text(f"     {len(differences) - len(visible)} minor differences with --all", "dim"))
        for line in explanation.unknown:
            say(screen, text(line, "yellow"))


def _print_comparison(screen: Console, comparison: Comparison) -> None:
    against = f"{comparison.baseline.label} ({comparison.match.text})" if comparison.baseline else "no submission"
    say(screen, text(f"{comparison.current.label}: {comparison.current.benchmark or '?'} against {against}"))
    say(screen, text(comparison.verdict.value, _VERDICT_STYLES[comparison.verdict.value]))
    for reason in comparison.reasons:
        say(screen, text(f"  {reason}"))


def _print_factors(screen: Console, comparison: Comparison) -> None:
    if comparison.factors:
        columns = ("", "yours", "theirs", "ratio", "90 % interval", "z")
        rows = (
            (
                factor.name,
                figure(factor.ours),
                figure(factor.theirs),
                f"{factor.ratio:.3f}" if factor.ratio is not None else "-",
                f"{factor.interval[0]:.3f} to {factor.interval[1]:.3f}" if factor.interval else "-",
                f"{factor.z:+.1f}" if factor.z is not None else "-",
            )
            for factor in comparison.factors
        )
        show(screen, "", columns, rows, numbers=columns[1:], least=("z",))
        for note in dict.fromkeys(factor.note for factor in comparison.factors if factor.note):
            say(screen, text(note, "dim"))
    for line in format_certainty(comparison):
        say(screen, text(line))
    for caveat in comparison.caveats:
        say(screen, text(f"note: {caveat}", "yellow"))
    for line, style in summary(comparison.current.findings):
        say(screen, text(line, style))
