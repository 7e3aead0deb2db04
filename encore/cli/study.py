"""``encore study``: published studies measured again on this machine, and what a server is and does."""

import json
from pathlib import Path
from typing import Annotated

import typer

from encore import paths
from encore.cli import options, study_nodes
from encore.cli.layout import (
    console,
    print_result,
    put,
    say,
    show,
    tables_as_json,
    text,
    write_json,
)
from encore.errors import EncoreError, ExitCode
from encore.files import read_json
from encore.lab.studies import definition, kernels_in_common, machine_links, measuring, roofline, servers_report
from encore.lab.studies import folder as folders
from encore.lab.studies.definition import Study
from encore.lab.studies.folder import Folder
from encore.lab.studies.page import build
from encore.lab.studies.published_servers import published_tables
from encore.machine import node
from encore.results.report.report import Report, write_files
from encore.run.planning import Request

OF_POINTS = ("point", "python", "submit", "partition")
# Options of the one kind of study that the other does not take.
OF_NODES = ("hosts", "system", "round_name", "data_folder")


def run(
    context: typer.Context,
    study: Annotated[str | None, typer.Argument(metavar="STUDY", help="Name, or a TOML file of your own.")] = None,
    resume: options.Resume = None,
    small: Annotated[bool, typer.Option("--small", help="The small grid: minutes on two cores, no GPU.")] = False,
    point: Annotated[str | None, typer.Option(help="Only this point: its name, or its number from 0 on.")] = None,
    hosts: options.Hosts = None,
    system: options.System = None,
    round_name: options.Round = None,
    data_folder: options.Data = None,
    results: options.Results = None,
    settings: options.Settings = None,
    runtime: options.Runtime = None,
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="[FRAMEWORK=]IMAGE", help="Image to run in; of multi-node, for each framework."),
    ] = None,
    python: options.Python = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the points as a Slurm array.")] = False,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition for --submit.")] = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Measure a study again, or resume it, and report it next to its published figures.

    encore list --studies has their names. multi-node takes --hosts, --system, --round and --data; the others, and
    TOML files of your own, --point, --python, --submit and --partition, and run on the host unless --runtime is given.

    Examples:

      encore study run multi-gpu --small

      encore study run multi-gpu --point 3 --resume results/study-multi-gpu

      encore study run multi-node --hosts n1:4,n2:4,n3:4,n4:4 --data /data/imagenet

      encore study run multi-node --system dgxa100 --runtime apptainer --image PyTorch=torch.sif --dry-run
    """
    unfit = OF_POINTS if study == study_nodes.NAME else OF_NODES
    given = [f"--{name.partition('_')[0]}" for name in unfit if context.params[name]]
    if given:
        raise EncoreError(f"{given[0]} with the study {study or resume}", hint="see --help")
    if study == study_nodes.NAME:
        study_nodes.measure(
            small=small, hosts=hosts, system=system, round_name=round_name, data=data_folder, results=results,
            settings=settings or (), runtime=runtime, images=image or (), resume=resume, dry_run=dry_run,
            as_json=as_json,
        )  # fmt: skip
        return
    if (study is None) == (resume is None):
        raise EncoreError("neither or both of STUDY and --resume", hint="give a study, or the folder of one")
    if resume is not None and settings:
        raise EncoreError("--set with --resume", hint="leave it out: the points are those of the study")
    if resume is not None:
        wanted = folders.open_folder(resume, Study).study
    else:
        wanted = definition.changed(definition.load(str(study), small), settings or ())
        wanted = wanted.model_copy(update={"request": _request(runtime, image, python)})
    _measure(wanted, resume, results, submit, partition, point, dry_run, as_json)


def _request(runtime: str | None, images: list[str] | None, python: Path | None) -> Request:
    image, file = images[-1] if images else None, python.absolute() if python else None
    return Request(name="", gpus=None, runtime=runtime or "host", image=image, python=file)


def _measure(
    study: Study,
    resume: Path | None,
    results: Path | None,
    submit: bool,
    partition: str | None,
    point: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    root = (results or paths.default_results()).absolute()
    label = f"study-{study.name}"
    folder = Folder(Path(resume).absolute() if resume else root / label, study)
    only = _named(folder, point)
    if dry_run:
        _print_points(folder, as_json)
        return
    if resume is None:
        folder = folders.create(study, label, root)
    screen = console(stderr=as_json, soft_wrap=True)
    screen.print(f"study folder: {folder.path}")
    if submit:
        screen.print(measuring.submit(folder, {"partition": partition} if partition else {}))
        return
    code = _measure_points(folder, only)
    if point is None:
        _report_study(folder.path, as_json)
    raise typer.Exit(code)


def _named(folder: Folder[Study], point: str | None) -> str | None:
    if point is None:
        return None
    keys = [each.key for each in folder.study.points()]
    if point.isdigit() and int(point) < len(keys):
        return keys[int(point)]
    if point not in keys:
        raise EncoreError(f"no point {point}", expected=f"a number below {len(keys)}, or a name", hint="see --dry-run")
    return point


def _measure_points(folder: Folder[Study], only: str | None) -> ExitCode:
    screen = console(stderr=True, soft_wrap=True)
    total = len(folder.study.points()) * folder.study.passes

    def on_point(point: definition.Point, what: str) -> None:
        say(screen, text(f"{total - len(folder.left())} of {total}: {point.key}: {what}"))

    code = measuring.measure(folder, on_point, only)
    if code == ExitCode.INTERRUPTED:
        say(screen, text(f"interrupted; resume with: {measuring.resume_command(folder)}"))
        raise typer.Exit(code)
    return code


def _print_points(folder: Folder[Study], as_json: bool) -> None:
    # Print every point with its command and the time that all will take; make nothing.
    left, seconds = folder.left(), measuring.seconds_left(folder)
    if as_json:
        commands = {each.key: " ".join(measuring.command(folder, each, None).argv) for each in folder.study.points()}
        write_json({**folder.as_json(), "minutes": seconds / 60, "commands": commands})
        return
    screen = console()
    rows = (
        (number, each.key, folder.state(each), " ".join(measuring.command(folder, each, None).argv))
        for number, each in enumerate(folder.study.points())
    )
    show(screen, folder.study.title, ("no.", "point", "state", "command"), rows)
    measured = len(folder.study.points()) * folder.study.passes - len(left)
    by = (
        f"the {measured} measured, each by those that are most like it"
        if measured
        else f"{folder.study.program.seconds:.0f} s a point, which the study estimates"
    )
    time = f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"
    passes = f", each point {folder.study.passes} times" if folder.study.passes > 1 else ""
    say(screen, text(f"{len(left)} to measure{passes}: about {time} on one machine, by {by}"))


def report(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Folders of a study, of runs, of `study machine`, of `bench --roofline`.",
        ),
    ],
    output: options.OptionalOutput = None,
    baseline: options.Baseline = None,
    as_json: options.Json = False,
) -> None:
    """Report a study again, or servers, or settings of one, by their runs, links and rooflines.

    Two files, each the JSON of a roofline or CSV of Nsight Systems: the kernels that they have in common, with their
    share of the time.

    Examples:

      encore study report results/study-multi-gpu

      encore study report p100=results/a c4140k=results/b --baseline p100 -o servers

      encore study report results machine roofline -o servers

      encore study report roofline/resnet-pytorch.json resnet-of-another-framework.csv
    """
    paths_of = [Path(each) for each in inputs]
    study = paths_of[0] / folders.STUDY
    asked = read_json(study).get("study") if len(inputs) == 1 and study.is_file() else None
    if isinstance(asked, dict) and "program" in asked:
        _report_study(paths_of[0], as_json)
    elif len(inputs) == 2 and all(path.is_file() for path in paths_of):
        tables = [kernels_in_common.in_common(*map(kernels_in_common.read_kernels, paths_of))]
        tables += [table for table in published_tables() if "kernels" in table.title]
        put(tables, as_json)
    else:
        machines = [path for path in paths_of if (path / machine_links.FILE).is_file()]
        rooflines = [path for path in paths_of if (path / roofline.PEAKS).is_file()]
        runs = [each for each, path in zip(inputs, paths_of, strict=True) if path not in (*machines, *rooflines)]
        if rooflines and inputs == [str(rooflines[0])]:
            made = servers_report.roofline_report(roofline.load(rooflines[0]))
        else:
            made = servers_report.servers_report(runs, base=baseline, machines=machines, rooflines=rooflines)
        show_report(made, output, as_json)


def machine(
    gpus: Annotated[int, typer.Argument(min=1, help="GPUs, or ranks, that exchange data; 1 measures nothing.")] = 1,
    python: options.Python = None,
    output: options.OptionalOutput = None,
    as_json: options.Json = False,
) -> None:
    """Draw this machine's GPUs and links, and measure what the links carry.

    Examples:

      encore study machine -o machine                        its links, drawn

      encore study machine 8 -o machine                      and how fast they are
    """
    screen = console(stderr=as_json)
    found = machine_links.describe(node.this_node(), gpus, screen.print, python)
    made = servers_report.machine_report(found)
    if output is not None:
        keep(output, machine_links.FILE, found.as_json())
    if as_json:
        write_json(found.as_json())
    else:
        say(screen, text(f"{made.figures[0].title}: {len(found.server.gpus)} GPUs"))
    show_report(made, output, as_json, printed=not as_json)


def keep(folder: Path, name: str, content: object) -> None:
    """Write a JSON file for a later report into a folder, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise EncoreError(f"{folder / name} cannot be written: {error.strerror}", hint="give a folder: -o") from error


