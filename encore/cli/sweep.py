"""``encore sweep``: a resumable grid of runs with a report of speed-up and efficiency."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typing_extensions import TypedDict

from encore import catalogue, paths
from encore.cli import options
from encore.cli.layout import console, ignore_closed_output, put, show, write_json
from encore.cli.progress_display import RunView
from encore.cli.run import as_request, hooks, refuse_with_resume
from encore.configuration import describe_scale
from encore.errors import EncoreError, ExitCode
from encore.lab.studies import folder as folders
from encore.lab.studies import sweep as sweeps
from encore.lab.studies.folder import Folder
from encore.lab.studies.sweep import GridPoint, HooksOf, Sweep
from encore.machine import node
from encore.results.table import Table
from encore.run import evaluate, planning, run_folder
from encore.run.run_folder import RunFolder
from encore.run.runner import Hooks
from encore.run.supervise import Limits


class SweepPlan(TypedDict):
    """A sweep that is not started."""

    grid: Sweep
    points: list[dict[str, str]]  # Fields: ``point``, ``batch``, ``settings`` and ``state``


class Swept(TypedDict):
    """A finished sweep."""

    study: str  # Sweep folder
    tables: list[Table]


def sweep(
    context: typer.Context,
    benchmark: options.OptionalBenchmark = None,
    gpus_per_node: Annotated[
        str | None, typer.Option(metavar="GPUS,...", help="Such as 1,2,4,8 (CPU ranks if there are no GPUs).")
    ] = None,
    nodes: Annotated[str, typer.Option(help="Nodes, such as 1,2,4; needs a scheduler, or --hosts.")] = "1",
    hosts: options.Hosts = None,
    full_nodes: Annotated[
        bool, typer.Option("--full-nodes", help="On more than one node, only points with the maximum GPUs per node.")
    ] = False,
    strong: Annotated[
        bool, typer.Option("--strong/--weak", help="One global batch for all points, or one batch per rank.")
    ] = True,
    global_batch: Annotated[
        int | None,
        typer.Option(help="With --strong; default: the system's. The learning rate stays as it is."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="Precisions, such as fp32,fp16; with --weak including batch sizes: fp32:64,fp16:128."),
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(help="Releases of the image's base to compare, such as 25.12,21.11; the first counts 1."),
    ] = None,
    runs: options.Experiments = 1,
    system: options.System = None,
    round_name: options.Round = None,
    data_folder: options.Data = None,
    results: Annotated[Path | None, typer.Option(help="Parent folder of the study folder. Default: results/.")] = None,
    seed: options.Seed = None,
    settings: options.Settings = None,
    environment: options.Environment = None,
    drop_caches: options.DropCaches = None,
    hang_seconds: options.HangSeconds = 600.0,
    stop_seconds: options.StopSeconds = None,
    runtime: options.Runtime = None,
    image: options.Image = None,
    python: options.Python = None,
    cluster: options.Cluster = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit all points to the scheduler.")] = False,
    predict: Annotated[
        str | None, typer.Option(help="Also predict these numbers of GPUs by the cost model, such as 16,32.")
    ] = None,
    resume: options.Resume = None,
    trust_owner: options.TrustOwner = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Run a benchmark on different numbers of GPUs and report the scaling.

    Examples:

      encore sweep resnet --gpus-per-node 1,2                           strong scaling, on a CPU

      encore sweep resnet --gpus-per-node 1,2,4,8 --weak --data /data/imagenet --set epochs=2 --set warmup_epochs=0

      encore sweep resnet --gpus-per-node 8 --precision fp32,fp16 --dry-run

      encore sweep resnet --gpus-per-node 1,4 --nodes 1,2,4 --full-nodes --hosts n1:4,n2:4,n3:4,n4:4 --weak --dry-run

      encore sweep resnet --gpus-per-node 8 --images 24.06,24.05 --system dgxa100 --dry-run

      encore sweep --resume results/20261120T101500Z-sweep-resnet

    Exit codes: 0 all points finished, even below their targets; 2 invalid request, 1 a point failed, 130
    interrupted.
    """
    context.with_resource(ignore_closed_output())
    screen = console(stderr=as_json, soft_wrap=True)
    gpu_counts = options.numbers("--predict", predict) if predict is not None else ()
    if resume is not None:
        refuse_with_resume(context, "study folder", "submit", "hang_seconds", "stop_seconds", "predict", "trust_owner")
        run_folder.refuse_foreign(resume, trust_owner)
        study = folders.open_folder(resume, Sweep)
    else:
        grid, root = _sweep(context.params), (results or paths.default_results()).absolute()
        study = Folder(root / ".sweep-not-made", grid)  # no folder is there, so every point is to do
    if dry_run:
        _print_grid(study, as_json)
        return
    if resume is None:
        if gpu_counts and len({point.gpus for point in grid.points()}) < 2:
            raise EncoreError(
                "--predict with one number of GPUs",
                expected="a sweep over at least two",
                hint="--gpus-per-node 1,2, or omit --predict",
            )
        for point, check in sweeps.refuse(grid, root, submit):
            screen.print(f"[yellow]warning[/] {point.key}: {check.name}: {check.found}")
        study = folders.create(grid, f"sweep-{grid.request.name}", root)
    screen.print(f"study folder: {study.path}")
    code = sweeps.run(study, hooks_of(screen), Limits(hang_seconds, stop_seconds), submit)
    if code in (ExitCode.INTERRUPTED, ExitCode.FAILED) and study.may_resume():
        screen.print(f"resume with: {sweeps.resume_command(study)}", markup=False, highlight=False)
    _report(screen, study, gpu_counts, as_json)
    raise typer.Exit(code)


