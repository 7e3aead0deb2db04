"""``encore score``, ``check``, ``audit`` and ``compare``: result logs read and judged."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding

from encore.cli import options
from encore.cli.layout import console, minutes_text, reading, say, show, text, write_json
from encore.errors import EncoreError, ExitCode
from encore.files import is_archive, unpacked
from encore.lab.submissions.archive import check_trees
from encore.results.audit.audit import Audit, audit_path, audit_score
from encore.results.compare.compare import Comparison, ComparisonJson, Factor, Verdict, compare_with, format_certainty
from encore.results.compare.compare import compare as compare_named
from encore.results.compare.explain import Difference, Explanation, explain
from encore.results.compare.nearest import AS_GIVEN
from encore.results.compare.run_set import load_run_set
from encore.results.compliance.compliance import check as check_alone
from encore.results.compliance.compliance import parse_ruleset, score_and_check
from encore.results.compliance.convergence import FIRST_RULESET, Convergence, Outcome, convergence_of, report_of
from encore.results.findings import FORMATS, ComplianceReport, Finding, ReportJson
from encore.results.format import count_of, figure, round_of
from encore.results.scores.power import Energy, EnergyJson, energy_of
from encore.results.scores.score import Score, ScoreJson, find_sets, judge_folder, official_score_text
from encore.results.table import Table, grouped

_PLACES = 3
_COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}

# Names of logs, of scaling.json and system descriptions, and of measured power.
_SCORED = re.compile(r"\.(?:txt|log|out|json|csv)(?:\.gz)?$", re.IGNORECASE)

# A score, what the audit found in its set, and the energy of its runs.
_Shown = tuple[Score, Sequence[Finding], Energy | None]

PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="A log, a folder of logs, or a tree.")]


class ScoredSet(ScoreJson):
    """The score of a set of runs, by the rules of its round."""

    energy: EnergyJson | None  # Of a set with power logs


class CheckedSet(ReportJson):
    """All findings about a set."""

    convergence: Convergence  # Its comparison with the reference convergence points


class Compared(ComparisonJson):
    """A set of runs next to a submission or another set."""

    noise: list[dict[str, Any]]  # Losses and evaluations of each run against those of the other side


class Explained(Compared):
    """The same where there is another side, with what differs."""

    differences: tuple[Difference, ...]  # The heaviest first
    unknown: tuple[str, ...]  # What could not be looked at


def score(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A log, a folder or tree of logs, or an archive.")],
    round_: Annotated[str | None, typer.Option("--round", help="Score by this round's rules, such as v0.7.")] = None,
    as_json: options.Json = False,
    as_csv: options.Csv = False,
) -> None:
    """Score result logs by the rules of their round; one set gives one JSON object, a tree a list of them.

    Examples:

      encore score results/20260101T120000Z-resnet-mxnet-cpu

      encore score training_results_v0.7/NVIDIA/results --json

      encore score training_results_v4.1/NVIDIA/results --csv > scores.csv
    """
    options.one_format(json=as_json, csv=as_csv)
    with unpacked(path, _SCORED) if is_archive(path) else nullcontext(path) as folder:
        with reading() as on_read:
            shown = judge_folder(folder, _judged, options.known_round(round_), on_read)
        if folder != path:
            # What of an archive was unpacked is gone later.
            shown = [(replace(each[0], folder=path / each[0].folder.relative_to(folder)), *each[1:]) for each in shown]
    if as_csv:
        sys.stdout.write(_as_csv(shown))
    elif as_json:
        found: list[ScoredSet] = [
            {**each.as_json(findings), "energy": energy.as_json() if energy else None}
            for each, findings, energy in shown
        ]
        write_json("score", found[0] if len(found) == 1 else found)
    else:
        _print_scores(shown)
        for each, _, energy in shown:
            if energy is not None:
                _print_energy(console(), each, energy)


def check(
    path: PathArgument,
    ruleset: Annotated[str | None, typer.Option(help="Such as 0.7.0; found from the log by default.")] = None,
    package: Annotated[
        bool, typer.Option("--package", help="Check a submission tree: layout, systems, code, every set.")
    ] = False,
    details: Annotated[
        bool, typer.Option("--details", help="Of a tree: every log, warnings and notes, not a line per set.")
    ] = False,
    as_json: options.Json = False,
    format_: options.Format = "text",
) -> None:
    """Check result logs against the rules of their round, and explain each finding.

    Exits with 1 where one has an error that better data would not cure.

    Examples:

      encore check results/20260101T120000Z-resnet-mxnet-cpu/result_0.txt

      encore check result_0.txt --ruleset 0.7.0 --json

      encore check training_results_v4.1/NVIDIA --package

      encore check training_results_v5.1/NVIDIA --format sarif > check.sarif
    """
    form, ruleset = options.one_form(format_, as_json), parse_ruleset(ruleset)
    if not path.exists():
        raise EncoreError(f"there is no {path}", expected="a result log or a folder of them", hint="check the path")
    if package:
        _finish(check_trees(path, ruleset), [], form, details=True)
        return
    sets = [files for _, files in find_sets(path)]
    if not sets:
        raise EncoreError(f"no result log in {path}", expected="result_0.txt, result_1.txt ...")
    if len(sets) == len(sets[0]) == 1:
        _finish([check_alone(sets[0][0], ruleset)], [], form, details=True)
        return
    with reading() as on_read:
        scores, reports = score_and_check(path, ruleset, on_read)
    with_points = any((report.ruleset or "") >= FIRST_RULESET for report in reports)
    found = [convergence_of(score) for score in scores] if with_points else []
    _finish(reports, [each for each in found if each is not None], form, details=details or len(sets) == 1)


# Write the reports; exit with 1 where one has an error that better data would not cure.
def _finish(reports: Sequence[ComplianceReport], sets: Sequence[Convergence], form: str, *, details: bool) -> None:
    if form in FORMATS:
        every = [*reports, *map(report_of, sets)]
        sys.stdout.write(FORMATS[form]([(report.path, report.findings) for report in every]) + "\n")
    elif form == "json":
        of_sets: list[CheckedSet] = [{**report_of(each).as_json(), "convergence": each} for each in sets]
        found = [*(report.as_json() for report in reports), *of_sets]
        write_json("check", found[0] if len(found) == 1 else found)
    else:
        _print_reports(reports, sets, details=details)
    if not all(report.passed_but_for_data for report in reports):
        raise typer.Exit(ExitCode.FAILED)


def _print_scores(shown: Sequence[_Shown]) -> None:
    screen, scores = console(), [each for each, _, _ in shown]
    minutes = ("raw minutes", "official") if any(each.scaling_factor for each in scores) else ("minutes",)
    numbers = (*minutes, "runs", "converged")
    rows = (
        (
            round_of(each.round, each.round_is_guess),
            each.benchmark or "?",
            *map(minutes_text, (each.score_minutes, each.official_minutes)[: len(minutes)]),
            f"{len(each.runs)}" + (f" of {each.required}" if each.required else ""),
            len(each.converged),
            each.folder,
        )
        for each in scores
    )
    show(screen, "Scores", ("round", "benchmark", *numbers, "folder"), rows, numbers=numbers)
    for each, findings, _ in shown:
        _print_runs(screen, each, findings, detail=len(scores) == 1)


# A set as it is shown. Of the logs only what is printed: the rest of thousands takes longer to hand on than to read.
def _judged(score: Score) -> _Shown:
    findings, energy = audit_score(score), energy_of(score)
    for run in score.runs:
        run.phases, run.stated, run.progress, run.hyperparameters = [], [], [], {}
    return score, findings, energy


# One row per set: what the table has, unrounded, and why a score is missing.
def _as_csv(shown: Sequence[_Shown]) -> str:
    columns = (
        "round", "round_is_guess", "benchmark", "folder", "runs", "required", "converged", "score_minutes",
        "scaling_factor", "official_minutes", "energy_kilojoules", "missing", "flags",
    )  # fmt: skip
    rows = []
    for score, findings, energy in shown:
        found: dict[str, Any] = {**score.as_json(findings)}
        of_runs = [f"{run['file']}: {flag}" for run in found["runs"] for flag in run["flags"]]
        found |= {"runs": len(score.runs), "flags": "; ".join([*found["flags"], *of_runs])}
        found["energy_kilojoules"] = energy.kilojoules if energy else None
        rows.append(tuple(found[name] for name in columns))
    return Table(title="Scores", columns=columns, rows=tuple(rows)).as_csv()


def _print_energy(screen: Console, score: Score, energy: Energy) -> None:
    if energy.kilojoules is None:
        say(screen, text(f"{score.folder}: no energy: {energy.missing}", "yellow"))
        return
    factor = f", official {energy.official_kilojoules:,.0f} kJ" if energy.official_kilojoules is not None else ""
    nodes = count_of(energy.nodes or 0, "node")
    say(screen, text(f"{score.folder}: energy {energy.kilojoules:,.0f} kJ{factor}; {energy.watts:,.0f} W, {nodes}"))


# Print each run of the only set, else only what is odd about the set.
def _print_runs(screen: Console, score: Score, findings: Sequence[Finding], *, detail: bool) -> None:
    where = score.folder.name if detail else str(score.folder)
    if score.missing:
        say(screen, text(f"{where}: no score: {score.missing}", "yellow"))
    if score.round_is_guess:
        how = next(run.round_found for run in score.runs if run.round_is_guess)
        say(screen, text(f"{where}: {score.round} is {how}: --round sets it", "yellow"))
    if detail and score.official_minutes is not None and score.scaling_factor is not None:
        official = official_score_text(score.official_minutes, score.scaling_factor)
        say(screen, text(f"{where}: raw score {minutes_text(score.score_minutes)} minutes, {official}"))
    for flag in score.flags:
        say(screen, text(f"{where}: {flag.text}", "yellow"))
    for line, style in summary(findings):
        say(screen, text(f"{where}: {line}", style))
    if not detail:
        return
    counted, dropped = set(map(id, score.counted)), set(map(id, score.dropped))
    for run in score.runs:
        use = "counted" if id(run) in counted else "dropped" if id(run) in dropped else ""
        minutes = f"{run.minutes:10.3f} min" if run.minutes is not None else f"{'-':>10}    "
        say(screen, text(f"  {run.path.name:<16} {minutes}  {use:<8} {run.explanation}".rstrip()))


# Print a verdict per log, or per set of a tree, then every finding once, with the logs and lines it is about.
def _print_reports(reports: Sequence[ComplianceReport], sets: Sequence[Convergence], *, details: bool) -> None:
    screen = console()
    places: dict[Finding, list[str]] = {}
    if details:
        for report in reports:
            _print_verdict(screen, report)
    else:
        _print_sets(screen, reports)
    for each in sets:
        if details or each.outcome is not Outcome.PASSED:
            style = "green" if each.outcome is Outcome.PASSED else "yellow"
            say(screen, text(f"{each.folder}: reference convergence: {each.outcome.value}", style))
            for line in each.explanation:
                say(screen, text(f"    {line}"))
    for report in [*reports, *map(report_of, sets)]:
        for finding in report.findings:
            if details or finding.severity == "error":
                line = f" line {finding.line}" if finding.line is not None and details else ""
                name = report.path.name if details else f"{report.path.parent.name}/{report.path.name}"
                places.setdefault(replace(finding, line=None), []).append(f"{name}{line}")
    for finding, where in sorted(places.items(), key=lambda each: 0 if details else -len(each[1])):
        more = f" and {len(where) - _PLACES} more" if len(where) > _PLACES else ""
        style = _COLOURS[finding.severity]
        say(screen, text(f"{finding.label}, {', '.join(where[:_PLACES])}{more}: {finding.found}", style))
        for what, words in (("expected", finding.expected), ("rule", finding.rule), ("hint", finding.hint)):
            say(screen, text(f"    {what + ':':<9} {words}"))
    if len(reports) > 1:
        passed = sum(report.passed for report in reports)
        more = "" if details else "; --details lists every log, with warnings"
        say(screen, text(f"{passed} of {count_of(len(reports), 'log')} pass{more}"))


# Print a row per folder: how many of its logs pass.
def _print_sets(screen: Console, reports: Sequence[ComplianceReport]) -> None:
    folders = grouped(reports, lambda report: report.path.parent)
    numbers, above, rows = ("logs", "pass", "errors", "warnings"), os.path.commonpath(folders), []
    for folder, found in folders.items():
        every = [finding.severity for report in found for finding in report.findings]
        passed = sum(report.passed for report in found)
        rulesets = ", ".join(sorted({report.ruleset or "?" for report in found}))
        counts = (len(found), text(passed, "" if passed == len(found) else "red"))
        rows.append((rulesets, *counts, every.count("error"), every.count("warning"), folder.relative_to(above)))
    show(screen, "Checked", ("ruleset", *numbers, "folder"), rows, numbers=numbers)


def _print_verdict(screen: Console, report: ComplianceReport) -> None:
    errors = sum(each.severity == "error" and each.kind != "small_data" for each in report.findings)
    small = sum(each.kind == "small_data" for each in report.findings)
    warnings = sum(each.severity == "warning" for each in report.findings)
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
        typer.Option("--against", metavar="DIR", help="Also look for these logs in this folder of others."),
    ] = None,
    as_json: options.Json = False,
    format_: options.Format = "text",
) -> None:
    """Look for late starts, copies, impossible clocks and edited outliers in result logs.

    Exits with 1 where there is an error. One set gives one JSON object, a tree a list of them.

    Examples:

      encore audit results/20260101T120000Z-resnet-mxnet-cpu

      encore audit my_logs --against training_results_v0.7 --json

      encore audit training_results_v5.1/NVIDIA --format sarif > audit.sarif
    """
    form = options.one_form(format_, as_json)
    audits = audit_path(path, against or ())
    if form in FORMATS:
        sys.stdout.write(FORMATS[form]([(each.score.folder, each.findings) for each in audits]) + "\n")
    elif form == "json":
        found = [each.as_json() for each in audits]
        write_json("audit", found[0] if len(found) == 1 else found)
    else:
        _print_audits(console(), audits)
    if not all(each.passed for each in audits):
        raise typer.Exit(ExitCode.FAILED)


def summary(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Yield a line for each rule with errors or warnings, and its style, as the other commands print them."""
    for rule, found in grouped(findings, lambda finding: finding.rule).items():
        first = found[0]
        if first.severity != "note":
            place = f", {first.location}" if first.location else ""
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            yield f"audit, {first.severity}, {rule}{place}: {first.found}{more}", _COLOURS[first.severity]