def show_report(made: Report, output: Path | None, as_json: bool, *, printed: bool = True) -> None:
    screen = console(stderr=as_json)
    if output is not None:
        files = write_files(made, output)
        say(screen, text(f"{files[0]} and {len(files) - 1} more files"))
    if not printed:
        return
    if as_json:
        write_json({"notices": made.notices, "tables": tables_as_json([*made.tables, *made.studies])})
        return
    for notice in made.notices:
        say(screen, text(notice, "bold"))
    put([*made.tables, *made.studies], as_json=False)


def _report_study(folder: Path, as_json: bool) -> None:
    opened = folders.open_folder(Path(folder), Study)
    built = build(opened)
    written = write_files(built, opened.path / "report")
    answers = [each for each in built.chapters if each.key.startswith("question")]
    if as_json:
        tables = tables_as_json([table for answer in answers for table in answer.tables])
        sentences = {
            question.text: answer.sentence for question, answer in zip(opened.study.questions, answers, strict=True)
        }
        write_json({**opened.as_json(), "answers": sentences, "tables": tables})
        return
    screen = console()
    for mark in built.notices:
        say(screen, text(mark, "yellow"))
    for answer in answers:
        say(screen, text(answer.title, "bold"))
        say(screen, text(answer.sentence))
        print_result(answer.tables[0])
    say(screen, text(f"{opened.summary()}; report: {written[0]}"))


HELP = "Measure a study again, and compare it with its published figures."
GROUP = {"run": run, "report": report, "machine": machine}
