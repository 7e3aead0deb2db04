"""``encore study``: published studies measured again on this machine, one command each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from encore import paths
from encore.cli import options, study_nodes, study_servers
from encore.cli.layout import console, plain_table, print_fitted, say, text, write_json
from encore.errors import EncoreError, ExitCode
from encore.lab.studies import definition, measuring
from encore.lab.studies.definition import Study
from encore.lab.studies.measuring import Folder, Place
from encore.run import hints

Small = Annotated[bool, typer.Option("--small", help="The study's small grid: minutes on two cores, no GPU.")]
PointNumber = Annotated[str | None, typer.Option("--point", help="Only this point: its name, or its number from 0 on.")]
Submit = Annotated[bool, typer.Option("--submit", help="Submit the points as one Slurm array; measure nothing here.")]
Partition = Annotated[str | None, typer.Option(help="Slurm's partition for --submit.")]
FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a study.")]


def register(app: typer.Typer) -> None:
    """Add ``study`` with its kinds to the command line."""
    group = typer.Typer(help="Measure a study again, and hold it against its published figures.", no_args_is_help=True)
    for name in definition.known():
        group.command(name, help=f"{definition.load(name).title}.")(_of(name))
    group.command("run")(run)
    group.command("report")(report)
    group.command("list")(list_studies)
    study_servers.register(group)
    study_nodes.register(group)
    app.add_typer(group, name="study")


def _of(name: str) -> Callable[..., None]:
    """Return the command that measures the study ``name``."""

    def measure(
        small: Small = False,
        results: options.Results = None,
        runtime: Annotated[str, typer.Option(help="host, docker, podman or apptainer.")] = "host",
        image: options.Image = None,
        python: options.Python = None,
        settings: options.Settings = None,
        submit: Submit = False,
        partition: Partition = None,
        dry_run: options.DryRun = False,
        as_json: options.Json = False,
    ) -> None:
        study = definition.changed(definition.load(name, small), settings or ())
        _measure(study, None, Place(runtime, image, _file(python)), results, submit, partition, None, dry_run, as_json)

    return measure


def run(
    study: Annotated[str | None, typer.Argument(metavar="STUDY", help="Name, or a TOML file of your own.")] = None,
    resume: options.Resume = None,
    point: PointNumber = None,
    small: Small = False,
    results: options.Results = None,
    runtime: Annotated[str, typer.Option(help="host, docker, podman or apptainer.")] = "host",
    image: options.Image = None,
    python: options.Python = None,
    settings: options.Settings = None,
    submit: Submit = False,
    partition: Partition = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Measure a study of your own, or resume one."""
    if (study is None) == (resume is None):
        raise EncoreError("neither or both of STUDY and --resume", remedy="give a study, or the folder of one")
    if resume is not None and settings:
        raise EncoreError("--set with --resume", remedy="leave it out: the points are those of the study")
    wanted = definition.load(study, small) if study is not None else measuring.open_folder(Path(str(resume))).study
    wanted = definition.changed(wanted, settings or ())
    place = Place(runtime, image, _file(python))
    _measure(wanted, resume, place, results, submit, partition, point, dry_run, as_json)


def _file(path: Path | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def _measure(
    study: Study,
    resume: Path | None,
    place: Place,
    results: Path | None,
    submit: bool,
    partition: str | None,
    point: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    root = (results or paths.default_results()).absolute()
    folder = measuring.open_folder(resume) if resume else Folder(root / f"study-{study.name}", study, place)
    if dry_run:
        _print_points(folder, as_json)
        return
    if resume is None:
        folder = measuring.create(study, root, place)
    screen = console(stderr=as_json, soft_wrap=True)
    screen.print(f"study folder: {folder.path}")
    if submit:
        screen.print(measuring.submit(folder, {"partition": partition} if partition else {}))
        return
    code = _measure_points(folder, _named(folder, point))
    if point is None:
        report(folder.path, as_json)
    raise typer.Exit(code)


def _named(folder: Folder, point: str | None) -> str | None:
    """Return the key of the point that was named by its key or its number."""
    if point is None:
        return None
    keys = [each.key for each in folder.points()]
    if point.isdigit() and int(point) < len(keys):
        return keys[int(point)]
    if point not in keys:
        raise EncoreError(
            f"no point {point}", expected=f"a number below {len(keys)}, or a name", remedy="see --dry-run"
        )
    return point


def _measure_points(folder: Folder, only: str | None) -> ExitCode:
    screen = console(stderr=True, soft_wrap=True)
    total = len(folder.points()) * folder.study.passes

    def on_point(point: definition.Point, what: str) -> None:
        done = total - len(folder.left())
        if what != "begins":
            say(screen, text(f"{done} of {total}: {point.key}: {what}"))

    try:
        return measuring.measure(folder, on_point, only)
    except KeyboardInterrupt:
        again = hints.command("study", "run", "--resume", folder.path)
        say(screen, text(f"interrupted; resume with: {again}"))
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _print_points(folder: Folder, as_json: bool) -> None:
    """Print every point with its command and the time that all will take; make nothing."""
    left, seconds = folder.left(), folder.seconds_left()
    if as_json:
        commands = {each.key: " ".join(measuring.command(folder, each, None).argv) for each in folder.points()}
        write_json({**measuring.as_json(folder), "minutes": seconds / 60, "commands": commands})
        return
    screen = console()
    table = plain_table(folder.study.title, "no.", "point", "state", "command")
    for number, each in enumerate(folder.points()):
        argv = measuring.command(folder, each, None).argv
        table.add_row(str(number), each.key, folder.state(each), text(" ".join(argv)))
    print_fitted(screen, table)
    measured = len(folder.points()) * folder.study.passes - len(left)
    by = (
        f"the {measured} measured, each by those that are most like it"
        if measured
        else f"{folder.study.program.seconds:.0f} s a point, which the study estimates"
    )
    time = f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"
    passes = f", each point {folder.study.passes} times" if folder.study.passes > 1 else ""
    say(screen, text(f"{len(left)} to measure{passes}: about {time} on one machine, by {by}"))


def report(folder: FolderArgument, as_json: options.Json = False) -> None:
    """Write the report of a study again, and print its answers."""
    from encore.cli.report import print_table, tables_as_json
    from encore.lab.studies.page import build, write

    opened = measuring.open_folder(Path(folder))
    built = build(opened)
    written = write(built, opened.path / "report")
    if as_json:
        tables = [table for answer in built.answers for table in answer.tables]
        sentences = {answer.question: answer.sentence for answer in built.answers}
        write_json({**measuring.as_json(opened), "answers": sentences, "tables": tables_as_json(tables)})
        return
    screen = console()
    for mark in filter(None, (built.mark, built.busy)):
        say(screen, text(mark, "yellow"))
    for number, answer in enumerate(built.answers, 1):
        say(screen, text(f"{number}. {answer.question}", "bold"))
        say(screen, text(answer.sentence))
        print_table(answer.tables[0])
    say(screen, text(f"{measuring.summary(opened)}; report: {written[0]}"))


def list_studies() -> None:
    """List the studies that Encore knows."""
    table = plain_table("", "study", "title", "points", "small")
    for name in definition.known():
        study = definition.load(name)
        small = str(len(definition.points(definition.load(name, True)))) if study.small.grid else "none"
        table.add_row(name, study.title, str(len(definition.points(study))), small)
    print_fitted(console(), table)