# Print the sets with findings, each rule once, and at the end what was found in all.
def _print_audits(screen: Console, audits: Sequence[Audit]) -> None:
    for each in audits:
        if each.findings or len(audits) == 1:
            _print_audit(screen, each)
    counts = [each.counts() for each in audits]
    total = ", ".join(count_of(sum(each[severity] for each in counts), severity) for severity in counts[0])
    logs = count_of(sum(len(each.score.runs) for each in audits), "log")
    sets = count_of(len(audits), "set")
    say(screen, text(f"{sets}, {logs}: {total}", "" if all(each.passed for each in audits) else "red"))


def _print_audit(screen: Console, audit: Audit) -> None:
    score = audit.score
    round_ = round_of(score.round, score.round_is_guess)
    say(screen, text(f"{score.folder}", "bold"), text(f"({round_} {score.benchmark or '?'})"))
    for rule, findings in grouped(audit.findings, lambda finding: finding.rule).items():
        first = findings[0]
        say(
            screen,
            text(f"  {first.severity}: {rule}", _COLOURS[first.severity]),
            text(_how_often(first), "dim"),
        )
        places = [f"{each.location}: {each.found}" if each.location else each.found for each in findings[:_PLACES]]
        more = [f"and {len(findings) - _PLACES} more"] if len(findings) > _PLACES else []
        for line in (*places, *more, f"expected: {first.expected}", f"hint:     {first.hint}"):
            _say(screen, line)


