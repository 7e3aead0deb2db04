"""``encore sweep``: a grid of runs, resumable, with speed-up and efficiency at its end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from encore.errors import EncoreError, ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from encore.scaling.grid import Grid
    from encore.scaling.sweep_folder import Here, Study, Submitter

EPILOG = """
Examples:

  encore sweep resnet --gpus 1,2                           strong scaling, on a CPU

  encore sweep resnet --gpus 1,2,4,8 --weak --data /data/imagenet --set epochs=2 --set warmup_epochs=0

  encore sweep resnet --gpus 8 --precision fp32,fp16 --dry-run

  encore sweep --resume results/20261120T101500Z-sweep-resnet

Exit codes: 0 every point has ended, whatever it reached; 2 refused, 1 a point failed, 130 interrupted.
"""


def register(app: typer.Typer) -> None:
    """Adds ``sweep`` to the command line."""
    app.command("sweep", epilog=EPILOG)(sweep)


def sweep(
    context: typer.Context,
    benchmark: Annotated[str | None, typer.Argument(help="Benchmark, such as resnet.")] = None,
    gpus: Annotated[
        str | None, typer.Option(help="GPUs of a node, such as 1,2,4,8; ranks where there are none.")
    ] = None,
    nodes: Annotated[str, typer.Option(help="Nodes, such as 1,2,4; needs a scheduler.")] = "1",
    strong: Annotated[
        bool, typer.Option("--strong/--weak", help="One global batch for all points, or one batch per rank.")
    ] = True,
    global_batch: Annotated[
        int | None,
        typer.Option(help="Of strong scaling; default: the system's. The learning rate stays as it is."),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="Precisions, such as fp32,fp16.")] = None,
    runs: Annotated[int, typer.Option(help="Experiments of each point.")] = 1,
    system: Annotated[str | None, typer.Option(help="Configuration to take, such as dgxa100.")] = None,
    round_name: Annotated[str | None, typer.Option("--round", help="MLPerf round, such as v0.7.")] = None,
    data_folder: Annotated[
        Path | None, typer.Option("--data", help="Data set; default data/BENCHMARK.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Where the study folder goes; default results/.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of each point's first experiment.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one configuration value.")
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME[=VALUE]", help="Pass an environment variable to the ranks."),
    ] = None,
    drop_caches: Annotated[bool | None, typer.Option(help="Drop the file caches before each run.")] = None,
    hang_seconds: Annotated[
        float, typer.Option(help="End a run in which no rank makes a step for so long; 0: never.")
    ] = 600.0,
    runtime: Annotated[
        str | None, typer.Option(help="auto, host, docker, podman, apptainer, enroot or pyxis.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Image to run in.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="Cluster file; see docs/slurm.md.")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit all points to the scheduler.")] = False,
    predict: Annotated[
        str | None, typer.Option(help="Also predict these numbers of GPUs by the cost model, such as 16,32.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this study folder.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the points and do nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run a benchmark on several numbers of GPUs and tell how it scales."""
    from rich.console import Console

    from encore import paths
    from encore.scaling import sweep_folder as sweeps

    console = Console(stderr=as_json, soft_wrap=True)
    wanted = _numbers("--predict", predict) if predict is not None else ()
    if resume is not None:
        _refuse_with_resume(context)
        study = sweeps.open_study(resume)
        if dry_run:
            _print_grid(study.grid, study, as_json)
            return
    else:
        grid = _grid(context.params)
        if dry_run:
            _print_grid(grid, None, as_json)
            return
        folder = (results or paths.default_results()).absolute()
        _refuse(console, grid, folder, submit, predicts=bool(wanted))
        study = sweeps.create(grid, folder)
    _run(console, study, hang_seconds, submit, wanted, as_json)


def _refuse_with_resume(context: typer.Context) -> None:
    """Refuse options that would change the grid of a study."""
    fitting = {"resume", "submit", "hang_seconds", "predict", "dry_run", "as_json"}
    given = [
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"
    ]
    if not set(given) <= fitting:
        raise EncoreError(
            "--resume takes the grid from the study folder",
            expected="no other options than --submit, --hang-seconds, --predict, --dry-run and --json",
        )


def _grid(given: Mapping[str, Any]) -> Grid:
    """The grid that the options ask for, by their names above."""
    from encore import catalogue
    from encore.scaling.grid import Grid

    if given["benchmark"] is None or given["gpus"] is None:
        raise EncoreError(
            "no benchmark or no numbers of GPUs given", expected="encore sweep BENCHMARK --gpus 1,2,4"
        )
    data, cluster, precision = given["data_folder"], given["cluster"], given["precision"]
    same = ("global_batch", "runs", "system", "seed", "drop_caches", "runtime", "image")
    return Grid(
        benchmark=catalogue.choose(given["benchmark"]).name,
        gpus=_numbers("--gpus", given["gpus"]),
        nodes=_numbers("--nodes", given["nodes"]),
        precisions=tuple(dict.fromkeys(each.strip() for each in precision.split(","))) if precision else (),
        mode="strong" if given["strong"] else "weak",
        round=given["round_name"],
        data=str(data.absolute()) if data else None,
        settings=tuple(given["settings"] or ()),
        environment=tuple(given["environment"] or ()),
        cluster=str(cluster.absolute()) if cluster else None,
        **{name: given[name] for name in same},
    )


