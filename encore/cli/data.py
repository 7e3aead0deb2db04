"""``encore data``: get raw data, prepare, verify and list data sets."""

import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text
from typing_extensions import TypedDict

from encore import catalogue, configuration, data, download, environment, job, paths
from encore.cli import layout, options
from encore.cli.flags import Command
from encore.containers import checks, runtimes
from encore.errors import EncoreError, ExitCode
from encore.machine import node, preflight

PLAIN_SECONDS = 10.0  # Seconds between two lines of progress where there is no terminal to draw a bar on


class _PrepareCommand(Command):
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
    passport = _prepare(choice, directory, wanted, target, python)
    typer.echo(f"{passport.directory}: {describe(passport)}")


prepare.settings = {  # type: ignore[attr-defined]
    "cls": _PrepareCommand,
    "context_settings": options.PASS_ON,
}


def _prepare(
    choice: catalogue.Choice,
    directory: Path,
    wanted: data.Preparation,
    target: runtimes.Target = runtimes.ON_HOST,
    python: Path | None = None,
) -> data.DataPassport:
    name = choice.benchmark.name
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        by = _python_of(choice, python) if target.runtime == "host" else _container_of(target, name, directory, wanted)
        with shown_progress(Console(stderr=True)) as on_update:
            return data.prepare(name, directory, wanted, by, on_update)
    finally:
        for folder in made:
            with suppress(OSError):  # none that a refused preparation has made is left empty
                folder.rmdir()


def get(
    benchmark: options.Benchmark,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the raw data.")],
    run: Annotated[bool, typer.Option("--run", help="Download what is missing, and check what is there.")] = False,
    then_prepare: Annotated[bool, typer.Option("--prepare", help="Download and prepare, on the host.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Prepared data; default: data/BENCHMARK.")
    ] = None,
    tool: Annotated[
        Literal["wget", "curl"] | None, typer.Option("--with", help="Downloader; default: the first that is there.")
    ] = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Print where a benchmark's raw data come from and how to get them, or download them.

    Sizes and checksums are those that the source publishes. An interrupted download resumes. Nothing that comes from
    the network is run: MLCommons' files are downloaded by their published list.

    Examples:

      encore data get ssd /downloads/coco

      encore data get ssd /downloads/coco --prepare -o /data/coco
    """
    choice = catalogue.choose(benchmark)
    if not (choice.benchmark.download.files or choice.benchmark.download.same_as):
        raise EncoreError(f"benchmark.toml of {choice.benchmark.name} has no [download]", hint="get the data by hand")
    place = output or paths.default_data(choice.benchmark.name)
    plan = download.plan(choice.benchmark, directory, place)
    if then_prepare and plan.needs:
        raise EncoreError(f"--prepare, but {plan.data_set} needs {plan.needs}", hint="leave --prepare out")
    if then_prepare and (place / data.PASSPORT).exists() and not data.holds(place, plan.data_set):
        raise EncoreError(
            f"{place} holds another data set", expected="a folder for this one alone", hint="name one: -o DIR"
        )
    does = (run or then_prepare) and not dry_run
    if does:
        with shown_progress(Console(stderr=True, quiet=as_json)) as on_update:
            download.run(plan, download.choose_tool(tool), on_update)
        if then_prepare:
            _prepare(choice, place, plan.preparation())
    shown: str = tool or next((each for each in download.TOOLS if shutil.which(each)), download.TOOLS[0])
    if as_json:
        layout.write_json("download", _planned(plan, shown))
    elif does:
        typer.echo(_next(plan) if not then_prepare else f"{place}: {describe(data.read_passport(place))}")
    else:
        typer.echo("\n".join(_plan_lines(plan, shown)))


class PlannedFile(TypedDict):
    """A file of the raw data."""

    file: str
    kind: str  # url, r2 (a list of files of MLCommons' storage), gs, or login
    address: str
    bytes: int | None  # null: no size is published
    checksums: Mapping[str, Sequence[str]]  # By algorithm, the digests, or their beginnings, that are right
    source: str  # Of these facts
    state: str
    command: str


class PlannedDownload(TypedDict):
    """Where a benchmark's raw data come from."""

    benchmark: str
    data_set: str
    terms: str
    needs: str  # What a user has to add before the preparation
    files: list[PlannedFile]
    prepared_bytes: int  # At most, 0: not known
    next: list[str]  # The command that prepares them


def _planned(plan: download.Plan, tool: str) -> PlannedDownload:
    files: list[PlannedFile] = [
        {
            "file": str(each.target),
            "kind": each.kind,
            "address": each.address,
            "bytes": each.bytes or None,
            "checksums": each.checksums,
            "source": each.source,
            "state": each.state(),
            "command": each.command(tool),
        }
        for each in plan.fetches
    ]
    return {
        "benchmark": plan.benchmark,
        "data_set": plan.data_set,
        "terms": plan.terms,
        "needs": plan.needs,
        "files": files,
        "prepared_bytes": plan.prepared_bytes,
        "next": plan.next(),
    }


def _plan_lines(plan: download.Plan, tool: str) -> Iterator[str]:
    known = sum(each.bytes for each in plan.fetches)
    size = f"{filesize.decimal(known)} to download" if known else "no size published"
    yield f"{plan.data_set} for {plan.benchmark}: {size}" + (
        f", {filesize.decimal(plan.prepared_bytes)} at most to prepare it" if plan.prepared_bytes else ""
    )
    if plan.terms:
        yield f"terms: {plan.terms}"
    for each in plan.fetches:
        size = filesize.decimal(each.bytes) if each.bytes else "no size published"
        checksum = ", ".join(f"{name} {' or '.join(digests)}" for name, digests in each.checksums.items())
        by_list = "MD5 of each file by MLCommons' list" if each.kind == "r2" else "no checksum published"
        yield f"\n{each.target}: {each.state()}, {size}, {checksum or by_list} ({each.source})"
        yield f"  {each.command(tool)}"
        if each.unpacked_bytes:
            yield f"  {shlex.join(['gunzip', '--force', str(each.target)])}"
    yield "\n" + _next(plan)


def _next(plan: download.Plan) -> str:
    needs = f"needed besides: {plan.needs}\n" if plan.needs else ""
    return f"{needs}next: {shlex.join(plan.next())}"


def verify(
    benchmark: Annotated[str | None, typer.Argument(help="Benchmark; without one, every data set in data/.")] = None,
    directory: Annotated[Path | None, typer.Argument(help="Data folder; default: data/BENCHMARK.")] = None,
    quick: Annotated[bool, typer.Option("--quick/--full", help="Sizes and ends of the files, or every byte.")] = False,
    python: options.Python = None,
    as_json: options.Json = False,
) -> None:
    """Compare a data set with its manifest and look for mistakes of its preparation; exit code 2 where there are any.

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
    else:
        for benchmark, directory, state in known:
            line = state.found if isinstance(state, EncoreError) else f"{directory}: ready: {describe(state)}"
            typer.echo(f"{benchmark:<12}{line}")
    # One that is not there is no damage.
    if any(isinstance(state, EncoreError) and (folder / data.PASSPORT).exists() for _, folder, state in known):
        raise typer.Exit(ExitCode.REFUSED)


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


HELP = "Get, prepare and verify data sets."
GROUP = {"get": get, "prepare": prepare, "verify": verify}
