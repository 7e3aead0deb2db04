"""``encore study multi-node``: two frameworks on one to sixteen GPUs, by one sweep each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from encore import names, paths
from encore.cli import options
from encore.cli.layout import console, say, text, write_json
from encore.cli.report import print_table, tables_as_json
from encore.cli.sweep import here, submitter
from encore.errors import EncoreError, ExitCode
from encore.lab.scaling import plots, throughput
from encore.lab.scaling import sweep_folder as sweeps
from encore.lab.scaling.grid import Grid, points, request_of
from encore.lab.studies import nodes
from encore.lab.studies.servers_report import page
from encore.machine import node
from encore.results.report.report import write_files
from encore.results.table import Table
from encore.run import hints, planning, run_folder, runner
from encore.run.supervise import Limits

NAME = "multi-node"
EPILOG = """
Examples:

  encore study multi-node --small                        one and two ranks on a CPU

  encore study multi-node --hosts n1:4,n2:4,n3:4,n4:4 --data /data/imagenet

  encore study multi-node --system dgxa100 --runtime apptainer --image PyTorch=torch.sif --image MXNet=mx.sif --dry-run
"""


def register(group: typer.Typer) -> None:
    """Add the study of several nodes."""
    group.command(NAME, epilog=EPILOG)(multi_node)


def multi_node(
    small: Annotated[bool, typer.Option("--small", help="One and two ranks on a CPU.")] = False,
    hosts: Annotated[str | None, typer.Option(help="Hosts by ssh: n1:4,n2:4; this one first. Without: Slurm.")] = None,
    system: options.System = None,
    round_name: options.Round = None,
    data_folder: options.Data = None,
    results: options.Results = None,
    settings: options.Settings = None,
    runtime: options.Runtime = None,
    images: Annotated[
        list[str] | None, typer.Option("--image", metavar="FRAMEWORK=IMAGE", help="Image of a framework; repeat it.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of this study: run what is missing.")
    ] = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """ResNet-50 by two frameworks on 1 to 16 GPUs of several nodes, fp32 against fp16, next to the study's figures."""
    study = nodes.load(NAME)
    grids = nodes.grids(
        study, small, hosts=tuple(hosts.split(",")) if hosts else (), system=system, round=round_name,
        data=str(data_folder.absolute()) if data_folder else None, runtime=runtime,
    )  # fmt: skip
    grids = _with(grids, images or (), settings or ())
    if dry_run:
        _print(grids, (study.small if small else study).seconds, as_json, small)
        return
    screen = console(stderr=as_json, soft_wrap=True)
    folder = resume or _folder(results)
    say(screen, text(f"study folder: {folder}"))
    found, code = _run(study, grids, folder, screen)
    tables = nodes.tables(study, found)
    _write(study, tables, found, folder)
    if as_json:
        write_json(tables_as_json(tables))
    else:
        for table in tables:
            if table.rows:
                print_table(table)
    if code != ExitCode.REACHED and any(sweeps.open_study(each).may_resume() for each in folder.glob("*-sweep-*")):
        say(screen, text(f"resume with: {hints.command('study', NAME, '--resume', folder)}"))
    raise typer.Exit(code)


def _with(grids: dict[str, Grid], images: Sequence[str], settings: Sequence[str]) -> dict[str, Grid]:
    """Return the grids with each framework's image and with more settings."""
    given = dict(each.partition("=")[::2] for each in images)
    for name in given:
        if name not in grids:
            raise names.unknown("framework in --image", name, grids)
    return {
        name: replace(grid, image=given.get(name), settings=(*grid.settings, *settings)) for name, grid in grids.items()
    }


def _print(grids: dict[str, Grid], seconds: float | None, as_json: bool, small: bool) -> None:
    """Print every point with its command and the time of all.

    A point that Slurm would run has no command here, nor one whose system depends on GPUs that are not here.
    """
    found = []
    for name, grid in grids.items():
        is_open = grid.system is None and not small and not node.this_node().gpus
        for point in points(grid):
            command, why = "", "its command depends on the GPUs, of which there are none here: name them by --system"
            if sweeps.is_submitted(grid, point, False):
                why = "a job of the scheduler: encore submit shows it"
            elif not is_open:
                plan = planning.make_plan(request_of(grid, point, paths.default_results()))
                command, why = runner.as_shell(runner.dry_run_command(plan)), ""
            found.append({"framework": name, "point": point.key, "batch": point.batch, "command": command, "why": why})
    if as_json:
        write_json(found)
        return
    for each in found:
        typer.echo(f"{each['framework']} {each['point']}, {each['batch']} a GPU:")
        typer.echo(f"  {each['command'] or each['why']}")
    time = f"about {len(found) * seconds / 60:.0f} minutes" if seconds else "how long is known once a point has run"
    typer.echo(f"{len(found)} points: {time}")


def _folder(results: Path | None) -> Path:
    root = (results or paths.default_results()).absolute()
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    try:
        root.mkdir(parents=True, exist_ok=True)
        path = run_folder.free_name(root, f"{stamp}-study-{NAME}")
        path.mkdir()
    except OSError as error:
        raise EncoreError(f"{root} cannot be written: {error.strerror or error}", remedy="--results DIR") from error
    return path


def _run(
    study: nodes.NodeStudy, grids: dict[str, Grid], folder: Path, screen: Console
) -> tuple[dict[str, list[throughput.Result]], ExitCode]:
    """Run or resume the sweep of each framework; return its points."""
    found: dict[str, list[throughput.Result]] = {name: [] for name in grids}
    sweeps_of = {}
    for name, grid in grids.items():
        begun = sorted(folder.glob(f"*-sweep-{grid.benchmark}"))
        if not begun:
            for _, check in sweeps.refuse(grid, folder, submitter(grid), False):
                say(screen, text(f"warning: {name}: {check.name}: {check.found}"))
        sweeps_of[name] = sweeps.open_study(begun[-1]) if begun else sweeps.create(grid, folder)
    code = ExitCode.REACHED
    for name, sweep in sweeps_of.items():
        ended = sweeps.run(sweep, here(screen, Limits()), submitter(sweep.grid))
        code = ended if ended != ExitCode.REACHED else code
        found[name] = throughput.measured(sweep)
        if ended == ExitCode.INTERRUPTED:
            break
    return found, code


def _write(
    study: nodes.NodeStudy, tables: Sequence[Table], found: dict[str, list[throughput.Result]], folder: Path
) -> None:
    """Write the page with the tables and the figures 2 and 3."""
    lines = {f"{name}, {line}": at for name, each in found.items() for line, at in throughput.speed_ups(each).items()}
    what = throughput.devices(one for each in found.values() for one in each)
    figure = plots.speed_up(lines, tables[1], what)
    shown = page(study.title, tables, (figure,) if figure else (), on_cpus=what == "ranks")
    write_files(shown, folder / "report")
