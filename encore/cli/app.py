"""`encore`: the command line. Errors of the user end in one plain message and a documented exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Annotated

import typer

from encore import __version__
from encore.cli import (
    bench,
    compare,
    data,
    doctor,
    images,
    jobs,
    plan,
    report,
    results,
    run,
    show,
    submit,
    sweep,
)
from encore.errors import EncoreError, ExitCode

app = typer.Typer(
    name="encore",
    help="Reproduce MLPerf Training results: configure, run, judge, compare.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"encore {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options of all commands."""


COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "run": (run.run, run.EPILOG),
    "submit": (submit.submit, submit.EPILOG),
    "status": (jobs.show_status, jobs.STATUS_EPILOG),
    "follow": (jobs.follow, jobs.FOLLOW_EPILOG),
    "cancel": (jobs.cancel, jobs.CANCEL_EPILOG),
    "sweep": (sweep.sweep, sweep.EPILOG),
    "plan": (plan.plan, plan.EPILOG),
    "list": (show.list_, show.LIST_EPILOG),
    "show": (show.show, show.SHOW_EPILOG),
    "doctor": (doctor.doctor, doctor.EPILOG),
    "bench": (bench.bench, bench.EPILOG),
    "score": (results.score, results.SCORE_EPILOG),
    "check": (results.check, results.CHECK_EPILOG),
    "published": (results.published, results.PUBLISHED_EPILOG),
    "compare": (compare.compare, compare.COMPARE_EPILOG),
    "explain": (compare.explain, compare.EXPLAIN_EPILOG),
    "report": (report.report, report.REPORT_EPILOG),
    "tables": (report.tables, report.TABLES_EPILOG),
    "archive": (report.archive, report.ARCHIVE_EPILOG),
}
for name, (command, epilog) in COMMANDS.items():
    app.command(name, epilog=epilog, context_settings=submit.PASS_ON if name == "submit" else None)(command)
data.register(app)
images.register(app)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run the ``encore`` command."""
    # A job scheduler's SIGTERM ends a set-up or a preparation as Ctrl-C does: children first.
    signal.signal(signal.SIGTERM, _terminated)
    try:
        app()
    except EncoreError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output, such as `head`, has seen enough.
        sys.stderr.close()
        sys.exit(ExitCode.REACHED)


if __name__ == "__main__":
    main()
