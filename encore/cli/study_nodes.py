"""``encore study run multi-node``: two frameworks on one to sixteen GPUs, by one sweep each."""

from collections.abc import Sequence
from pathlib import Path

import typer

from encore import paths
from encore.cli.layout import console, put, say, text, write_json
from encore.cli.sweep import hooks_of
from encore.errors import ExitCode
from encore.lab.scaling import sharing as plots
from encore.lab.studies import folder as folders
from encore.lab.studies import nodes, sweep, throughput
from encore.lab.studies.servers_report import page
from encore.lab.studies.sweep import Sweep
from encore.machine import node
from encore.results.report.report import write_files
from encore.results.table import Table
from encore.run import hints, planning, runner
from encore.run.planning import Request
from encore.run.supervise import Limits
from encore.ssh import hosts as ssh_hosts

NAME = "multi-node"


def measure(
    *,
    small: bool,
    hosts: str | None,
    system: str | None,
    round_name: str | None,
    data: Path | None,
    results: Path | None,
    settings: Sequence[str],
    runtime: str | None,
    images: Sequence[str],
    resume: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Measure ResNet-50 by two frameworks on 1 to 16 GPUs of several nodes, fp32 and fp16, or resume it in a folder."""
    study = nodes.load(NAME)
    root = (results or paths.default_results()).absolute()
    request = Request(
        name="", gpus=None, system=system, round=round_name, data=data.absolute() if data else None, runtime=runtime,
        settings=tuple(settings), hosts=ssh_hosts.parse(hosts) if hosts else (),
    )  # fmt: skip
    grid = nodes.sweep_of(study, small, request, dict(each.partition("=")[::2] for each in images))
    if dry_run:
        _print(study, grid, (study.small if small else study).seconds, as_json, small)
        return
    screen = console(stderr=as_json, soft_wrap=True)
    if resume is not None:
        folder = folders.open_folder(resume, Sweep)
    else:
        for point, check in sweep.refuse(grid, root, False):
            say(screen, text(f"warning: {point.key}: {check.name}: {check.found}"))
        folder = folders.create(grid, f"study-{NAME}", root)
    say(screen, text(f"study folder: {folder.path}"))
    code = sweep.run(folder, hooks_of(screen), Limits())
    found = throughput.measured(folder)
    tables = nodes.tables(study, found)
    _write(study, tables, found, folder.path)
    put((table for table in tables if table.rows or as_json), as_json)
    if code != ExitCode.REACHED and folder.may_resume():
        say(screen, text(f"resume with: {hints.command('study', 'run', NAME, '--resume', folder.path)}"))
    raise typer.Exit(code)


def _print(study: nodes.NodeStudy, grid: Sweep, seconds: float | None, as_json: bool, small: bool) -> None:
    """Print every point with its command and the time of all.

    A point that Slurm would run has no command here, nor one whose system depends on GPUs that are not here.
    """
    found = []
    names = {each.benchmark: each.name for each in study.frameworks}
    is_open = grid.request.system is None and not small and not node.this_node().gpus
    for point in grid.points():
        command, why = "", "its command depends on the GPUs, of which there are none here: name them by --system"
        if sweep.is_submitted(grid, point, False):
            why = "a job of the scheduler: encore submit shows it"
        elif not is_open:
            plan = planning.make_plan(sweep.request_of(grid, point, paths.default_results()))
            command, why = runner.as_shell(runner.dry_run_command(plan)), ""
        framework = names[point.benchmark]
        found.append({"framework": framework, "point": point.key, "batch": point.batch, "command": command, "why": why})
    if as_json:
        write_json(found)
        return
    for each in found:
        typer.echo(f"{each['framework']} {each['point']}, {each['batch']} a GPU:")
        typer.echo(f"  {each['command'] or each['why']}")
    time = f"about {len(found) * seconds / 60:.0f} minutes" if seconds else "how long is known once a point has run"
    typer.echo(f"{len(found)} points: {time}")


def _write(study: nodes.NodeStudy, tables: Sequence[Table], results: Sequence[throughput.Result], folder: Path) -> None:
    found = nodes.by_framework(study, results)
    lines = {f"{name}, {line}": at for name, each in found.items() for line, at in throughput.speed_ups(each).items()}
    what = throughput.devices(results)
    figure = plots.speed_up(lines, tables[1], what)
    shown = page(study.title, tables, (figure,) if figure else (), on_cpus=what == "ranks")
    write_files(shown, folder / "report")
