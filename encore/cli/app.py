"""`encore`: the command line. Errors of the user end in one plain message and a documented exit code."""

import atexit
import importlib
import inspect
import io
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main

from encore import __version__, files, paths
from encore.cli.command_classes import Command, Group
from encore.errors import EncoreError, ExitCode, unknown_name

# Command -> module.function. An entry without a function is a command group, defined by GROUP of the module.
COMMANDS = {
    "run": "run.run", "submit": "submit.submit", "status": "jobs.show_status", "follow": "jobs.follow",
    "cancel": "jobs.cancel", "list": "show.list_", "show": "show.show", "data": "data", "doctor": "doctor.doctor",
    "selftest": "selftest.selftest", "bench": "bench.bench", "images": "images", "score": "results.score",
    "check": "results.check", "published": "published.published", "compare": "results.compare",
    "report": "report.report", "play": "go_text_protocol.play", "schema": "schemas.schema",
}  # fmt: skip
# Lab commands, in a separate section of the help.
LAB = {
    "audit": "results.audit", "sweep": "sweep.sweep", "plan": "plan.plan", "study": "study",
    "reproduce": "reproduce.reproduce", "archive": "packaging.archive", "verify": "packaging.verify",
    "export": "export.export", "serve": "serve.serve",
}  # fmt: skip


@contextmanager
def _closed_pipe() -> Iterator[None]:
    # click exits with 1 if the reader has left; `head`, which has seen enough, is not an error.
    try:
        yield
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, select.POLLERR)
        if not output.poll(0):
            raise
        files.discard(sys.stdout)
        raise SystemExit(ExitCode.REACHED) from None


def _flush_output() -> None:
    # Python would exit with 120.
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        files.discard(sys.stdout)


class Commands(Group):
    """Command group that imports a command's module on first use, which keeps the start-up short."""

    @_closed_pipe()
    def make_context(self, *args: Any, **options: Any) -> Any:
        return super().make_context(*args, **options)

    @_closed_pipe()
    def invoke(self, ctx: Any) -> Any:
        return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, *LAB]

    def sections(self, ctx: Any) -> dict[str, Sequence[str]]:
        return {"Commands": [*COMMANDS], "Lab (studies, audits, submissions, serving)": [*LAB]}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        targets = {**COMMANDS, **LAB}
        if cmd_name not in targets:
            raise unknown_name("command", cmd_name, targets)
        name, _, function = targets[cmd_name].partition(".")
        module = importlib.import_module(f"encore.cli.{name}")
        parent = typer.Typer(add_completion=False, rich_markup_mode=None)
        parent.callback()(lambda: None)
        if function:
            add(parent, cmd_name, getattr(module, function))
        else:
            group = typer.Typer(cls=Group, help=module.HELP, no_args_is_help=True)
            for subcommand, command in module.GROUP.items():
                add(group, subcommand, command)
            parent.add_typer(group, name=cmd_name)
        commands: Any = typer.main.get_command(parent)
        return commands.commands[cmd_name]


def add(group: typer.Typer, name: str, function: Callable[..., None]) -> None:
    """Add a command. The docstring is its help; the part after "Examples:" is printed below the options."""
    text, _, examples = (inspect.getdoc(function) or "").partition("\n\nExamples:\n")
    group.command(
        name,
        help=text,
        epilog=f"Examples:\n{examples}" if examples else None,
        **{"cls": Command, **getattr(function, "settings", {})},
    )(function)


app = typer.Typer(
    name="encore",
    cls=Commands,
    help="Reproduce MLPerf Training results: configure, run, evaluate, compare.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _version(context: typer.Context, requested: bool) -> None:
    if not requested:
        return
    if context.params.get("as_json"):
        # Imported here because most calls do not need it.
        from encore import release
        from encore.cli import layout

        layout.write_json("release", release.facts())
    else:
        typer.echo(f"encore {__version__}")
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, help="Print the version.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", is_eager=True, help="With --version: print versions of rules and data as JSON, too."),
    ] = False,
) -> None:
    """Take the options of all commands."""


def _check_encoding() -> None:
    # JSON files and MLPerf logs are UTF-8 and contain these paths.
    for name in (*sys.argv[1:], str(Path.cwd()), str(paths.cache_folder()), str(paths.ROOT)):
        escaped = name.encode("utf-8", "backslashreplace").decode()
        if escaped != name:
            raise EncoreError(f"{escaped} is not valid UTF-8", hint="rename it, or use a symbolic link")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an ASCII locale


def main() -> None:
    # SIGTERM from a job scheduler stops a setup or data preparation like Ctrl-C, children first.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    atexit.register(_flush_output)
    try:
        _check_encoding()
        app()
    except EncoreError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    main()
