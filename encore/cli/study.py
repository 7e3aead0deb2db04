"""``encore study``: measure published studies again on this machine; topology and comparison of servers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typing_extensions import TypedDict

from encore import paths
from encore.cli import options
from encore.cli.layout import (
    console,
    print_result,
    put,
    say,
    show,
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
from encore.results.table import Cell, Table
from encore.run import hints, planning, run_folder, runner
from encore.run.planning import Request
from encore.run.supervise import Limits
from encore.ssh import hosts as ssh_hosts

NODES = "multi-node"  # the study that is a sweep of training runs
OF_POINTS = ("point", "python", "submit", "partition")
# Options that only one kind of study supports.
OF_NODES = ("hosts", "system", "round_name", "data_folder")


class StudyPlan(StudyJson):
    """Points of a study in a dry run."""

    minutes: float  # Time for the remaining points on one machine
    commands: dict[str, str]  # By point


class NodesPoint(TypedDict):
    """A point of the study multi-node."""

    framework: str
    point: str
    batch: int | None  # Per GPU
    command: str  # Empty if not available
    why: str  # Reason why the command is not available


class StudyReport(StudyJson):
    """A study that was measured."""

    answers: dict[str, str]  # By question
    tables: list[Table]


class Page(TypedDict):
    """A page of tables."""

    notices: Sequence[str]
    tables: list[Table]


def run(
    context: typer.Context,
    study: Annotated[str | None, typer.Argument(metavar="STUDY", help="Study name, or a TOML file.")] = None,
    resume: options.Resume = None,
    trust_owner: options.TrustOwner = False,
    small: Annotated[bool, typer.Option("--small", help="The small grid: minutes on two cores, no GPU.")] = False,
    point: Annotated[str | None, typer.Option(help="Only this point: name, or number from 0.")] = None,
    hosts: options.Hosts = None,
    system: options.System = None,
    round_name: options.Round = None,
    data_folder: options.Data = None,
    results: options.Results = None,
    settings: options.Settings = None,
    runtime: options.Runtime = None,
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="[FRAMEWORK=]IMAGE", help="Container image; for multi-node, one per framework."),
    ] = None,
    python: options.Python = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the points as a Slurm array.")] = False,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition for --submit.")] = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Measure or resume a study, and compare it with the published figures.

    Names: encore list --studies. multi-node supports --hosts, --system, --round and --data. Other studies and TOML
    files support --point, --python, --submit and --partition, and use the host runtime unless --runtime is given.

    Examples:

      encore study run multi-gpu --small

      encore study run multi-gpu --point 3 --resume results/study-multi-gpu

      encore study run multi-node --hosts n1:4,n2:4,n3:4,n4:4 --data /data/imagenet

      encore study run multi-node --system dgxa100 --runtime apptainer --image PyTorch=torch.sif --dry-run
    """
    unfit = OF_POINTS if study == NODES else OF_NODES
    flags = [f"--{name.partition('_')[0]}" for name in unfit if context.params[name]]
    if flags:
        raise EncoreError(f"{flags[0]} with the study {study or resume}", hint="see --help")
    root = (results or paths.default_results()).absolute()
    if resume is not None:
        run_folder.refuse_foreign(resume, trust_owner)
    if study == NODES:
        request = Request(
            name="", gpus=None, system=system, round=round_name, data=data_folder.absolute() if data_folder else None,
            runtime=runtime, settings=tuple(settings or ()), hosts=ssh_hosts.parse(hosts) if hosts else (),
        )  # fmt: skip
        _measure_nodes(request, image or [], small, resume, root, dry_run, as_json)
    if (study is None) == (resume is None):
        raise EncoreError("neither or both of STUDY and --resume", hint="a study, or a study folder")
    if resume is not None:
        if settings:
            raise EncoreError("--set with --resume", hint="omit it: the study defines the points")
        folder = folders.open_folder(resume, Study)
    else:
        study_definition = definition.changed(definition.load(str(study), small), settings or ())
        interpreter = python.absolute() if python else None
        request = Request(
            name="", gpus=None, runtime=runtime or "host", image=image[-1] if image else None, python=interpreter
        )
        folder = Folder(
            root / f"study-{study_definition.name}", study_definition.model_copy(update={"request": request})
        )
    keys = [entry.key for entry in folder.study.points()]
    only = point
    if point is not None and point not in keys and point.isdigit() and int(point) < len(keys):
        only = keys[int(point)]
    if only is not None and only not in keys:
        raise EncoreError(f"no point {point}", expected=f"a number below {len(keys)}, or a name", hint="see --dry-run")
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
    screen, total = console(stderr=True, soft_wrap=True), len(keys) * folder.study.passes

    def on_point(entry: definition.Point, message: str) -> None:
        say(screen, text(f"{total - len(folder.unfinished())} of {total}: {entry.key}: {message}"))

    code = measurement.measure(folder, on_point, only)
    if code == ExitCode.INTERRUPTED:
        say(screen, text(f"interrupted; resume with: {measurement.resume_command(folder)}"))
    elif point is None:
        _report_study(folder.path, as_json)
    raise typer.Exit(code)


