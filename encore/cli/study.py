"""``encore study``: published studies measured again on this machine, and what a server is and does."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typing_extensions import TypedDict

from encore import paths
from encore.cli import options
from encore.cli.layout import (
    TableJson,
    console,
    print_result,
    put,
    say,
    show,
    tables_as_json,
    text,
    write_json,
)
from encore.cli.sweep import hooks_of
from encore.errors import EncoreError, ExitCode
from encore.files import read_json
from encore.lab.studies import (
    definition,
    measurement,
    multi_node,
    roofline,
    server_comparison,
    sweep,
    throughput,
    topology,
)
from encore.lab.studies import folder as folders
from encore.lab.studies.definition import Study
from encore.lab.studies.folder import Folder, StudyJson
from encore.lab.studies.report import build
from encore.lab.studies.sweep import Sweep
from encore.machine import node
from encore.results.report.report import Report, write_files
from encore.run import hints, planning, run_folder, runner
from encore.run.planning import Request
from encore.run.supervise import Limits
from encore.ssh import hosts as ssh_hosts

NODES = "multi-node"  # the study that is a sweep of training runs
OF_POINTS = ("point", "python", "submit", "partition")
# Options of the one kind of study that the other does not take.
OF_NODES = ("hosts", "system", "round_name", "data_folder")


class StudyPlan(StudyJson):
    """The points of a study that is not started."""

    minutes: float  # That all points which are left will take on one machine
    commands: dict[str, str]  # By point


class NodesPoint(TypedDict):
    """A point of the study multi-node."""

    framework: str
    point: str
    batch: int | None  # Of a GPU
    command: str  # Empty where there is none yet
    why: str  # Why there is none


class StudyReport(StudyJson):
    """A study that was measured."""

    answers: dict[str, str]  # By question
    tables: list[TableJson]


class Page(TypedDict):
    """A page of tables."""

    notices: Sequence[str]
    tables: list[TableJson]


def run(
    context: typer.Context,
    study: Annotated[str | None, typer.Argument(metavar="STUDY", help="Name, or a TOML file of your own.")] = None,
    resume: options.Resume = None,
    trust_owner: options.TrustOwner = False,
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
    unfit = OF_POINTS if study == NODES else OF_NODES
    given = [f"--{name.partition('_')[0]}" for name in unfit if context.params[name]]
    if given:
        raise EncoreError(f"{given[0]} with the study {study or resume}", hint="see --help")
    root = (results or paths.default_results()).absolute()
    if resume is not None:
        run_folder.refuse_foreign(resume, trust_owner)
    if study == NODES:
        request = Request(
            name="", gpus=None, system=system, round=round_name, data=data_folder.absolute() if data_folder else None,
            runtime=runtime, settings=tuple(settings or ()), hosts=ssh_hosts.parse(hosts) if hosts else (),
        )  # fmt: skip
        _measure_nodes(request, image or [], small, resume, root, dry_run, as_json)
        return
    if (study is None) == (resume is None):
        raise EncoreError("neither or both of STUDY and --resume", hint="give a study, or the folder of one")
    if resume is not None:
        if settings:
            raise EncoreError("--set with --resume", hint="leave it out: the points are those of the study")
        folder = folders.open_folder(resume, Study)
    else:
        wanted = definition.changed(definition.load(str(study), small), settings or ())
        own = python.absolute() if python else None
        request = Request(name="", gpus=None, runtime=runtime or "host", image=image[-1] if image else None, python=own)
        folder = Folder(root / f"study-{wanted.name}", wanted.model_copy(update={"request": request}))
    only = _named(folder, point)
    if dry_run:
        _print_points(folder, as_json)
        return
    if resume is None:
        folder = folders.create(folder.study, f"study-{folder.study.name}", root)
    screen = console(stderr=as_json, soft_wrap=True)
    screen.print(f"study folder: {folder.path}")
    if submit:
        screen.print(measurement.submit(folder, {"partition": partition} if partition else {}))
        return
    code = _measure_points(folder, only)
    if point is None:
        _report_study(folder.path, as_json)
    raise typer.Exit(code)


def _named(folder: Folder[Study], point: str | None) -> str | None:
    # The key of the point that was named by its key or its number.
    keys = [each.key for each in folder.study.points()]
    if point is None or point in keys:
        return point
    if point.isdigit() and int(point) < len(keys):
        return keys[int(point)]
    raise EncoreError(f"no point {point}", expected=f"a number below {len(keys)}, or a name", hint="see --dry-run")


def _measure_points(folder: Folder[Study], only: str | None) -> ExitCode:
    screen = console(stderr=True, soft_wrap=True)
    total = len(folder.study.points()) * folder.study.passes

    def on_point(point: definition.Point, what: str) -> None:
        say(screen, text(f"{total - len(folder.unfinished())} of {total}: {point.key}: {what}"))

    code = measurement.measure(folder, on_point, only)
    if code == ExitCode.INTERRUPTED:
        say(screen, text(f"interrupted; resume with: {measurement.resume_command(folder)}"))
        raise typer.Exit(code)
    return code


def _print_points(folder: Folder[Study], as_json: bool) -> None:
    # Every point with its command and the time that all will take.
    study, left, seconds = folder.study, folder.unfinished(), measurement.seconds_left(folder)
    commands = {each.key: " ".join(measurement.command(folder, each, None).argv) for each in study.points()}
    if as_json:
        content: StudyPlan = {**folder.as_json(), "minutes": seconds / 60, "commands": commands}
        write_json("study-plan", content)
        return
    points = enumerate(study.points())
    rows = ((number, each.key, folder.state(each), commands[each.key]) for number, each in points)
    show(console(), study.title, ("no.", "point", "state", "command"), rows)
    measured = len(commands) * study.passes - len(left)
    by = f"{study.program.seconds:.0f} s a point, which the study estimates"
    if measured:
        by = f"the {measured} measured, each by those that are most like it"
    time = f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"
    passes = f", each point {study.passes} times" if study.passes > 1 else ""
    say(console(), text(f"{len(left)} to measure{passes}: about {time} on one machine, by {by}"))


def _measure_nodes(
    request: Request, images: list[str], small: bool, resume: Path | None, root: Path, dry_run: bool, as_json: bool
) -> None:
    # Two frameworks on one to sixteen GPUs, by one sweep.
    study = multi_node.load(NODES)
    grid = multi_node.sweep_of(study, small, request, dict(each.partition("=")[::2] for each in images))
    if dry_run:
        _print_nodes(study, grid, small, as_json)
        return
    screen = console(stderr=as_json, soft_wrap=True)
    if resume is not None:
        folder = folders.open_folder(resume, Sweep)
    else:
        for point, check in sweep.refuse(grid, root, False):
            say(screen, text(f"warning: {point.key}: {check.name}: {check.found}"))
        folder = folders.create(grid, f"study-{NODES}", root)
    say(screen, text(f"study folder: {folder.path}"))
    code = sweep.run(folder, hooks_of(screen), Limits())
    found = throughput.measured(folder)
    tables, what = multi_node.tables(study, found), throughput.devices(found)
    lines = {
        f"{name}, {line}": points
        for name, each in multi_node.by_framework(study, found).items()
        for line, points in throughput.speed_ups(each).items()
    }
    figure = throughput.speed_up_figure(lines, tables[1], what)
    page = server_comparison.page(study.title, tables, (figure,) if figure else (), on_cpus=what == "ranks")
    write_files(page, folder.path / "report")
    put((table for table in tables if table.rows or as_json), as_json)
    if code != ExitCode.REACHED and folder.may_resume():
        say(screen, text(f"resume with: {hints.command('study', 'run', NODES, '--resume', folder.path)}"))
    raise typer.Exit(code)


def _print_nodes(study: multi_node.NodeStudy, grid: Sweep, small: bool, as_json: bool) -> None:
    # A point that Slurm would run has no command here, nor one whose system depends on GPUs that are not here.
    found: list[NodesPoint] = []
    names = {each.benchmark: each.name for each in study.frameworks}
    is_open = grid.request.system is None and not small and not node.this_node().gpus
    for point in grid.points():
        command, why = "", "its command depends on the GPUs, of which there are none here: name them by --system"
        if sweep.is_submitted(grid, point, False):
            why = "a job of the scheduler: encore submit shows it"
        elif not is_open:
            plan = planning.make_plan(sweep.point_request(grid, point, paths.default_results()))
            command, why = runner.as_shell(runner.dry_run_command(plan)), ""
        framework = names[point.benchmark]
        found.append({"framework": framework, "point": point.key, "batch": point.batch, "command": command, "why": why})
    if as_json:
        write_json("nodes-plan", found)
        return
    for each in found:
        typer.echo(f"{each['framework']} {each['point']}, {each['batch']} a GPU:\n  {each['command'] or each['why']}")
    seconds = (study.small if small else study).seconds
    time = f"about {len(found) * seconds / 60:.0f} minutes" if seconds else "how long is known once a point has run"
    typer.echo(f"{len(found)} points: {time}")


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
        tables = [roofline.common_kernels_table(*map(roofline.read_kernels, paths_of))]
        tables += [table for table in server_comparison.published_tables() if "kernels" in table.title]
        put(tables, as_json)
    else:
        described = [path for path in paths_of if (path / topology.FILE).is_file()]
        rooflines = [path for path in paths_of if (path / roofline.PEAKS).is_file()]
        runs = [each for each, path in zip(inputs, paths_of, strict=True) if path not in (*described, *rooflines)]
        if rooflines and inputs == [str(rooflines[0])]:
            made = server_comparison.roofline_report(roofline.load(rooflines[0]))
        else:
            made = server_comparison.servers_report(runs, base=baseline, machines=described, rooflines=rooflines)
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
    found = topology.describe(node.this_node(), gpus, screen.print, python)
    made = server_comparison.machine_report(found)
    if output is not None:
        keep(output, topology.FILE, found.as_json())
    if as_json:
        write_json("study-machine", found.as_json())
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
        page: Page = {"notices": made.notices, "tables": tables_as_json([*made.tables, *made.studies])}
        write_json("page", page)
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
        content: StudyReport = {**opened.as_json(), "answers": sentences, "tables": tables}
        write_json("study-report", content)
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
