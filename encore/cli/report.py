"""``encore report``, ``encore tables`` and ``encore archive``: runs shown, tabulated and packed for MLPerf."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from encore.cli import options
from encore.cli.layout import console, plain_table, print_fitted, reading, say, text, write_json
from encore.errors import EncoreError, ExitCode
from encore.lab.scaling.printed_tables import MICROWAY, findings
from encore.lab.scaling.printed_tables import tables as study_tables
from encore.lab.submissions.archive import check_package, write_archive
from encore.lab.submissions.package import check_trees
from encore.results.compare.sides import load_sides
from encore.results.report.measurements import of_side
from encore.results.report.report import build_report, measurements_of_published, measurements_of_study, write_files
from encore.results.report.tables import all_tables
from encore.results.table import Table
from encore.results.words import count_of

REPORT_EPILOG = """
Examples:

  encore report results/20260101T120000Z-resnet-mxnet-dgxa100 -o report

  encore report training_results_v5.1 --package -o round

  encore report --study microway-dgx1-scaling -o study
"""
TABLES_EPILOG = """
Examples:

  encore tables results

  encore tables --published v0.7/NVIDIA/dgx --baseline v0.7/NVIDIA/dgx1_ngc20.06_mxnet --json

  encore tables --study microway-dgx1-scaling
"""
ARCHIVE_EPILOG = """
Examples:

  encore archive results/20260101T120000Z-resnet-mxnet-dgxa100 -o submission --submitter MyLab
"""

StudyOption = Annotated[
    str | None, typer.Option("--study", metavar="KEY", help="Also a study, such as microway-dgx1-scaling.")
]
PublishedOption = Annotated[
    str | None,
    typer.Option("--published", metavar="NAME", help="Also published results with NAME in their name."),
]
BaselineOption = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="SYSTEM",
        help="Also scores relative to this system: its label in the tables; a published one with --published.",
    ),
]


def report(
    output: options.Output,
    runs: options.Runs = None,
    with_: options.With = None,
    logs: options.Logs = None,
    baseline: BaselineOption = None,
    study: StudyOption = None,
    published: PublishedOption = None,
    package: Annotated[
        bool, typer.Option("--package", help="Also check each submitter's tree as a package; takes as long again.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Score, check, audit and compare runs, up to a whole round: a table, Markdown and one HTML page."""
    _something(runs, study, published)
    with reading() as on_read:
        made = build_report(
            runs or [],
            name=with_,
            logs=logs,
            baseline=baseline,
            study=study,
            published=published,
            studied=[*study_tables(), findings()] if study == MICROWAY else [],
            packages=[each for path in runs or [] for each in check_trees(path)] if package else [],
            on_read=on_read,
        )
    files = write_files(made, output)
    if as_json:
        write_json(made.as_json())
        return
    if made.sections:
        print_table(made.summary)
    for each in made.packages:
        errors = sum(finding.severity == "error" for finding in each.findings)
        verdict = f"{count_of(errors, 'error')} as a package" if errors else "accepted as a package"
        style = "red" if errors else "green"
        say(console(), text(f"{each.path}: {verdict} of {each.ruleset or 'no known round'}", style))
    say(console(), text(f"{files[0]} and {len(files) - 1} files next to it"))


def tables(
    runs: options.Runs = None,
    baseline: BaselineOption = None,
    study: StudyOption = None,
    published: PublishedOption = None,
    as_json: options.Json = False,
) -> None:
    """Tabulate runs as the studies of MLPerf do: synopsis, speed-up, scaling, releases, precisions."""
    _something(runs, study, published)
    measured = [of_side(side) for path in runs or [] for side in load_sides(path)]
    measured += measurements_of_study(study)
    measured += measurements_of_published(published, {each.benchmark for each in measured} or None)
    found = all_tables(measured, baseline)
    if study == MICROWAY and not runs:
        found = [*study_tables(), *(table for table in found if "Synopsis" not in table.title), findings()]
    if as_json:
        write_json(tables_as_json(found))
        return
    for table in found:
        print_table(table)


def _something(runs: list[Path] | None, *others: str | None) -> None:
    if not runs and not any(others):
        raise EncoreError("no run was named", expected="RUN..., --study KEY or --published NAME", remedy="see --help")


def tables_as_json(tables: Iterable[Table]) -> list[dict[str, Any]]:
    """Return tables as plain data."""
    return [{"title": t.title, "columns": t.columns, "rows": t.rows, "note": t.note} for t in tables]


def print_table(table: Table) -> None:
    """Print a table of the results on the terminal."""
    screen = console()
    made = plain_table(table.title, *table.columns)
    for number, column in enumerate(made.columns):
        if all(not isinstance(row[number], str) for row in table.rows):
            column.justify = "right"
    for row in table.rows:
        made.add_row(*(text(cell) for cell in table.texts(row)))
    print_fitted(screen, made)
    if table.note:
        say(screen, text(table.note, "dim"))


def archive(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of logs.")],
    output: options.Output,
    submitter: Annotated[str | None, typer.Option(help="Submitter; default: as the logs say.")] = None,
    as_json: options.Json = False,
) -> None:
    """Pack runs as MLPerf's submission tree and let mlperf-logging's package checker judge it.

    Exits with 1 where the checker finds errors.
    """
    packed = write_archive(runs, output, submitter)
    verdicts = [check_package(package) for package in packed]
    if as_json:
        write_json([verdict.as_json() for verdict in verdicts])
    for verdict in verdicts if not as_json else ():
        screen = console()
        style = "green" if verdict.accepted else "yellow" if verdict.accepted is None else "red"
        say(screen, text(f"{verdict.package.folder}: {verdict.summary}", style))
        for line in verdict.errors:
            say(screen, text(f"  {line}"))
    if any(verdict.accepted is False for verdict in verdicts):
        raise typer.Exit(ExitCode.FAILED)
