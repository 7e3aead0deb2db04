"""``encore study servers``, ``machine``, ``roofline`` and ``kernels``: what a server is and does, from measurements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from encore import catalogue
from encore.cli import options
from encore.cli.data import shown_progress
from encore.cli.layout import console, say, text, write_json
from encore.cli.report import print_table, tables_as_json
from encore.errors import EncoreError
from encore.lab.studies import kernels_in_common, machine_links, roofline, servers_report
from encore.lab.studies.published_servers import published_tables
from encore.machine import node
from encore.results.report.report import Report, write_files
from encore.run import benching

SERVERS_EPILOG = """
Examples:

  encore study servers p100=results/a c4140k=results/b --base p100 -o servers

  encore study servers results --machine machine --roofline roofline -o servers
"""
MACHINE_EPILOG = """
Examples:

  encore study machine -o machine                        its links, drawn

  encore study machine --ranks 8 -o machine              and how fast they are
"""
ROOFLINE_EPILOG = """
Examples:

  encore study roofline resnet-pytorch bert ssd -o roofline

  encore study roofline --from roofline                  shown again
"""
KERNELS_EPILOG = """
Examples:

  encore study kernels roofline/resnet-pytorch.json resnet-of-another-framework.csv
"""
Folder = Annotated[Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write the page into this folder.")]


def register(group: typer.Typer) -> None:
    """Add the kinds of studies that are of servers."""
    group.command("servers", epilog=SERVERS_EPILOG)(servers)
    group.command("machine", epilog=MACHINE_EPILOG)(machine)
    group.command("roofline", epilog=ROOFLINE_EPILOG)(measure_roofline)
    group.command("kernels", epilog=KERNELS_EPILOG)(kernels)


def servers(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, each RUN or NAME=RUN.")],
    base: Annotated[
        str | None, typer.Option(metavar="NAME", help="Server that scores are relative to; default: one with a P100.")
    ] = None,
    machines: Annotated[
        list[Path] | None, typer.Option("--machine", metavar="DIR", help="Folder of `encore study machine`.")
    ] = None,
    rooflines: Annotated[
        list[Path] | None, typer.Option("--roofline", metavar="DIR", help="Folder of `encore study roofline`.")
    ] = None,
    output: Folder = None,
    as_json: options.Json = False,
) -> None:
    """Hold servers, or settings of one, against each other by their runs, next to the published study."""
    report = servers_report.servers_report(runs, base=base, machines=machines or (), rooflines=rooflines or ())
    _show(report, output, as_json)


def machine(
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that exchange data, one a GPU; 1 measures nothing.")] = 1,
    python: options.Python = None,
    output: Folder = None,
    as_json: options.Json = False,
) -> None:
    """Draw this machine's GPUs and links, and measure what the links carry."""
    screen = console(stderr=as_json)
    found = machine_links.describe(node.this_node(), ranks, screen.print, python)
    report = servers_report.machine_report(found)
    if output is not None:
        _keep(output, machine_links.FILE, found.as_json())
    if as_json:
        write_json(found.as_json())
    else:
        say(screen, text(f"{report.figures[0].title}: {len(found.server.gpus)} GPUs"))
    _show(report, output, as_json, printed=not as_json)


def measure_roofline(
    benchmarks: Annotated[
        list[str] | None, typer.Argument(metavar="BENCHMARK...", help="Such as resnet-pytorch.")
    ] = None,
    system: options.System = None,
    round_name: options.Round = None,
    data_folder: options.Data = None,
    steps: Annotated[int, typer.Option(help="Steps of each measurement.")] = 10,
    settings: options.Settings = None,
    python: options.Python = None,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Show what was measured before, and what is added.")
    ] = None,
    output: Folder = None,
    as_json: options.Json = False,
) -> None:
    """Place training steps below this machine's measured ceilings, and show where their time goes."""
    folder = output or from_
    if folder is None or not (benchmarks or from_):
        raise EncoreError("nothing to measure or show", expected="BENCHMARK... -o DIR, or --from DIR", remedy="--help")
    _check_counted(benchmarks or ())
    screen = console(stderr=as_json)
    device = "gpu" if node.this_node().gpus else "cpu"
    for name in benchmarks or ():
        request = benching.Request(
            name=name, system=system, round=round_name, data=data_folder, steps=steps, repeats=1,
            settings=tuple(settings or ()), python=python,
        )  # fmt: skip
        with shown_progress(screen) as on_update:
            what = ("--steps", str(steps), "--peaks", device)
            result = benching.run_program(
                request, "benchmarks.common.checks.roofline {module}", what, screen.print, on_update
            )
        _keep(folder, roofline.PEAKS, {"peaks": roofline.fastest(result.pop("peaks"), folder / roofline.PEAKS)})
        _keep(folder, f"{name}.json", result)
    _show(servers_report.roofline_report(roofline.load(from_ or folder)), output, as_json)


def _check_counted(benchmarks: Sequence[str]) -> None:
    counted = machine_links.own_framework()
    for name in benchmarks:
        if (framework := catalogue.choose(name).implementation.framework) != counted:
            every = [each for each, choice in catalogue.choices().items() if choice.implementation.framework == counted]
            raise EncoreError(
                f"{name}: steps of {framework} are not counted",
                expected=f"a benchmark in {counted}: {', '.join(every)}",
                remedy="compare its kernels by Nsight Systems: encore study kernels --help",
            )


def kernels(
    first: Annotated[Path, typer.Argument(help="JSON of a roofline, or CSV of nsys.")],
    second: Annotated[Path, typer.Argument(help="The same of another framework.")],
    as_json: options.Json = False,
) -> None:
    """List the kernels that two programs have in common, with their share of the time."""
    found = [kernels_in_common.in_common(*map(kernels_in_common.read_kernels, (first, second)))]
    found += [table for table in published_tables() if "kernels" in table.title]
    if as_json:
        write_json(tables_as_json(found))
        return
    for table in found:
        print_table(table)


def _keep(folder: Path, name: str, content: object) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise EncoreError(f"{folder / name} cannot be written: {error.strerror}", remedy="give a folder: -o") from error


def _show(report: Report, output: Path | None, as_json: bool, *, printed: bool = True) -> None:
    screen = console(stderr=as_json)
    if output is not None:
        files = write_files(report, output)
        say(screen, text(f"{files[0]} and {len(files) - 1} files next to it"))
    if not printed:
        return
    if as_json:
        write_json({"notices": report.notices, "tables": tables_as_json([*report.tables, *report.studies])})
        return
    for notice in report.notices:
        say(screen, text(notice, "bold"))
    for table in [*report.tables, *report.studies]:
        print_table(table)