def _sweep(values: Mapping[str, Any]) -> Sweep:
    # Create the sweep from the options.
    if values["benchmark"] is None or (values["gpus_per_node"] is None and values["images"] is None):
        usage = "encore sweep BENCHMARK --gpus-per-node 1,2,4"
        raise EncoreError("no benchmark or no numbers of GPUs given", expected=usage)
    points = dict.fromkeys(("gpus", "nodes", "hostfile", "launcher", "results"))
    absolute = {
        name: path.absolute() for name in ("data_folder", "cluster", "python") if (path := values[name]) is not None
    }
    name = catalogue.choose(values["benchmark"]).name
    return Sweep(
        request=as_request({**values, **points, **absolute, "benchmark": name, "host_list": values["hosts"]}),
        gpus=options.numbers("--gpus-per-node", values["gpus_per_node"] or str(len(node.this_node().gpus) or 1)),
        nodes=options.numbers("--nodes", values["nodes"]),
        precisions=_names(values["precision"]),
        images=_names(values["images"]),
        mode="strong" if values["strong"] else "weak",
        full_nodes=values["full_nodes"],
        global_batch=values["global_batch"],
    )


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(","))) if text else ()


def _print_grid(study: Folder[Sweep], as_json: bool) -> None:
    grid, rows = study.study, []
    for point in grid.points():
        request = sweeps.point_request(grid, point, study.point_folder(point))
        # Multi-node points without hosts are planned for a scheduler.
        is_planned = not sweeps.is_submitted(grid, point, False)
        batch = describe_scale(planning.make_plan(request).configuration) if is_planned else ""
        rows.append((point.key, batch, " ".join(request.settings), study.state(point)))
    if as_json:
        names = ("point", "batch", "settings", "state")
        points = [dict(zip(names, row, strict=True)) for row in rows]
        write_json("sweep-plan", SweepPlan(grid=grid, points=points))
        return
    show(console(), f"{grid.request.name}, {grid.mode} scaling", ("point", "batch", "--set", "state"), rows)


def hooks_of(screen: Console) -> HooksOf:
    """Report local runs line by line, prefixed with the name of the point."""

    def point_hooks(point: GridPoint, folder: RunFolder | None) -> Hooks:
        if folder is not None:
            screen.print(f"point {point.key}: {folder.path}")
        return hooks(screen, RunView(screen) if folder is not None else None, folder)

    return point_hooks


def _report(screen: Console, study: Folder[Sweep], predict: tuple[int, ...], as_json: bool) -> None:
    from encore.lab.studies import throughput

    results = throughput.measured(study)
    tables = throughput.sweep_tables(study, results, predict)
    runs = [study.run_of(result.point) for result in results if result.state == "done"]
    files = throughput.write(study, results, tables) if runs else []
    if as_json:
        write_json("sweep", Swept(study=str(study.path), tables=list(tables)))
        return
    put(tables, as_json=False)
    for standing in dict.fromkeys(evaluate.standing(run) for run in runs if run is not None):
        screen.print(standing)
    if files:
        screen.print(f"report: {files[0]}")
