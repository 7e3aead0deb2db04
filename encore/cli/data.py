"""``encore data``: get raw data, prepare, verify and list data sets."""

import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from typing_extensions import TypedDict

from encore import catalogue, configuration, data, download, environment, hub, job, paths
from encore.cli import layout, options
from encore.cli.command_classes import Command
from encore.containers import checks, runtimes
from encore.errors import EncoreError, ExitCode
from encore.machine import node, preflight
from encore.run import programs

PLAIN_SECONDS = 10.0  # Interval between progress lines if the output is not a terminal


class _PrepareCommand(Command):
    """Appends the options specific to the benchmark to ``encore data prepare BENCHMARK --help``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["words"] = list(args)
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        choices = catalogue.choices()
        benchmarks = [choices[word].benchmark.name for word in ctx.meta["words"] if word in choices]
        if own_options := data.own_options(benchmarks[0]) if benchmarks else "":
            formatter.write(f"\n{own_options}")
        super().format_epilog(ctx, formatter)


def prepare(
    context: typer.Context,
    benchmark: options.Benchmark,
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="Raw data; without it, the benchmark's toy data set.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Folder to write to; default: data/BENCHMARK.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the data set. Default: name of the source.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; default: one per core.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed; default: 0.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a different data set in the folder.")] = False,
    runtime: Annotated[str, typer.Option(help="host, or a container runtime that has the benchmark's image.")] = "host",
    python: options.Python = None,
    dry_run: options.DryRun = False,
) -> None:
    """Convert raw data to the training format. Interrupted preparations resume.

    Benchmarks can have additional options, listed by encore data prepare BENCHMARK --help.

    Examples:

      encore data prepare resnet                                    the toy data set

      encore data prepare resnet /downloads -o /data/imagenet --workers 32
    """
    choice = catalogue.choose(benchmark)
    name_of_data = choice.benchmark.name
    directory = output or paths.default_data(name_of_data)
    arguments = [*filter(None, [source]), *context.args]
    # An option directly after the benchmark is not the source folder.
    raw = Path(arguments.pop(0)) if source is not None and not source.startswith("-") else None
    preparation = data.Preparation(
        source=raw,
        name=name,
        workers=workers,
        seed=seed,
        overwrite=overwrite,
        options=tuple(arguments),
    )
    data.check_options(name_of_data, preparation)
    if python is not None and runtime != "host":
        raise EncoreError(f"--python with --runtime {runtime}", expected="one of them", hint="leave one out")
    target = runtimes.choose(runtime, choice, node.this_node(), "cpu")
    if dry_run:
        command = data.prepare_command("python", name_of_data, directory, preparation)
        if target.runtime != "host":
            command = [*runtimes.preparation(target, name_of_data, directory, preparation).argv]
        typer.echo(shlex.join(command))
    else:
        passport = _prepare(choice, directory, preparation, target, python)
        typer.echo(f"{passport.directory}: {describe(passport)}")


prepare.settings = {  # type: ignore[attr-defined]
    "cls": _PrepareCommand,
    "context_settings": options.PASS_ON,
}


def _prepare(
    choice: catalogue.Choice,
    directory: Path,
    preparation: data.Preparation,
    target: runtimes.Target = runtimes.ON_HOST,
    python: Path | None = None,
) -> data.DataPassport:
    name, source = choice.benchmark.name, preparation.source
    created = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        runner: Path | job.Command
        if target.runtime != "host":
            runner = _container_of(target, name, directory, preparation)
        elif python is None and source and any(path.suffix == ".parquet" for path in (source, *source.glob("*"))):
            # The framework's environment, followed by the packages that read Parquet
            variables = programs.variables_of(choice, None, [hub.ENVIRONMENT], lambda text: typer.echo(text, err=True))
            command = data.prepare_command(variables["ENCORE_PYTHON"], name, directory, preparation)
            argv = (*command, "--progress", "json")
            runner = job.Command(argv=argv, environment=variables, working_directory=paths.ROOT)
        else:
            runner = _python_of(choice, python)
        with shown_progress(Console(stderr=True)) as on_update:
            return data.prepare(name, directory, preparation, runner, on_update)
    finally:
        for folder in created:
            with suppress(OSError):  # Do not leave an empty folder after a rejected preparation
                folder.rmdir()


def get(
    benchmark: options.Benchmark,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the raw data.")],
    run: Annotated[bool, typer.Option("--run", help="Download missing files and verify existing ones.")] = False,
    then_prepare: Annotated[bool, typer.Option("--prepare", help="Download and prepare, on the host.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Prepared data; default: data/BENCHMARK.")
    ] = None,
    tool: Annotated[
        Literal["wget", "curl", "hf"] | None,
        typer.Option("--with", help="Downloader; default: wget, else curl. hf: the Hugging Face Hub's client."),
    ] = None,
    variant: Annotated[str, typer.Option(metavar="NAME", help="An alternative source, such as f16.")] = "",
    revision: Annotated[
        str, typer.Option(metavar="COMMIT", help="Commit of a repository for which none is published.")
    ] = "",
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Print the sources of a benchmark's raw data and the download commands, or download the data.

    Sizes and checksums are published by the source. Interrupted downloads resume. Downloaded files are never
    executed; files of MLCommons and of the Hugging Face Hub are downloaded according to their published list. For the
    Hub, set HF_TOKEN or use hf auth login.

    Examples:

      encore data get ssd /downloads/coco

      encore data get ssd /downloads/coco --prepare -o /data/coco

      encore data get llama2-70b-lora /downloads/llama2 --run
    """
    choice = catalogue.choose(benchmark)
    if not (choice.benchmark.download.files or choice.benchmark.download.same_as):
        raise EncoreError(
            f"benchmark.toml of {choice.benchmark.name} does not define [download]", hint="get the data by hand"
        )
    target_folder = output or paths.default_data(choice.benchmark.name)
    plan = download.plan(choice.benchmark, directory, target_folder, variant, revision)
    single_tool, uses_client = (None, True) if tool == download.HUB_CLIENT else (tool, False)
    if then_prepare and plan.needs:
        raise EncoreError(f"--prepare, but {plan.data_set} needs {plan.needs}", hint="leave --prepare out")
    if then_prepare and (target_folder / data.PASSPORT).exists() and not data.holds(target_folder, plan.data_set):
        raise EncoreError(
            f"{target_folder} contains a different data set", expected="a separate folder", hint="choose one: -o DIR"
        )
    does = (run or then_prepare) and not dry_run
    if does:
        with shown_progress(Console(stderr=True, quiet=as_json)) as on_update:
            download.run(plan, download.choose_tool(single_tool), on_update, uses_client)
        if then_prepare:
            _prepare(choice, target_folder, plan.preparation())
    program: str = single_tool or next((name for name in download.TOOLS if shutil.which(name)), download.TOOLS[0])
    if as_json:
        layout.write_json("download", _planned(plan, program))
    elif does:
        typer.echo(
            _next(plan) if not then_prepare else f"{target_folder}: {describe(data.read_passport(target_folder))}"
        )
    else:
        typer.echo("\n".join(_plan_lines(plan, program)))