# Print an indented line: wrapped at words on a terminal, whole in a pipe.
def _say(screen: Console, line: str) -> None:
    if screen.is_terminal:
        screen.print(Padding(text(line), (0, 0, 0, 4), expand=False))
    else:
        say(screen, text(f"    {line}"))


def _how_often(finding: Finding) -> str:
    if finding.rate is None:
        return "(how often on public sets is not known)"
    return f"({finding.rate:.2%} of the public sets have it)" if finding.rate else "(no measured public set has it)"


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
    run: options.Run,
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="OTHER",
            help="Another run, or a submission as `encore published` names it; default: the nearest submission.",
        ),
    ] = None,
    logs: options.Logs = None,
    tolerance: Annotated[
        float, typer.Option(min=0.1, max=100.0, help="Per cent that still count as the same result.")
    ] = 5.0,
    everything: Annotated[
        bool, typer.Option("--all", help="Print all differences, also of runs that are not comparable.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Compare a run with a submission or another run: was it reproduced, how sure is that, and what differs?

    Examples:

      encore compare results/20260101T120000Z-resnet-mxnet-dgxa100

      encore compare my_logs v0.7/NVIDIA/dgxa100_ngc20.06_mxnet --json

      encore compare results/20260101T120000Z-resnet-mxnet-cpu results/20260102T090000Z-resnet-mxnet-cpu

      encore compare my_logs training_results_v4.0/NVIDIA/results/dgxh100_ngc24.04_pytorch/unet3d
    """
    # It takes NumPy, which the other commands here do without.
    from encore.results.compare.noise import noise_of

    if logs is not None and not logs.is_dir():
        raise EncoreError(f"there is no folder {logs}", expected="a folder of submitted logs")
    ours = load_run_set(run)
    if other is not None and Path(other).exists():
        found = compare_with(ours, load_run_set(Path(other)), AS_GIVEN, tolerance / 100)
    else:
        found = compare_named(ours, other, logs, tolerance / 100)
    screen = console()
    if not as_json:
        _print_comparison(screen, found)
        if found.verdict is Verdict.NOT_COMPARABLE and not everything:
            say(screen, text("--all prints the figures and the differences", "dim"))
            return
        _print_factors(screen, found)
    why = explain(found.current, found.baseline) if found.baseline is not None else None
    noise = noise_of(found.current, found.baseline) if found.baseline is not None else []
    if as_json:
        content: Compared = {**found.as_json(), "noise": [each.as_json() for each in noise]}
        if why is not None:
            content = Explained(**content, differences=why.differences, unknown=why.unknown)
        write_json("comparison", content)
        return
    for each in noise:
        _print_noise(screen, *each.lines())
    if why is not None:
        _print_differences(screen, why, None if everything else _DIFFERENCES)


def _print_comparison(screen: Console, found: Comparison) -> None:
    against = f"{found.baseline.label} ({found.match.text})" if found.baseline else "no submission"
    say(screen, text(f"{found.current.label}: {found.current.benchmark or '?'} against {against}"))
    say(screen, text(found.verdict.value, _VERDICT_STYLES[found.verdict.value]))
    for reason in found.reasons:
        say(screen, text(f"  {reason}"))


def _print_factors(screen: Console, found: Comparison) -> None:
    if found.factors:
        columns = ("", "yours", "theirs", "ratio", "90 % interval", "z")
        show(screen, "", columns, map(_factor_cells, found.factors), numbers=columns[1:], least=("z",))
        for note in dict.fromkeys(factor.note for factor in found.factors if factor.note):
            say(screen, text(note, "dim"))
    for line in format_certainty(found):
        say(screen, text(line))
    for caveat in found.caveats:
        say(screen, text(f"note: {caveat}", "yellow"))
    for line, style in summary(found.current.findings):
        say(screen, text(line, style))


def _print_noise(screen: Console, title: str, *lines: str) -> None:
    say(screen, text(title, "bold"))
    for line in lines:
        say(screen, text(line, "yellow" if "first outside" in line else ""))


def _factor_cells(factor: Factor) -> list[str]:
    span = f"{factor.interval[0]:.3f} to {factor.interval[1]:.3f}" if factor.interval else "-"
    return [
        factor.name,
        figure(factor.ours),
        figure(factor.theirs),
        f"{factor.ratio:.3f}" if factor.ratio is not None else "-",
        span,
        f"{factor.z:+.1f}" if factor.z is not None else "-",
    ]


def _print_differences(screen: Console, found: Explanation, most: int | None) -> None:
    say(screen, text("what differs, by its weight:" if found.differences else "no difference found", "bold"))
    for number, each in enumerate(found.differences[:most], 1):
        say(screen, text(f"{number:3}. {each.area:<15} {each.sentence}"))
    left = len(found.differences) - len(found.differences[:most])
    if left:
        say(screen, text(f"     and {left} of less weight: --all lists them", "dim"))
    for line in found.unknown:
        say(screen, text(line, "yellow"))
