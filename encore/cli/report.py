"""``encore report``, ``encore tables`` and ``encore archive``: runs shown, tabulated and packed for MLPerf."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from encore.cli.compare import LogsOption, WithOption
from encore.cli.results import JsonOption, console, say, text, write_json
from encore.errors import EncoreError, ExitCode

if TYPE_CHECKING:
    from encore.results.tables import Table

_REPORT_HELP = """Write a report of runs: Markdown, and one HTML page that needs no network.

Examples:

    encore report results/20260101T120000Z-resnet-mxnet-dgxa100 -o report

    encore report --study microway-dgx1-scaling -o study
"""
_TABLES_HELP = """Tabulate runs as the studies of MLPerf do: synopsis, speed-up, scaling, releases, precisions.

Examples:

    encore tables results

    encore tables --published v0.7/NVIDIA/dgx --baseline v0.7/NVIDIA/dgx1_ngc20.06_mxnet --json

    encore tables --study microway-dgx1-scaling
"""
_ARCHIVE_HELP = """Pack runs as MLPerf's submission tree and let mlperf-logging's package checker judge it.

Examples:

    encore archive results/20260101T120000Z-resnet-mxnet-dgxa100 -o submission --submitter MyLab
"""

RunsArgument = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RUN...", help="Run folders, folders of logs, or trees of them."),
]
OutOption = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder to write to.")]
StudyOption = Annotated[
    str | None, typer.Option("--study", metavar="KEY", help="Also a study, such as microway-dgx1-scaling.")
]
PublishedOption = Annotated[
    str | None,
    typer.Option("--published", metavar="NAME", help="Also published results with NAME in their name."),
]
BaselineOption = Annotated[
    str | None, typer.Option("--baseline", metavar="SYSTEM", help="Also scores relative to this system.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("report", help=_REPORT_HELP)(report)
    app.command("tables", help=_TABLES_HELP)(tables)
    app.command("archive", help=_ARCHIVE_HELP)(archive)


def report(
    output: OutOption,
    runs: RunsArgument = None,
    with_: WithOption = None,
    logs: LogsOption = None,
    baseline: BaselineOption = None,
    study: StudyOption = None,
    published: PublishedOption = None,
) -> None:
    """Write the report of ``runs``."""
    from encore.results.report import write_report

    _something(runs, study, published)
    files = write_report(
        runs or [], output, name=with_, logs=logs, baseline=baseline, study=study, published=published
    )
    say(console(), text(f"{files[0]} and {len(files) - 1} files beside it"))


def tables(
    runs: RunsArgument = None,
    baseline: BaselineOption = None,
    study: StudyOption = None,
    published: PublishedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the tables of ``runs``."""
    from encore.results.measurements import of_side
    from encore.results.report import measurements_of_published, measurements_of_study
    from encore.results.sides import load_sides
    from encore.results.studies import MICROWAY, findings
    from encore.results.studies import tables as study_tables
    from encore.results.tables import all_tables

    _something(runs, study, published)
    measured = [of_side(side) for path in runs or [] for side in load_sides(path)]
    measured += measurements_of_study(study)
    measured += measurements_of_published(published, {each.benchmark for each in measured} or None)
    found = all_tables(measured, baseline)
    if study == MICROWAY and not runs:
        found = [*study_tables(), *(table for table in found if "Synopsis" not in table.title), findings()]
    if as_json:
        write_json([{"title": t.title, "columns": t.columns, "rows": t.rows, "note": t.note} for t in found])
        return
    for table in found:
        print_table(table)


def _something(runs: list[Path] | None, *others: str | None) -> None:
    if not runs and not any(others):
        raise EncoreError(
            "no run was named", expected="RUN..., --study KEY or --published NAME", remedy="see --help"
        )


def print_table(table: Table) -> None:
    """A table of the results on the terminal."""
    from encore.cli.layout import plain_table

    screen = console()
    made = plain_table(table.title, *table.columns)
    for number, column in enumerate(made.columns):
        if all(not isinstance(row[number], str) for row in table.rows):
            column.justify = "right"
    for row in table.rows:
        made.add_row(*(text(cell) for cell in table.texts(row)))
    screen.print(made)
    if table.note:
        say(screen, text(table.note, "dim"))


def archive(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of logs.")],
    output: OutOption,
    submitter: Annotated[str | None, typer.Option(help="Submitter; default: as the logs say.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Pack ``runs``; exits with 1 where the package checker finds errors."""
    from encore.results.archive import check_package, write_archive

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
