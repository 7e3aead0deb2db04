"""`encore`: the command line. Errors of the user end in one plain message and a documented exit code."""

from __future__ import annotations

import importlib
import signal
import sys
from types import FrameType
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from encore import __version__
from encore.errors import EncoreError, ExitCode
from encore.names import unknown

COMMANDS = {
    "run": "run.run", "submit": "submit.submit", "status": "jobs.show_status", "follow": "jobs.follow",
    "cancel": "jobs.cancel", "sweep": "sweep.sweep", "plan": "plan.plan", "list": "show.list_", "show": "show.show",
    "data": "data", "doctor": "doctor.doctor", "selftest": "selftest.selftest", "bench": "bench.bench",
    "images": "images", "score": "results.score",
    "check": "results.check", "audit": "audit.audit", "published": "published.published", "compare": "compare.compare",
    "explain": "compare.explain", "report": "report.report", "tables": "report.tables",
    "show-detections": "detections.show_detections", "archive": "report.archive",
    "play": "play.play", "export": "export.export", "serve": "serve.serve", "reproduce": "reproduce.reproduce",
    "study": "study",
}  # fmt: skip
"""Module and function of each command; a module alone registers a group of them."""


class Commands(TyperGroup):
    """The commands, each imported when it is asked for, so that none waits for the imports of the others."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the help."""
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; EncoreError offers the nearest name."""
        if cmd_name not in COMMANDS:
            raise unknown("command", cmd_name, COMMANDS)
        where, _, function = COMMANDS[cmd_name].partition(".")
        module = importlib.import_module(f"encore.cli.{where}")
        part = typer.Typer(add_completion=False, rich_markup_mode="rich")
        part.callback()(lambda: None)
        if function:
            epilog, settings = (
                getattr(module, f"{cmd_name.upper().replace('-', '_')}_EPILOG"),
                getattr(module, "PASS_ON", None),
            )
            part.command(cmd_name, epilog=epilog, context_settings=settings)(getattr(module, function))
        else:
            module.register(part)
        group: Any = typer.main.get_command(part)
        return group.commands[cmd_name]


app = typer.Typer(
    name="encore",
    cls=Commands,
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
