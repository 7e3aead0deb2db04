"""Servers, or settings of one, compared with each other by runs of the suite: tables, figures and the page.

from encore.lab.studies.server_comparison import load_runs, servers_report, tables
for table in tables(load_runs(["a=results/a", "b=results/b"]), base=None):
    print(table.as_markdown())
report = servers_report(["a=results/a", "b=results/b"], base="a")
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from encore.errors import EncoreError
from encore.lab.scaling.cost_model import share_of, strong
from encore.lab.scaling.overlap import sums_table
from encore.lab.scaling.printed_tables import DELL
from encore.lab.studies import roofline
from encore.lab.studies.topology import (
    Machine,
    collectives_table,
    load_machine,
    matrix,
    pairs_table,
    peer_table,
    picture,
    speeds_figure,
)
from encore.machine.links import from_json
from encore.names import unknown
from encore.results.compare.run_set import RunSet, load_run_sets
from encore.results.format import percent
from encore.results.logs.run_log import RunLog
from encore.results.logs.telemetry import by_node
from encore.results.published.published import load_figures
from encore.results.published.systems import family
from encore.results.report.figures import Figure, bars, efficiency, quality_curves, time_over_gpus
from encore.results.report.measurements import Measurement, measurement_of, relative_to, scaling_efficiency
from encore.results.report.report import Report
from encore.results.statistics import LEVEL, interval
from encore.results.table import Cell, Table, grouped, whole

BASE_FAMILY = "P100"  # the accelerator that the study takes as the base, as the first round of MLPerf did
PCIE, NVLINK = "PCIe", "NVLink"
SINGLE = ("fp32",)
LIMITS = (("a day", 1440.0), ("four hours", 240.0), ("two hours", 120.0))  # minutes that the study asks for
MOST_GPUS = 4096


@dataclass(frozen=True, kw_only=True)
class ServerRun:
    server: str
    side: RunSet
    # Its system is the server's name; its label also has what sets this one apart from others on this server.
    measured: Measurement
    links: str = ""  # PCIe or NVLink between its GPUs; empty where that is not known, or there are fewer than two

    @property
    def where(self) -> tuple[object, ...]:
        """What must be equal where two servers, and nothing else, are compared with each other."""
        each = self.measured
        return (each.benchmark, each.framework, each.gpus, each.precision, each.batch)


def load_runs(named: Sequence[str], links: Mapping[str, str] = {}) -> list[ServerRun]:
    """Return every set below the folders ``NAME=FOLDER`` or ``FOLDER``; ``links``: NVLink or PCIe by server or host."""
    found = []
    for text in named:
        name, _, path = text.partition("=") if "=" in text and not Path(text).exists() else ("", "", text)
        if not Path(path).exists():
            raise EncoreError(f"there is no {path}", expected="RUN or NAME=RUN", hint="name a run folder")
        for side in load_run_sets(path):
            measured, host = measurement_of(side), side.settings.get("node.hostname")
            server = name or (f"{host}, {measured.system}" if host else measured.system)
            # Logs of the first rounds have no batch: that of all ranks by the run's configuration.
            own, ranks = side.settings.get("configuration.batch_size"), side.ranks
            batch = measured.batch or (float(own) * ranks if isinstance(own, int) and ranks else None)
            measured = replace(measured, label=server, system=server, batch=batch)
            kind = links.get(server) or links.get(str(host)) or _links_of(side)
            found.append(ServerRun(server=server, side=side, measured=measured, links=kind))
    return _distinct(found)


def _distinct(runs: Sequence[ServerRun]) -> list[ServerRun]:
    # The runs with framework, precision and batch in the label where a server has several of them.
    by_server = grouped(runs, lambda run: (run.server, run.measured.benchmark))
    found = []
    for run in runs:
        own, same = _setting(run), by_server[run.server, run.measured.benchmark]
        # Where a training is scaled strongly, the batch of a GPU follows from their number.
        among = (same, same, [other for other in same if other.measured.gpus == run.measured.gpus])
        words = [own[at] for at in range(3) if len({_setting(other)[at] for other in among[at]}) > 1]
        found.append(replace(run, measured=replace(run.measured, label=", ".join([run.server, *filter(None, words)]))))
    return found


def _setting(run: ServerRun) -> tuple[str, str, str]:
    # Framework, precision and batch of a GPU.
    each = run.measured
    batch = f"batch {each.batch / each.gpus:,.0f} a GPU" if each.batch and each.gpus else ""
    return each.framework or "", each.precision, batch


def _links_of(side: RunSet) -> str:
    # The links that the run found, a system description names, or the form of the accelerator shows.
    hardware = side.hardware
    if (side.ranks or 0) < 2 or side.is_cpu:
        return ""
    found = side.passport.get("links")
    if isinstance(found, dict) and found.get("kind"):
        return str(found["kind"])
    text = f"{hardware.accelerator_interconnect or ''} {hardware.accelerator or ''}".lower()
    if "nvlink" in text or "nvswitch" in text or "sxm" in text:
        return NVLINK
    return PCIE if "pci" in text else ""


def base_of(runs: Sequence[ServerRun], wanted: str | None) -> str:
    """Return the base: the wanted server, else one with a P100, else the first that was named."""
    names = [run.server for run in runs]
    if wanted is not None:
        if wanted not in names:
            raise unknown("base", wanted, dict.fromkeys(names))
        return wanted
    cards = [run for run in runs if family(run.side.hardware.accelerator) == BASE_FAMILY]
    return (cards or list(runs))[0].server


def tables(runs: Sequence[ServerRun], base: str | None = None) -> list[Table]:
    """Return every table that these runs fill; EncoreError where there is none."""
    if not runs:
        raise EncoreError("no run was found", expected="run folders of one or more servers", hint="name RUN...")
    measured = [run.measured for run in runs]
    found = [
        time_to_target(runs),
        relative_scores(runs, base),
        scaling_efficiency(measured),
        by_links(runs),
        by_precision(runs),
        first_epochs(runs),
        by_framework(runs),
        by_batch(runs),
    ]
    return [table for table in found if table.rows]


def relative_scores(runs: Sequence[ServerRun], base: str | None = None) -> Table:
    """Return scores relative to the base's on the fewest GPUs that it has of each benchmark; no rows without it.

    Of several on as few GPUs it is the one that was named first.
    """
    chosen = base_of(runs, base)
    # Of several of one name the last one counts.
    ordered = sorted((run.measured for run in reversed(runs)), key=lambda each: (each.benchmark, -(each.gpus or 0)))
    if not any(each.minutes and each.system == chosen for each in ordered):
        return Table(title=f"Score relative to {chosen}", columns=(), rows=())
    return relative_to(ordered, chosen)


def time_to_target(runs: Sequence[ServerRun]) -> Table:
    rows = []
    for run in sorted(runs, key=lambda run: (run.measured.benchmark, run.server, run.measured.gpus or 0)):
        each, side = run.measured, run.side
        span = interval(side.score) if side.score else None
        rows.append((
            each.benchmark, run.server, each.framework, each.gpus, side.ranks if side.is_cpu else None, run.links,
            each.precision, whole(each.batch), each.minutes, *(span or (None, None)), each.minutes_per_epoch,
            each.epochs, f"{side.converged} of {side.runs}",
        ))  # fmt: skip
    columns = (
        "benchmark", "server", "framework", "GPUs", "CPU ranks", "links", "precision", "batch", "minutes",
        f"{percent(LEVEL)} from", f"{percent(LEVEL)} to", "minutes per epoch", "epochs", "reached",
    )  # fmt: skip
    return Table(title="Time to the target", columns=columns, rows=tuple(rows), note="Batch: of all GPUs together.")


def by_links(runs: Sequence[ServerRun]) -> Table:
    """Return PCIe against NVLink, where all else is equal but the server."""
    return Table(
        title="PCIe against NVLink",
        columns=("benchmark", "GPUs", "PCIe", "NVLink", "PCIe min", "NVLink min", "speed-up %", "saved min"),
        rows=tuple(
            (
                pcie.measured.benchmark, pcie.measured.gpus, pcie.server, nvlink.server, slow, fast,
                (slow / fast - 1) * 100, slow - fast,
            )
            for same in grouped(runs, lambda run: run.where).values()
            for pcie, nvlink, slow, fast in _pairs(same, lambda run: run.links == PCIE, lambda run: run.links == NVLINK)
        ),
    )  # fmt: skip


def by_precision(runs: Sequence[ServerRun]) -> Table:
    """Return single against mixed precision: percent and minutes of the time to the target.

    Of equal batches, where a server has such: mixed precision has room for larger ones.
    """
    rows: list[tuple[Cell, ...]] = []
    for same in grouped(runs, lambda run: (run.server, *run.where[:3])).values():
        pairs = _pairs(
            same,
            lambda run: run.measured.precision in SINGLE,
            lambda run: run.measured.precision not in ("", None, *SINGLE),
        )
        equal = [pair for pair in pairs if pair[0].measured.batch == pair[1].measured.batch]
        rows += [
            (
                single.measured.benchmark, single.server, single.measured.gpus, mixed.measured.precision, slow,
                fast, (slow / fast - 1) * 100, slow - fast, (1 - fast / slow) * 100,
                whole(single.measured.batch), whole(mixed.measured.batch),
            )
            for single, mixed, slow, fast in equal or pairs
        ]  # fmt: skip
    columns = (
        "benchmark", "server", "GPUs", "mixed", "fp32 min", "mixed min", "speed-up %", "saved min", "saved %",
        "fp32 batch", "mixed batch",
    )  # fmt: skip
    return Table(title="Single against mixed precision", columns=columns, rows=tuple(rows))


def first_epochs(runs: Sequence[ServerRun]) -> Table:
    """Return the time of one epoch against that of two: what a run over one epoch alone does not show."""
    known = [(run.measured, run.side.phases.get("first_epoch_s"), run.side.phases.get("epoch_s")) for run in runs]
    return Table(
        title="One against two epochs",
        columns=("benchmark", "server", "GPUs", "one epoch min", "two epochs min", "two over one"),
        rows=tuple(
            (each.benchmark, each.label, each.gpus, first / 60, (first + later) / 60, (first + later) / first)
            for each, first, later in known
            if first and later
        ),
        note="Without evaluations; medians over the runs, the second epoch is the median of all but the first. Below 2 "
        "the first epoch is slower, as it reads from the disk and settles: one epoch alone is that far off.",
    )


def by_framework(runs: Sequence[ServerRun]) -> Table:
    """Return frameworks against each other on one server: epochs, time of an epoch, time to the target."""
    same = grouped(runs, lambda run: (run.server, run.measured.benchmark, run.measured.gpus)).values()
    return Table(
        title="Frameworks against each other",
        columns=(
            "benchmark", "server", "GPUs", "framework", "precision", "epochs", "minutes per epoch", "minutes",
            "times as fast",
        ),
        rows=tuple(
            (
                each.benchmark, each.system, each.gpus, each.framework, each.precision, each.epochs,
                each.minutes_per_epoch, minutes, max(slow for _, slow in known) / minutes,
            )
            for known in (_several(group, lambda each: each.framework) for group in same)
            for each, minutes in known
        ),
    )  # fmt: skip


def by_batch(runs: Sequence[ServerRun]) -> Table:
    """Return what a larger batch does to epochs and minutes, all else being equal."""
    same = grouped(runs, lambda run: (run.server, *run.where[:4])).values()
    by_size = (
        sorted(_several(group, lambda each: each.batch), key=lambda pair: pair[0].batch or 0.0) for group in same
    )
    return Table(
        title="Batch variants",
        columns=(
            "benchmark", "server", "GPUs", "batch", "epochs", "minutes per epoch", "minutes",
            "speed-up over the smallest",
        ),
        rows=tuple(
            (
                each.benchmark, each.system, each.gpus, whole(each.batch), each.epochs, each.minutes_per_epoch,
                minutes, known[0][1] / minutes,
            )
            for known in by_size
            for each, minutes in known
        ),
    )  # fmt: skip


def _several(runs: Iterable[ServerRun], value: Callable[[Measurement], object]) -> list[tuple[Measurement, float]]:
    # The runs that ended with their minutes, where they differ in a value; none where they do not.
    known = [(run.measured, run.measured.minutes) for run in runs if run.measured.minutes and value(run.measured)]
    return known if len({value(each) for each, _ in known}) > 1 else []


def _pairs(
    runs: Iterable[ServerRun], first: Callable[[ServerRun], bool], second: Callable[[ServerRun], bool]
) -> list[tuple[ServerRun, ServerRun, float, float]]:
    # Each pair of a first and a second run that both ended, with their minutes.
    known = [(run, run.measured.minutes) for run in runs if run.measured.minutes]
    return [(one, other, slow, fast) for one, slow in known if first(one) for other, fast in known if second(other)]


def gpus_needed(runs: Sequence[ServerRun]) -> Table:
    """Return the fewest GPUs, a power of two, per benchmark and server, and the interval of the minutes on them.

    Where one number of GPUs was measured there is no model: what was measured is compared with the limit.
    """
    ended = [run for run in runs if run.measured.gpus and run.measured.minutes]
    rows: list[tuple[Cell, ...]] = []
    for (benchmark, server), same in sorted(grouped(ended, lambda run: (run.measured.benchmark, run.server)).items()):
        points: dict[int, float] = {}
        for gpus, minutes in ((run.measured.gpus or 0, run.measured.minutes or 0.0) for run in same):
            points[gpus] = min(minutes, points.get(gpus, minutes))
        counts = ", ".join(map(str, sorted(points)))
        rows += [(benchmark, server, counts, name, *_fewest(points, limit)) for name, limit in LIMITS]
    return Table(
        title="GPUs for a day, four hours, two hours",
        columns=(
            "benchmark", "server", "measured on", "within", "GPUs", "minutes", "95 % from", "95 % to",
            "GPUs to be sure", "how",
        ),
        rows=tuple(rows),
        note="GPUs: the fewest, a power of two, with which the expected minutes are within the limit; to be sure: with "
        "which the upper end of the 95 % interval is. The model takes as many epochs for every number of GPUs: where a "
        "larger batch needs more, more GPUs are needed.",
    )  # fmt: skip


def _fewest(points: dict[int, float], limit: float) -> tuple[Cell, ...]:
    if len(points) < 2:
        ((gpus, minutes),) = points.items()
        if minutes <= limit:
            return (gpus, minutes, None, None, None, "measured")
        return (None, minutes, None, None, None, "not enough; measure on another number of GPUs for the model")
    model = strong(points)
    counts = [2**power for power in range(MOST_GPUS.bit_length())]
    # An interval takes a search: only where the expected minutes are within the limit can its upper end be.
    likely = [n for n in counts if sum(model.parts(share_of(n)).values()) <= limit]
    if not likely:
        return (None, None, None, None, None, f"not with {MOST_GPUS} GPUs")
    fewest, sure = likely[0], next((n for n in likely if model.predict(share_of(n)).high <= limit), None)
    found = model.predict(share_of(fewest))
    how = "model, measured there" if fewest in points else "model"
    return (fewest, found.value, found.low, found.high, sure, how)


# -- how busy a machine was while a run's clock was running, from the telemetry of its run folder -------------------

_KIB_PER_MIB = 1024.0
# Columns, and what a reading calls them: of the machine, then of one GPU; counters run on.
_OF_MACHINE = {"CPU %": "cpu_percent", "memory MiB": "memory_used_mib"}
_OF_GPUS = {
    "GPU %": "use_percent", "GPU memory MiB": "memory_mib", "GPU watts": "power_watts",
    "PCIe sent": "pcie_sent_kib_s", "PCIe received": "pcie_received_kib_s",
}  # fmt: skip
_COUNTERS = {"NVLink sent": "nvlink_sent_kib", "NVLink received": "nvlink_received_kib"}
_COLUMNS = ("minutes", *_OF_MACHINE, "GPUs", *_OF_GPUS, *_COUNTERS)


def utilisation_of(logs: Sequence[RunLog]) -> dict[str, Cell]:
    """Return the means over the timed part of a set of runs, by column; empty where nothing was read meanwhile."""
    nodes = [by_node(log) for log in logs]
    parts = [part for each in nodes for part in each.values()]
    readings = [reading for part in parts for reading in part]
    if not readings:
        return {}
    cards = [card for reading in readings for card in reading.get("gpus", ())]
    means = {column: _mean(each.get(name) for each in readings) for column, name in _OF_MACHINE.items()}
    for column, name in _OF_GPUS.items():
        mean = _mean(each.get(name) for each in cards)
        means[column] = mean / _KIB_PER_MIB if mean is not None and name.endswith("_kib_s") else mean
    seconds = sum((log.elapsed_minutes or 0.0) * 60 for log, found in zip(logs, nodes, strict=True) if found)
    return {
        "minutes": seconds / 60,
        "GPUs": max(sum(max(len(r.get("gpus", ())) for r in part) for part in each.values()) for each in nodes if each),
        **means,
        **{column: _rate(parts, name) for column, name in _COUNTERS.items()},
    }


def utilisation_table(runs: Iterable[ServerRun]) -> Table:
    found = [(run.measured, utilisation_of(run.side.logs)) for run in runs]
    return Table(
        title="Utilisation over the timed part",
        columns=("server", "benchmark", *_COLUMNS),
        formats=dict.fromkeys((*_OF_MACHINE, *_OF_GPUS), ".1f"),
        rows=tuple(
            (each.label, each.benchmark, *(means[column] for column in _COLUMNS)) for each, means in found if means
        ),
        note="Means of the samples between run_start and run_stop, one a second; of a GPU the mean over all; traffic "
        "in MiB/s per GPU. GPU %: share of the time in which a kernel ran, not of its units that were busy.",
    )


def _mean(values: Iterable[Any]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _rate(parts: Sequence[list[dict[str, Any]]], name: str) -> float | None:
    # MiB/s per GPU by a counter in KiB that runs on, from the first and the last reading of each part.
    rates = []
    for readings in parts:
        for gpu in range(min((len(reading.get("gpus", ())) for reading in readings), default=0)):
            known = [(r["time"], r["gpus"][gpu].get(name)) for r in readings if r["gpus"][gpu].get(name) is not None]
            if len(known) > 1 and known[-1][0] > known[0][0]:
                rates.append((known[-1][1] - known[0][1]) / _KIB_PER_MIB / (known[-1][0] - known[0][0]))
    return _mean(rates)


# -- what the study printed, and the pages -------------------------------------------------------------------------

# Places of the study with figures that a table of ours is compared with, in its order.
PLACES = (
    ("slide: time to accuracy", "Published: time to the target"),
    ("slide: PCIe and SXM2", "Published: PCIe and SXM2, one GPU"),
    ("slide: precision", "Published: single against mixed precision"),
    ("slide: framework comparison", "Published: frameworks"),
    ("slide: GPU kernels", "Published: kernels in common"),
    ("slide: GPU scaling", "Published: scaling efficiency"),
    ("slide: NVLink bridge", "Published: NVLink"),
    ("slide: key messages", "Published: NVLink, key messages"),
    ("backup: memory sizes", "Published: batch variants"),
)
ON_CPUS = (
    "Measured on CPUs: ranks stand for GPUs, Gloo for NCCL. These figures are of this machine, and reproduce no "
    "published one."
)


def published_tables() -> list[Table]:
    columns = ("benchmark", "system", "GPUs", "batch", "precision", "figure", "printed", "unit", "context")
    by_place = grouped((each for each in load_figures() if each.source == DELL), lambda each: each.place)
    return [
        Table(
            title=title,
            columns=columns,
            rows=tuple(
                (
                    figure.model, figure.system, figure.gpus, figure.batch, figure.precision,
                    figure.quantity.replace("_", " "), f"{figure.relation} {figure.printed}".removeprefix("= "),
                    figure.unit, figure.context,
                )
                for figure in by_place[place]
            ),
            note=f"{DELL}, {place}.",
        )
        for place, title in PLACES
        if place in by_place
    ]  # fmt: skip


def servers_report(
    runs: Sequence[str], *, base: str | None = None, machines: Sequence[Path] = (), rooflines: Sequence[Path] = ()
) -> Report:
    """Read runs, machines and rooflines, and say everything that can be said of them."""
    described = [load_machine(path) for path in machines]
    found = load_runs(runs, {each.server.name: each.server.kind for each in described})
    known = {each.server.name for each in described}
    for run in found:
        # A run of an earlier version of Encore, or somebody else's, has none.
        with suppress(KeyError, TypeError, AttributeError):
            server = from_json(run.side.passport["links"])
            if server.name not in known:
                described.append(Machine(server))
                known.add(server.name)
    measured = [roofline.load(folder) for folder in rooflines]
    parts = [machine_report(each) for each in described] + [roofline_report(each) for each in measured]
    compared = [*tables(found, base), gpus_needed(found), utilisation_table(found)]
    figures = [*_figures(found, base), *(figure for part in parts for figure in part.figures)]
    # Several machines share keys, and each is the name of a file.
    keys = Counter[str]()
    for number, figure in enumerate(figures):
        keys[figure.key] += 1
        if keys[figure.key] > 1:
            figures[number] = replace(figure, key=f"{figure.key}-{keys[figure.key]}")
    on_cpus = any(run.side.is_cpu for run in found) or any(part.notices for part in parts)
    every = [*compared, *(table for part in parts for table in part.tables)]
    return replace(page("Servers compared", every, figures, on_cpus=on_cpus), studies=tuple(published_tables()))


def _figures(runs: Sequence[ServerRun], base: str | None) -> list[Figure]:
    measured = [run.measured for run in runs]
    named = [replace(each, label=f"{each.label}, {each.gpus or '?'}") for each in measured]
    lines = [
        replace(each, benchmark=", ".join(filter(None, (each.benchmark, each.system, each.precision))))
        for each in measured
    ]
    found: list[Figure | None] = [
        *(each for name in dict.fromkeys(m.benchmark for m in named) for each in quality_curves(named, name)),
        *time_over_gpus(lines),
        efficiency(measured),
        bars("relative", relative_scores(runs, base), (0, 1, 2), 4, "times as fast as the base"),
        bars("links-speed-up", by_links(runs), label=(0, 1, 3), value=6, axis="speed-up of NVLink, %"),
        bars("precision-speed-up", by_precision(runs), label=(0, 1, 3), value=6, axis="speed-up, %"),
        bars("frameworks", by_framework(runs), label=(0, 1, 3), value=8, axis="times as fast as the slowest"),
        bars("batches", by_batch(runs), label=(0, 1, 3), value=7, axis="speed-up over the smallest batch"),
    ]
    return [figure for figure in found if figure is not None]


def machine_report(machine: Machine) -> Report:
    links, figures = [matrix(machine.server)] if machine.server.gpus else [], [picture(machine.server)]
    speeds, title = speeds_figure(machine), f"The machine {machine.server.name}"
    measured = [each for each in machine.speeds.get("collectives", ()) if each["kind"] == "all-reduce"]
    rates = [(each["bytes"], each["rate"]) for each in measured]
    rates += [(size, rate) for size, rate in machine.by_tool.get("all-reduce", ())]
    sums = [sums_table(machine.speeds["ranks"], max(rates)[1])] if rates else []
    return page(
        title,
        [*links, pairs_table(machine), peer_table(machine), collectives_table(machine), *sums],
        [*figures, speeds] if speeds else figures,
        on_cpus=not machine.server.gpus,
    )


def roofline_report(measured: roofline.Measured) -> Report:
    figure = roofline.roofline_figure(measured)
    makers = (roofline.peaks_table, roofline.roofline_table, roofline.classes_table, roofline.kernels_table)
    return page("Roofline", [make(measured) for make in makers], [figure] if figure else [], on_cpus=measured.is_cpu)


def page(title: str, tables: Sequence[Table], figures: Sequence[Figure], *, on_cpus: bool) -> Report:
    return Report(
        title=title,
        tables=tuple(table.filled() for table in tables if table.rows),
        figures=tuple(replace(figure, table=figure.table.filled()) for figure in figures),
        notices=(ON_CPUS,) if on_cpus else (),
    )
