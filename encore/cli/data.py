"""``encore data``: prepare, verify and list data sets."""

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text
from typer.core import TyperCommand
from typing_extensions import TypedDict

from encore import catalogue, configuration, data, environment, job, paths
from encore.cli import layout, options
from encore.containers import checks, runtimes
from encore.errors import EncoreError, ExitCode
from encore.machine import node, preflight

PLAIN_SECONDS = 10.0  # Seconds between two lines of progress where there is no terminal to draw a bar on


class _PrepareCommand(TyperCommand):
    """``encore data prepare BENCHMARK --help`` ends with the options that this benchmark alone has."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["words"] = list(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        known = catalogue.choices()
        chosen = [known[word].benchmark.name for word in ctx.meta["words"] if word in known]
        typer.echo(data.own_options(chosen[0]) if chosen else "")


def prepare(
    context: typer.Context,
    benchmark: options.Benchmark,
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="Raw data; without it, the benchmark's toy data set.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Folder to write to; default: data/BENCHMARK.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the data set; default: its source's.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; default: one per core.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every random choice; default: 0.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another data set.")] = False,
    runtime: Annotated[str, typer.Option(help="host, or a container runtime that has the benchmark's image.")] = "host",
    python: options.Python = None,
    dry_run: options.DryRun = False,
) -> None:
    """Turn raw data into the files that training reads; an interrupted preparation resumes.

    A benchmark may take options of its own, at the end: encore data prepare BENCHMARK --help lists them.

    Examples:

      encore data prepare resnet                                    the toy data set

      encore data prepare resnet /downloads -o /data/imagenet --workers 32
    """
    choice = catalogue.choose(benchmark)
    name_of_data = choice.benchmark.name
    directory = output or paths.default_data(name_of_data)
    words = [*filter(None, [source]), *context.args]
    # A benchmark's own option directly behind its name is no source.
    raw = Path(words.pop(0)) if source is not None and not source.startswith("-") else None
    wanted = data.Preparation(
        source=raw,
        name=name,
        workers=workers,
        seed=seed,
        overwrite=overwrite,
        options=tuple(words),
    )
    data.check_options(name_of_data, wanted)
    if python is not None and runtime != "host":
        raise EncoreError(f"--python with --runtime {runtime}", expected="one of them", hint="leave one out")
    target = runtimes.choose(runtime, choice, node.this_node(), "cpu")
    in_container = target.runtime != "host"
    if dry_run:
        command = data.prepare_command("python", name_of_data, directory, wanted)
        if in_container:
            command = [*runtimes.preparation(target, name_of_data, directory, wanted).argv]
        typer.echo(shlex.join(command))
        return
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        by = _container_of(target, name_of_data, directory, wanted) if in_container else _python_of(choice, python)
        with shown_progress(Console(stderr=True)) as on_update:
            passport = data.prepare(name_of_data, directory, wanted, by, on_update)
    finally:
        for folder in made:
            with suppress(OSError):  # none that a refused preparation has made is left empty
                folder.rmdir()
    typer.echo(f"{passport.directory}: {describe(passport)}")


prepare.settings = {  # type: ignore[attr-defined]
    "cls": _PrepareCommand,
    "context_settings": options.PASS_ON,
}


def verify(
    benchmark: Annotated[str | None, typer.Argument(help="Benchmark; without one, every data set in data/.")] = None,
    directory: Annotated[Path | None, typer.Argument(help="Data folder; default: data/BENCHMARK.")] = None,
    quick: Annotated[bool, typer.Option("--quick/--full", help="Sizes and ends of the files, or every byte.")] = False,
    python: options.Python = None,
    as_json: options.Json = False,
) -> None:
    """Compare a data set with its manifest; exit code 2 when they differ.

    Without a benchmark: every data set in data/ and whether its manifest and the sizes of its files are right.

    Examples:

      encore data verify

      encore data verify resnet /data/imagenet --quick
    """
    if benchmark is None:
        _list_data(as_json)
        return
    choice = catalogue.choose(benchmark)
    folder = directory or paths.default_data(choice.benchmark.name)
    by = _python_of(choice, python)
    with shown_progress(Console(stderr=True, quiet=as_json)) as on_update:
        problems = data.verify(choice.benchmark.name, folder, by, quick, on_update)
    if as_json:
        layout.write_json("data", _verified(choice.benchmark.name, folder, problems))
    elif not problems:
        how = "quick look" if quick else "every byte"
        typer.echo(f"{folder} is whole ({how}): {describe(data.read_passport(folder))}")
    for problem in problems if not as_json else ():
        typer.echo(str(problem), err=True)
    if problems:
        raise typer.Exit(ExitCode.REFUSED)


class DataFinding(TypedDict):
    found: str
    expected: str
    hint: str


class VerifiedData(TypedDict):
    """A data set, compared with its manifest."""

    benchmark: str
    directory: str
    whole: bool
    findings: list[DataFinding]


def _verified(benchmark: str, folder: Path, problems: Sequence[EncoreError]) -> VerifiedData:
    findings: list[DataFinding] = [
        {"found": each.found, "expected": each.expected, "hint": each.hint} for each in problems
    ]
    return {"benchmark": benchmark, "directory": str(folder), "whole": not problems, "findings": findings}


def _list_data(as_json: bool) -> None:
    # Print each data set below ``data/``: in lines, since a table would wrap paths, which could not be copied.
    known = data.data_folders()
    if as_json:
        found = [(name, folder, [each] if isinstance(each, EncoreError) else []) for name, folder, each in known]
        layout.write_json("data", [_verified(*each) for each in found])
        return
    for benchmark, directory, state in known:
        line = state.found if isinstance(state, EncoreError) else f"{directory}: ready: {describe(state)}"
        typer.echo(f"{benchmark:<12}{line}")


def describe(passport: data.DataPassport) -> str:
    counts = ", ".join(f"{count:,} {split}" for split, count in passport.counts.items())
    size = filesize.decimal(passport.bytes)
    classes = f"{passport.classes:,} classes, " if passport.classes else ""
    return f"{passport.name}, {counts}, {classes}{size}, id {passport.id[:12]}"


def _container_of(target: runtimes.Target, benchmark: str, directory: Path, wanted: data.Preparation) -> job.Command:
    # The command that prepares in a container, whose folders must be there before it starts.
    if target.problem is not None:
        raise target.problem
    folders = [directory.absolute(), *([wanted.source.absolute()] if wanted.source else [])]
    preflight.refuse_failed(checks.check_folders(folders))
    if wanted.source is not None and not wanted.source.exists():
        raise EncoreError(f"{wanted.source} does not exist", hint="name the folder of the raw data")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "give a folder that you may write to: -o DIR"
        raise EncoreError(f"{directory} cannot be made: {error.strerror}", hint=hint) from error
    return runtimes.preparation(target, benchmark, directory, wanted)


def _python_of(choice: catalogue.Choice, named: Path | None) -> Path:
    # The Python that the user named, or that of the benchmark's environment, which is made if need be.
    if named is not None:
        small = catalogue.find_system(choice, choice.benchmark.small_data.system, None)
        return checks.named_python(named, configuration.resolve(choice, small, 1, 1, []))
    return environment.ensure_environment(choice.implementation.framework, lambda text: typer.echo(text, err=True))


@contextmanager
def shown_progress(console: Console) -> Iterator[data.OnUpdate]:
    if not console.is_terminal:
        yield _plain_lines(console)
        return
    columns = (TextColumn("{task.description:>8}"), BarColumn(), _Count(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        tasks = {}

        def update(news: data.Update) -> None:
            if news.note:
                console.print(news.note, highlight=False, markup=False)
                return
            if news.phase not in tasks:
                tasks[news.phase] = bars.add_task(news.phase, total=news.total, unit=news.unit)
            bars.update(tasks[news.phase], completed=news.done, total=news.total)

        yield update


class _Count(ProgressColumn):
    """How much of a phase is done, in its own unit."""

    def render(self, task: Task) -> Text:
        return Text(amount(int(task.completed), None if task.total is None else int(task.total), task.fields["unit"]))


def amount(done: int, total: int | None, unit: str) -> str:
    shown, suffix = (filesize.decimal, "") if unit == "bytes" else ("{:,}".format, f" {unit}")
    return shown(done) + ("" if total is None else f" of {shown(total)}") + suffix


def _plain_lines(console: Console) -> data.OnUpdate:
    printed: dict[str, float] = {}

    def update(news: data.Update) -> None:
        is_due = time.monotonic() - printed.get(news.phase, 0.0) >= PLAIN_SECONDS
        if news.note or news.done == news.total or is_due:
            printed[news.phase] = time.monotonic()
            line = news.note or f"{news.phase}: {amount(news.done, news.total, news.unit)}"
            console.print(line, soft_wrap=True, highlight=False, markup=False)

    return update


HELP = "Prepare and verify data sets."
GROUP = {"prepare": prepare, "verify": verify}
