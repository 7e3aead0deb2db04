"""The pages of the studies of servers: runs compared with each other, a machine, a roofline.

from encore.lab.studies.servers_report import servers_report
report = servers_report(["a=results/a", "b=results/b"], base="a")
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from encore.lab.studies import roofline, servers
from encore.lab.studies.gpus_needed import gpus_needed
from encore.lab.studies.machine_links import Machine, load_machine, machine_tables, speeds_figure
from encore.lab.studies.published_servers import published_tables
from encore.lab.studies.server_picture import matrix, picture
from encore.lab.studies.servers import ServerRun, load_runs
from encore.lab.studies.utilisation import utilisation_table
from encore.machine.links import from_json
from encore.results.report.figures import Figure, bars, efficiency, quality_curves, time_over_gpus
from encore.results.report.measurements import Measurement
from encore.results.report.report import Report
from encore.results.table import Table

ON_CPUS = (
    "Measured on CPUs: ranks stand for GPUs, Gloo for NCCL. These figures are of this machine, and reproduce no "
    "published one."
)


def servers_report(
    runs: Sequence[str], *, base: str | None = None, machines: Sequence[Path] = (), rooflines: Sequence[Path] = ()
) -> Report:
    """Read runs, machines and rooflines, and say everything that can be said of them."""
    described = [load_machine(path) for path in machines]
    found = load_runs(runs, {each.server.name: each.server.kind for each in described})
    described += _machines_of(found, described)
    measured = [roofline.load(folder) for folder in rooflines]
    tables = [
        *servers.tables(found, base),
        gpus_needed(found),
        utilisation_table((run.measured.label, run.measured.benchmark, run.side.logs) for run in found),
    ]
    parts = [machine_report(each) for each in described] + [roofline_report(each) for each in measured]
    figures = [*_figures(found, base), *(figure for part in parts for figure in part.figures)]
    on_cpus = any(run.side.is_cpu for run in found) or any(part.notices for part in parts)
    tables += [table for part in parts for table in part.tables]
    made = page("Servers compared", tables, _unique(figures), on_cpus=on_cpus)
    return replace(made, studies=tuple(published_tables()))


def _machines_of(runs: Sequence[ServerRun], known: Sequence[Machine]) -> list[Machine]:
    # The machines that the runs themselves describe, without those that are known.
    found = {each.server.name: each for each in known}
    for run in runs:
        try:
            server = from_json(run.side.passport["links"])
        except (KeyError, TypeError, AttributeError):
            # A run of an earlier version of Encore, or somebody else's.
            continue
        found.setdefault(server.name, Machine(server))
    return [each for each in found.values() if each not in known]


def _figures(runs: Sequence[ServerRun], base: str | None) -> list[Figure]:
    measured = [run.measured for run in runs]
    named = [replace(each, label=f"{each.label}, {each.gpus or '?'}") for each in measured]
    found: list[Figure | None] = [
        *(each for name in dict.fromkeys(m.benchmark for m in named) for each in quality_curves(named, name)),
        *time_over_gpus([replace(each, benchmark=_line(each)) for each in measured]),
        efficiency(measured),
        bars("relative", servers.relative_scores(runs, base), (0, 1, 2), 4, "times as fast as the base"),
        bars("links-speed-up", servers.by_links(runs), label=(0, 1, 3), value=6, axis="speed-up of NVLink, %"),
        bars("precision-speed-up", servers.by_precision(runs), label=(0, 1, 3), value=6, axis="speed-up, %"),
        bars("frameworks", servers.by_framework(runs), label=(0, 1, 3), value=8, axis="times as fast as the slowest"),
        bars("batches", servers.by_batch(runs), label=(0, 1, 3), value=7, axis="speed-up over the smallest batch"),
    ]
    return [figure for figure in found if figure is not None]


def _line(each: Measurement) -> str:
    return ", ".join(filter(None, (each.benchmark, each.system, each.precision)))


def machine_report(machine: Machine) -> Report:
    drawn = picture(machine.server)
    figures = [drawn, speeds_figure(machine)]
    tables = [*([matrix(machine.server)] if machine.server.gpus else []), *machine_tables(machine)]
    return page(
        f"The machine {machine.server.name}",
        tables,
        [each for each in figures if each is not None],
        on_cpus=not machine.server.gpus,
    )


def roofline_report(measured: roofline.Measured) -> Report:
    figure = roofline.roofline_figure(measured)
    tables = [
        roofline.peaks_table(measured), roofline.roofline_table(measured), roofline.classes_table(measured),
        roofline.kernels_table(measured),
    ]  # fmt: skip
    return page("Roofline", tables, [figure] if figure else [], on_cpus=measured.is_cpu)


def page(title: str, tables: Sequence[Table], figures: Sequence[Figure], *, on_cpus: bool) -> Report:
    return Report(
        title=title,
        tables=tuple(table.filled() for table in tables if table.rows),
        figures=tuple(replace(figure, table=figure.table.filled()) for figure in figures),
        notices=(ON_CPUS,) if on_cpus else (),
    )


def _unique(figures: Sequence[Figure]) -> list[Figure]:
    # Number the keys that several machines share, as each is the name of a file.
    seen: dict[str, int] = {}
    found = []
    for figure in figures:
        seen[figure.key] = seen.get(figure.key, 0) + 1
        number = seen[figure.key]
        found.append(figure if number == 1 else replace(figure, key=f"{figure.key}-{number}"))
    return found