def _refuse(console: Console, grid: Grid, results: Path, submit: bool, predicts: bool) -> None:
    """Refuse what cannot be run, before anything is made; tell the warnings."""
    from encore.scaling import sweep_folder as sweeps
    from encore.scaling.grid import points

    if predicts and len({point.gpus for point in points(grid)}) < 2:
        raise EncoreError(
            "--predict with one number of GPUs",
            expected="a sweep over at least two",
            remedy="--gpus 1,2, or leave out --predict",
        )
    for point, check in sweeps.refuse(grid, results, submitter(grid), submit):
        console.print(f"[yellow]warning[/] {point.key}: {check.name}: {check.found}", highlight=False)


def submitter(grid: Grid) -> Submitter | None:
    """The scheduler that points are submitted to; None where there is none."""
    from encore.scaling.batch import connect

    return connect(Path(grid.cluster) if grid.cluster else None)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """``1,2,4`` as numbers."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise EncoreError(
            f"{option} {text}", expected="whole numbers from 1 on, such as 1,2,4", remedy=f"{option} 1,2,4"
        )
    return found


def _print_grid(grid: Grid, study: Study | None, as_json: bool) -> None:
    """The points with what each would run; nothing is made."""
    from rich.console import Console

    from encore import paths
    from encore.cli.layout import plain_table
    from encore.configuration import describe_scale
    from encore.run import planning
    from encore.scaling.grid import points, request_of

    rows = []
    for point in points(grid):
        request = request_of(grid, point, study.folder(point) if study else paths.default_results())
        state = study.state(point) if study else "to do"
        # A point of several nodes is planned by the scheduler's side.
        plan = planning.make_plan(request) if point.nodes == 1 else None
        batch = describe_scale(plan.configuration) if plan else ""
        rows.append((point.key, batch, " ".join(request.settings), state))
    if as_json:
        names = ("point", "batch", "settings", "state")
        content = {"grid": asdict(grid), "points": [dict(zip(names, row, strict=True)) for row in rows]}
        typer.echo(json.dumps(content, indent=2))
        return
    table = plain_table(f"{grid.benchmark}, {grid.mode} scaling", "point", "batch", "--set", "state")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _here(console: Console, hang_seconds: float) -> Here:
    """Runs on this machine are told line by line, under the name of their point."""
    from encore.cli.live import RunView
    from encore.cli.run import hooks
    from encore.run.run_folder import RunFolder
    from encore.run.runner import Hooks
    from encore.scaling.grid import GridPoint
    from encore.scaling.sweep_folder import Here

    def told(point: GridPoint, folder: RunFolder | None) -> Hooks:
        if folder is not None:
            console.print(f"point {point.key}: {folder.path}", highlight=False)
        return hooks(console, RunView(console) if folder is not None else None, folder)

    return Here(told, hang_seconds)


def _run(
    console: Console, study: Study, hang_seconds: float, submit: bool, predict: tuple[int, ...], as_json: bool
) -> None:
    from encore.scaling import sweep_folder as sweeps

    console.print(f"study folder: {study.path}", highlight=False)
    code = sweeps.run(study, _here(console, hang_seconds), submitter(study.grid), submit)
    if code == ExitCode.INTERRUPTED or code == ExitCode.FAILED:
        console.print(f"go on with: encore sweep --resume {study.path}", highlight=False)
    _tell(console, study, predict, as_json)
    raise typer.Exit(code)


def _tell(console: Console, study: Study, predict: tuple[int, ...], as_json: bool) -> None:
    """Write the report, and print its first tables."""
    from encore.cli.report import print_table
    from encore.cli.results import write_json
    from encore.run import judge
    from encore.scaling import throughput

    results = throughput.measured(study)
    tables = [throughput.throughput_table(results)]
    if predict:
        tables.append(throughput.predictions(study, results, predict))
    written = []
    if any(each.state == "done" for each in results):
        written = throughput.write_study_report(study, tables[1:])
    if as_json:
        content = [{"title": t.title, "columns": t.columns, "rows": t.rows, "note": t.note} for t in tables]
        write_json({"study": str(study.path), "tables": content})
        return
    for table in tables:
        print_table(table)
    runs = [study.run_of(each.point) for each in results if each.state == "done"]
    for standing in dict.fromkeys(judge.standing(run) for run in runs if run is not None):
        console.print(standing, highlight=False)
    if written:
        console.print(f"report: {written[0]}", highlight=False)
