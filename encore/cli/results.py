"""``encore score``, ``encore check`` and ``encore published``: result logs read, judged and looked up."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from encore.cli import options
from encore.cli.layout import console, plain_table, say, text, write_json
from encore.errors import EncoreError, ExitCode
from encore.names import unknown
from encore.results.compliance import check as check_alone
from encore.results.compliance import check_log_of_many
from encore.results.findings import ComplianceReport, Finding
from encore.results.published import PublishedResult, load_published, select
from encore.results.rules import ROUNDS, canonical
from encore.results.score import Score, find_sets, score_folder

SCORE_EPILOG = """
Examples:

  encore score results/20260101T120000Z-resnet-mxnet-cpu

  encore score training_results_v0.7/NVIDIA/results --json
"""
CHECK_EPILOG = """
Examples:

  encore check results/20260101T120000Z-resnet-mxnet-cpu/result_0.txt

  encore check result_0.txt --ruleset 0.7.0 --json
"""
PUBLISHED_EPILOG = """
Examples:

  encore published --benchmark resnet --round v0.7

  encore published --system dgxa100 --csv > dgxa100.csv
"""
_CSV_FIELDS = (
    "name", "round", "submitter", "system", "benchmark", "runs", "converged", "score_minutes",
    "fastest_minutes", "slowest_minutes", "cv", "global_batch", "last_eval_epochs", "last_quality",
    "samples_per_second", "init_seconds", "note",
)  # fmt: skip
_PLACES = 3
_SEVERITY_STYLE = {"error": "red", "warning": "yellow"}

PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="A log, a folder of logs, or a tree.")]
WIDE = 100
"""Columns from which on a table shows everything."""


def score(
    path: PathArgument,
    round_: Annotated[str | None, typer.Option("--round", help="Score by this round's rules, such as v0.7.")] = None,
    as_json: options.Json = False,
) -> None:
    """Score result logs by the rules of their round; one set gives one JSON object, a tree a list of them."""
    scores = score_folder(path, _round(round_))
    if as_json:
        found = [each.as_json() for each in scores]
        write_json(found[0] if len(found) == 1 else found)
    else:
        _print_scores(scores)


def check(
    path: PathArgument,
    ruleset: Annotated[str | None, typer.Option(help="Such as 0.7.0; found from the log by default.")] = None,
    as_json: options.Json = False,
) -> None:
    """Check result logs against the rules of their round, in plain words.

    Exits with 1 where one has an error that better data would not cure.
    """
    if not path.exists():
        raise EncoreError(f"there is no {path}", expected="a result log or a folder of them", remedy="check the path")
    files = [file for _, found in find_sets(path) for file in found]
    if not files:
        raise EncoreError(f"no result log in {path}", expected="result_0.txt, result_1.txt ...")
    reports = [_report(file, ruleset, alone=len(files) == 1) for file in files]
    if as_json:
        found = [report.as_json() for report in reports]
        write_json(found[0] if len(found) == 1 else found)
    else:
        _print_reports(reports)
    if not all(report.passed_but_for_data for report in reports):
        raise typer.Exit(ExitCode.FAILED)


def _report(file: Path, ruleset: str | None, *, alone: bool) -> ComplianceReport:
    """Return the report on one log; among several, a file without events is a finding and not the end."""
    return check_alone(file, ruleset) if alone else check_log_of_many(file, ruleset)


def published(
    benchmark: Annotated[str | None, typer.Option(help="Such as resnet or maskrcnn.")] = None,
    round_: Annotated[str | None, typer.Option("--round", help="v0.5 to v5.1.")] = None,
    submitter: Annotated[str | None, typer.Option(help="Such as NVIDIA.")] = None,
    system: Annotated[str | None, typer.Option(help="Any part of the system's name, such as dgx1.")] = None,
    as_json: options.Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write CSV instead of a table.")] = False,
) -> None:
    """List the published MLPerf Training results that fit all the options given."""
    everything = load_published()
    wanted_round = _round(round_)
    _known(benchmark, submitter)
    results = select(everything, benchmark=benchmark, round_=wanted_round, submitter=submitter, system=system)
    if as_json:
        write_json([result.as_json() for result in results])
    elif as_csv:
        _write_csv(results)
    else:
        _print_published(results)


def _round(name: str | None) -> str | None:
    if name is None:
        return None
    found = f"v{name.lower().removeprefix('v')}"
    if found not in ROUNDS:
        raise EncoreError(f"there is no round {name!r}", expected=", ".join(ROUNDS), remedy="name one of these")
    return found


def _known(benchmark: str | None, submitter: str | None) -> None:
    """Refuse a wrong name and offer the nearest right one: an empty list would look like an answer."""
    benchmarks = sorted({result.benchmark for result in load_published() if result.benchmark})
    if benchmark is not None and canonical(benchmark) not in benchmarks:
        raise unknown("published benchmark", benchmark, benchmarks)
    submitters = sorted({result.submitter for result in load_published()})
    if submitter is not None and submitter.lower() not in [each.lower() for each in submitters]:
        raise unknown("submitter", submitter, submitters)


def _write_csv(results: list[PublishedResult]) -> None:
    writer = csv.DictWriter(sys.stdout, _CSV_FIELDS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for result in results:
        writer.writerow(result.as_json())


def _print_scores(scores: list[Score]) -> None:
    screen = console()
    numbers = ("minutes", "runs", "converged")
    table = plain_table("Scores", "round", "benchmark", *numbers, "folder", numbers=numbers)
    for each in scores:
        required = f" of {each.required}" if each.required else ""
        table.add_row(
            text(each.round or "?"),
            text(each.benchmark or "?"),
            f"{each.score_minutes:.3f}" if each.score_minutes is not None else "-",
            f"{len(each.runs)}{required}",
            str(len(each.converged)),
            text(each.folder),
        )
    screen.print(table)
    for each in scores:
        _print_runs(screen, each, detail=len(scores) == 1)


def _print_runs(screen: Console, score: Score, *, detail: bool) -> None:
    """Print each run of the only set, else only what is odd about the set."""
    where = score.folder.name if detail else str(score.folder)
    if score.missing:
        say(screen, text(f"{where}: no score: {score.missing}", "yellow"))
    for flag in score.flags:
        say(screen, text(f"{where}: {flag}", "yellow"))
    if not detail:
        return
    counted, dropped = set(map(id, score.counted)), set(map(id, score.dropped))
    for run in score.runs:
        use = "counted" if id(run) in counted else "dropped" if id(run) in dropped else ""
        minutes = f"{run.minutes:10.3f} min" if run.minutes is not None else f"{'-':>10}    "
        say(screen, text(f"  {run.path.name:<16} {minutes}  {use:<8} {run.explanation}".rstrip()))
        for flag in run.flags:
            say(screen, text(f"    {flag}", "yellow"))


def _print_reports(reports: list[ComplianceReport]) -> None:
    """Print a verdict per log, then every finding once, with the logs and lines it is about."""
    screen = console()
    places: dict[Finding, list[str]] = {}
    for report in reports:
        _print_verdict(screen, report)
        for finding in report.findings:
            line = f" line {finding.line}" if finding.line is not None else ""
            places.setdefault(replace(finding, line=None), []).append(f"{report.path.name}{line}")
    for finding, where in places.items():
        label = "small data" if finding.kind == "small_data" else finding.severity
        more = f" and {len(where) - _PLACES} more" if len(where) > _PLACES else ""
        style = _SEVERITY_STYLE[finding.severity]
        say(screen, text(f"{label}, {', '.join(where[:_PLACES])}{more}: {finding.found}", style))
        say(screen, text(f"    expected: {finding.expected}"))
        say(screen, text(f"    rule:     {finding.rule}"))
        say(screen, text(f"    do this:  {finding.remedy}"))


def _print_verdict(screen: Console, report: ComplianceReport) -> None:
    errors = sum(each.severity == "error" and each.kind != "small_data" for each in report.findings)
    small = sum(each.kind == "small_data" for each in report.findings)
    warnings = sum(each.severity == "warning" for each in report.findings)
    verdict = "passed" if report.passed else "failed" if errors else "passed but for the data set"
    counts = f"{errors} errors, {small} from small data, {warnings} warnings"
    ruleset = f"ruleset {report.ruleset or 'not known'}, {report.ruleset_found}"
    say(
        screen,
        text(f"{report.path}: {verdict}", "red" if errors else "green"),
        text(f"({counts}; {ruleset})"),
    )


def _print_published(results: list[PublishedResult]) -> None:
    screen = console()
    numbers = ("minutes", "runs", "batch")
    last = ("accelerators",) if screen.width >= WIDE else ()
    title = f"Published results: {len(results)}"
    table = plain_table(title, "benchmark", "name", *numbers, *last, numbers=numbers)
    for column in table.columns[:5]:
        column.no_wrap = True  # a folded name cannot be copied
    for result in results:
        hardware = result.hardware
        count = f"{hardware.accelerators} x " if hardware.accelerators else ""
        cells = (
            text(result.benchmark or "?"),
            text(result.name),
            f"{result.score_minutes:.3f}" if result.score_minutes is not None else "-",
            str(result.runs),
            str(result.global_batch or ""),
            text(f"{count}{hardware.accelerator or ''}"),
        )
        table.add_row(*cells[: len(table.columns)])
    screen.print(table)
    if not last:
        screen.print(f"a terminal of {WIDE} columns also shows the accelerators", style="dim")
    if any(result.note for result in results):
        for result in results:
            if result.note:
                say(screen, text(f"{result.name} {result.benchmark}: {result.note}"))
