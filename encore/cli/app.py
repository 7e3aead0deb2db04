"""`encore`: the command line. Errors of the user end in one plain message and a documented exit code."""

from __future__ import annotations

import signal
import sys
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


for module in (
    run, submit, jobs, sweep, plan, show, data, doctor, bench, images, results, compare, report
):  # fmt: skip
    module.register(app)


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