def _planned(plan: download.Plan, tool: str) -> dict[str, Any]:
    of_plan = ("benchmark", "data_set", "terms", "needs", "prepared_bytes", "weights", "variants")
    of_file = ("kind", "address", "bytes", "checksums", "source")
    files = [
        {
            **{name: getattr(fetch, name) for name in of_file},
            "file": str(fetch.target),
            "state": fetch.state(),
            "command": fetch.command(tool),
        }
        for fetch in plan.fetches
    ]
    return {**{name: getattr(plan, name) for name in of_plan}, "files": files, "next": plan.next()}


_LISTS = {"r2": "MD5 of the files in MLCommons' list", "hub": "SHA-256 of the files in the Hub's list"}


def _plan_lines(plan: download.Plan, tool: str) -> Iterator[str]:
    known_bytes = sum(fetch.bytes or 0 for fetch in plan.fetches)
    size = f"{filesize.decimal(known_bytes)} to download" if known_bytes else "no size published"
    yield f"{plan.data_set} for {plan.benchmark}: {size}" + (
        f", up to {filesize.decimal(plan.prepared_bytes)} to prepare it" if plan.prepared_bytes else ""
    )
    if plan.terms:
        yield f"terms: {plan.terms}"
    for fetch in plan.fetches:
        size = filesize.decimal(fetch.bytes) if fetch.bytes else "no size published"
        checksum = ", ".join(f"{name} {' or '.join(digests)}" for name, digests in fetch.checksums.items())
        by_list = _LISTS.get(fetch.kind, "no checksum published")
        if fetch.hub and fetch.hub.combined_md5:
            by_list += f", combined MD5 {fetch.hub.combined_md5}"
        yield f"\n{fetch.target}: {fetch.state()}, {size}, {checksum or by_list} ({fetch.source})"
        yield f"  {fetch.command(tool)}"
        if fetch.hub and fetch.hub.terms:
            yield f"  gated: accept the {fetch.hub.terms} at {hub.page(fetch.hub)} and set HF_TOKEN"
        if fetch.hub and not fetch.hub.revision:
            yield "  no commit is published: select one with --revision COMMIT"
        if fetch.unpacked_bytes:
            yield f"  {shlex.join(['gunzip', '--force', str(fetch.target)])}"
    for name, address in plan.variants.items():
        yield f"\nalternative: --variant {name}: {address}"
    yield "\n" + _next(plan)