def _print_points(folder: Folder[Study], as_json: bool) -> None:
    # All points with their commands and the total time.
    study, remaining, seconds = folder.study, folder.unfinished(), measurement.seconds_left(folder)
    commands = {entry.key: " ".join(measurement.command(folder, entry, None).argv) for entry in study.points()}
    if as_json:
        write_json("study-plan", StudyPlan(**folder.as_json(), minutes=seconds / 60, commands=commands))
        return
    points = enumerate(study.points())
    rows = ((number, entry.key, folder.state(entry), commands[entry.key]) for number, entry in points)
    show(console(), study.title, ("no.", "point", "state", "command"), rows)
    measured = len(commands) * study.passes - len(remaining)
    basis = f"estimate of the study: {study.program.seconds:.0f} s per point"
    if measured:
        basis = f"from the most similar of {measured} measured points"
    time = f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"
    passes = f", {study.passes} times per point" if study.passes > 1 else ""
    say(console(), text(f"{len(remaining)} to measure{passes}: about {time} on one machine ({basis})"))


def _measure_nodes(
    request: Request, images: list[str], small: bool, resume: Path | None, root: Path, dry_run: bool, as_json: bool
) -> NoReturn:
    # Two frameworks on one to sixteen GPUs, by one sweep.
    study = multi_node.load(NODES)
    grid = multi_node.sweep_of(study, small, request, dict(image.partition("=")[::2] for image in images))
    if dry_run:
        _print_nodes(study, grid, small, as_json)
        raise typer.Exit
    screen = console(stderr=as_json, soft_wrap=True)
    if resume is not None:
        folder = folders.open_folder(resume, Sweep)
    else:
        for point, check in sweep.refuse(grid, root, False):
            say(screen, text(f"warning: {point.key}: {check.name}: {check.found}"))
        folder = folders.create(grid, f"study-{NODES}", root)
    say(screen, text(f"study folder: {folder.path}"))
    code = sweep.run(folder, hooks_of(screen), Limits())
    results = throughput.measured(folder)
    tables, device_names = multi_node.tables(study, results), throughput.devices(results)
    lines = {
        f"{name}, {line}": points
        for name, framework_results in multi_node.by_framework(study, results).items()
        for line, points in throughput.speed_ups(framework_results).items()
    }
    figure = throughput.speed_up_figure(lines, tables[1], device_names)
    page = server_comparison.page(study.title, tables, (figure,) if figure else (), on_cpus=device_names == "ranks")
    write_files(page, folder.path / "report")
    put((table for table in tables if table.rows or as_json), as_json)
    if code != ExitCode.REACHED and folder.may_resume():
        say(screen, text(f"resume with: {hints.command('study', 'run', NODES, '--resume', folder.path)}"))
    raise typer.Exit(code)


def _print_nodes(study: multi_node.NodeStudy, grid: Sweep, small: bool, as_json: bool) -> None:
    # Commands are not available for points that run in Slurm, or whose system depends on GPUs in a different machine.
    points: list[NodesPoint] = []
    names = {entry.benchmark: entry.name for entry in study.frameworks}
    is_open = grid.request.system is None and not small and not node.this_node().gpus
    for point in grid.points():
        command, reason = "", "the command depends on the GPUs, and this machine has none: use --system"
        if sweep.is_submitted(grid, point, False):
            reason = "a job of the scheduler: encore submit shows it"
        elif not is_open:
            plan = planning.make_plan(sweep.point_request(grid, point, paths.default_results()))
            command, reason = runner.as_shell(runner.dry_run_command(plan)), ""
        framework = names[point.benchmark]
        points.append(
            {"framework": framework, "point": point.key, "batch": point.batch, "command": command, "why": reason}
        )
    if as_json:
        write_json("nodes-plan", points)
        return
    for entry in points:
        typer.echo(
            f"{entry['framework']} {entry['point']}, {entry['batch']} a GPU:\n  {entry['command'] or entry['why']}"
        )
    seconds = (study.small if small else study).seconds
    time = f"about {len(points) * seconds / 60:.0f} minutes" if seconds else "the time is unknown until a point has run"
    typer.echo(f"{len(points)} points: {time}")