def _next(plan: download.Plan) -> str:
    needs = f"needed besides: {plan.needs}\n" if plan.needs else ""
    weights = "".join(f"\nweights of a run: --set {setting}" for setting in plan.weights)
    return f"{needs}next: {shlex.join(plan.next())}{weights}"


def verify(
    benchmark: Annotated[str | None, typer.Argument(help="Benchmark; without one, every data set in data/.")] = None,
    directory: Annotated[Path | None, typer.Argument(help="Data folder; default: data/BENCHMARK.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="Check only sizes and ends of the files, or every byte.")
    ] = False,
    python: options.Python = None,
    as_json: options.Json = False,
) -> None:
    """Verify a data set against its manifest and check for preparation errors. Exits with 2 on errors.

    Without a benchmark: list all data sets in data/ and check their manifests and file sizes.

    Examples:

      encore data verify

      encore data verify resnet /data/imagenet --quick
    """
    if benchmark is None:
        _list_data(as_json)
    choice = catalogue.choose(benchmark)
    folder = directory or paths.default_data(choice.benchmark.name)
    runner = _python_of(choice, python)
    with shown_progress(Console(stderr=True, quiet=as_json)) as on_update:
        problems = data.verify(choice.benchmark.name, folder, runner, quick, on_update)
    if as_json:
        layout.write_json("data", _verified(choice.benchmark.name, folder, problems))
    elif not problems:
        how = "quick look" if quick else "every byte"
        typer.echo(f"{folder}: complete ({how}), {describe(data.read_passport(folder))}")
    for problem in problems if not as_json else ():
        typer.echo(str(problem), err=True)
    raise typer.Exit(ExitCode.REFUSED if problems else ExitCode.REACHED)


class DataFinding(TypedDict):
    found: str
    expected: str
    hint: str


class VerifiedData(TypedDict):
    """Result of the verification of a data set."""

    benchmark: str
    directory: str
    whole: bool
    findings: list[DataFinding]


def _verified(benchmark: str, folder: Path, problems: Sequence[EncoreError]) -> VerifiedData:
    findings: list[DataFinding] = [
        {"found": problem.found, "expected": problem.expected, "hint": problem.hint} for problem in problems
    ]
    return {"benchmark": benchmark, "directory": str(folder), "whole": not problems, "findings": findings}


def _list_data(as_json: bool) -> NoReturn:
    # Lines instead of a table, which would wrap paths so that they could not be copied.
    folders = data.data_folders()
    if as_json:
        rows = [(name, folder, [state] if isinstance(state, EncoreError) else []) for name, folder, state in folders]
        layout.write_json("data", [_verified(*row) for row in rows])
    else:
        for benchmark, directory, state in folders:
            line = state.found if isinstance(state, EncoreError) else f"{directory}: ready: {describe(state)}"
            typer.echo(f"{benchmark:<12}{line}")
    # A missing data set is not an error.
    failed = (folder for _, folder, state in folders if isinstance(state, EncoreError))
    raise typer.Exit(ExitCode.REFUSED if any((f / data.PASSPORT).exists() for f in failed) else ExitCode.REACHED)


def describe(passport: data.DataPassport) -> str:
    counts = ", ".join(f"{count:,} {split}" for split, count in passport.counts.items())
    size = filesize.decimal(passport.bytes)
    classes = f"{passport.classes:,} classes, " if passport.classes else ""
    return f"{passport.name}, {counts}, {classes}{size}, id {passport.id[:12]}"


def _container_of(
    target: runtimes.Target, benchmark: str, directory: Path, preparation: data.Preparation
) -> job.Command:
    # Container command for the preparation. The mounted folders must exist before the start.
    source = preparation.source
    if target.problem is not None:
        raise target.problem
    preflight.refuse_failed(checks.check_folders([folder.absolute() for folder in (directory, source) if folder]))
    if source is not None and not source.exists():
        raise EncoreError(f"{source} does not exist", hint="pass the folder of the raw data")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "choose a writable folder: -o DIR"
        raise EncoreError(f"{directory} cannot be created: {error.strerror}", hint=hint) from error
    return runtimes.preparation(target, benchmark, directory, preparation)


def _python_of(choice: catalogue.Choice, python: Path | None) -> Path:
    # Interpreter given by the user, or of the benchmark's environment, which is created if necessary.
    if python is not None:
        small = catalogue.find_system(choice, choice.benchmark.small_data.system, None)
        return checks.named_python(python, configuration.resolve(choice, small, 1, 1, []))
    return environment.ensure_environment(choice.implementation.framework, lambda text: typer.echo(text, err=True))


@contextmanager
def shown_progress(console: Console) -> Iterator[data.OnUpdate]:
    columns = (
        TextColumn("{task.description:>8}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeRemainingColumn(),
    )  # fmt: skip
    tasks, printed = dict[str, TaskID](), dict[str, float]()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def update(news: data.Update) -> None:
            count = amount(news.done, news.total, news.unit)
            is_due = news.done == news.total or time.monotonic() - printed.get(news.phase, 0.0) >= PLAIN_SECONDS
            if console.is_terminal and not news.note:
                if news.phase not in tasks:
                    tasks[news.phase] = bars.add_task(news.phase, total=news.total, amount="")
                bars.update(tasks[news.phase], completed=news.done, total=news.total, amount=count)
            elif news.note or is_due:
                printed[news.phase] = time.monotonic()
                console.print(news.note or f"{news.phase}: {count}", soft_wrap=True, highlight=False, markup=False)

        yield update


def amount(done: int, total: int | None, unit: str) -> str:
    number_format, suffix = (filesize.decimal, "") if unit == "bytes" else ("{:,}".format, f" {unit}")
    return number_format(done) + ("" if total is None else f" of {number_format(total)}") + suffix


HELP = "Get, prepare and verify data sets."
GROUP = {"get": get, "prepare": prepare, "verify": verify}