def report(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Folders from `study run`, runs, `study machine` or `bench --roofline`.",
        ),
    ],
    output: options.OptionalOutput = None,
    baseline: options.Baseline = None,
    as_json: options.Json = False,
) -> None:
    """Report a study, or compare servers or settings by runs, links and rooflines.

    With two files (JSON of a roofline or CSV of Nsight Systems): compare the time fractions of common kernels.

    Examples:

      encore study report results/study-multi-gpu

      encore study report p100=results/a c4140k=results/b --baseline p100 -o servers

      encore study report results machine roofline -o servers

      encore study report roofline/resnet-pytorch.json resnet-of-another-framework.csv
    """
    paths_of = [Path(argument) for argument in inputs]
    study = paths_of[0] / folders.STUDY
    definition_json = read_json(study).get("study") if len(inputs) == 1 and study.is_file() else None
    if isinstance(definition_json, dict) and "program" in definition_json:
        _report_study(paths_of[0], as_json)
    elif len(inputs) == 2 and all(path.is_file() for path in paths_of):
        tables = [roofline.common_kernels_table(*map(roofline.read_kernels, paths_of))]
        tables += [table for table in server_comparison.published_tables() if "kernels" in table.title]
        put(tables, as_json)
    else:
        described = [path for path in paths_of if (path / topology.FILE).is_file()]
        rooflines = [path for path in paths_of if (path / roofline.PEAKS).is_file()]
        runs = [
            argument for argument, path in zip(inputs, paths_of, strict=True) if path not in (*described, *rooflines)
        ]
        if rooflines and inputs == [str(rooflines[0])]:
            report_content = server_comparison.roofline_report(roofline.load(rooflines[0]))
        else:
            report_content = server_comparison.servers_report(
                runs, base=baseline, machines=described, rooflines=rooflines
            )
        show_report(report_content, output, as_json)


def machine(
    gpus: Annotated[
        int, typer.Argument(min=1, help="Number of GPUs or ranks that exchange data; 1: no measurement.")
    ] = 1,
    python: options.Python = None,
    output: options.OptionalOutput = None,
    as_json: options.Json = False,
) -> None:
    """Draw the topology of GPUs and links, and measure link bandwidths.

    Examples:

      encore study machine -o machine                        topology only

      encore study machine 8 -o machine                      with bandwidths
    """
    screen = console(stderr=as_json)
    description = topology.describe(node.this_node(), gpus, screen.print, python)
    report_content = server_comparison.machine_report(description)
    if output is not None:
        keep(output, topology.FILE, description.as_json())
    if as_json:
        write_json("study-machine", description.as_json())
    else:
        say(screen, text(f"{report_content.figures[0].title}: {len(description.server.gpus)} GPUs"))
    show_report(report_content, output, as_json, printed=not as_json)


def keep(folder: Path, name: str, content: object) -> None:
    """Write a JSON file for a later report; create the folder if necessary."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise EncoreError(
            f"{folder / name} cannot be written: {error.strerror}", hint="choose a writable folder: -o"
        ) from error


def show_report(content: Report, output: Path | None, as_json: bool, *, printed: bool = True) -> None:
    screen = console(stderr=as_json)
    if output is not None:
        files = write_files(content, output)
        say(screen, text(f"{files[0]} and {len(files) - 1} more files"))
    if not printed:
        return
    if as_json:
        write_json("page", Page(notices=content.notices, tables=[*content.tables, *content.studies]))
        return
    for notice in content.notices:
        say(screen, text(notice, "bold"))
    put([*content.tables, *content.studies], as_json=False)


def report_roofline(name: str, result: dict[str, Any], folder: Path, as_json: bool) -> None:
    """Add the roofline measurement ``result`` to ``folder`` and report all measurements in the folder."""
    keep(folder, roofline.PEAKS, {"peaks": roofline.fastest(result.pop("peaks"), folder / roofline.PEAKS)})
    keep(folder, f"{name}.json", result)
    show_report(server_comparison.roofline_report(roofline.load(folder)), folder, as_json)


def list_studies(as_json: bool) -> None:
    rows: list[tuple[Cell, ...]] = []
    for name in definition.study_names():
        study = definition.load(name)
        small = len(definition.load(name, True).points()) if study.small.grid else None
        rows.append((name, study.title, len(study.points()), small))
    rows.append((NODES, multi_node.load(NODES).title, None, None))
    put([Table(title="studies", columns=("study", "title", "points", "points of --small"), rows=tuple(rows))], as_json)


def _report_study(folder: Path, as_json: bool) -> None:
    opened = folders.open_folder(Path(folder), Study)
    built = build(opened)
    files = write_files(built, opened.path / "report")
    answers = [chapter for chapter in built.chapters if chapter.key.startswith("question")]
    if as_json:
        tables = [table for answer in answers for table in answer.tables]
        sentences = {
            question.text: answer.sentence for question, answer in zip(opened.study.questions, answers, strict=True)
        }
        write_json("study-report", StudyReport(**opened.as_json(), answers=sentences, tables=tables))
        return
    screen = console()
    for mark in built.notices:
        say(screen, text(mark, "yellow"))
    for answer in answers:
        say(screen, text(answer.title, "bold"))
        say(screen, text(answer.sentence))
        print_result(answer.tables[0])
    say(screen, text(f"{opened.summary()}; report: {files[0]}"))


HELP = "Measure published studies, and compare the results."
GROUP = {"run": run, "report": report, "machine": machine}
