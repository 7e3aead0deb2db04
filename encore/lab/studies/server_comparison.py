"""Comparison of servers, or of server settings, by suite runs: tables, figures and the page.

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

from encore.errors import EncoreError, unknown_name
from encore.lab.scaling.cost_model import fit_strong_scaling, strong_scaling_point
from encore.lab.scaling.printed_tables import DELL
from encore.lab.studies import roofline
from encore.lab.studies.topology import (
    Machine,
    allreduce_table,
    collectives_table,
    load_machine,
    matrix,
    pairs_table,
    peer_table,
    picture,
    speeds_figure,
)
from encore.machine.links import from_json
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
from encore.results.table import Cell, Table, compact, grouped

BASE_FAMILY = "P100"  # base accelerator of the study, as in the first MLPerf round
PCIE, NVLINK = "PCIe", "NVLink"
SINGLE = ("fp32",)
LIMITS = (("a day", 1440.0), ("four hours", 240.0), ("two hours", 120.0))  # minutes that the study asks for
MOST_GPUS = 4096


@dataclass(frozen=True, kw_only=True)
class ServerRun:
    server: str
    side: RunSet
    # The system is the server name; the label also has the settings that distinguish runs on this server.
    measured: Measurement
    links: str = ""  # PCIe or NVLink between GPUs; empty if unknown or fewer than two GPUs

    @property
    def settings_key(self) -> tuple[object, ...]:
        """Settings that must be equal when only servers are compared."""
        run = self.measured
        return (run.benchmark, run.framework, run.gpus, run.precision, run.batch)


def load_runs(arguments: Sequence[str], links: Mapping[str, str] = {}) -> list[ServerRun]:
    """Return every set below the folders ``NAME=FOLDER`` or ``FOLDER``; ``links``: NVLink or PCIe by server or host."""
    runs = []
    for text in arguments:
        name, _, path = text.partition("=") if "=" in text and not Path(text).exists() else ("", "", text)
        if not Path(path).exists():
            raise EncoreError(f"{path} does not exist", expected="RUN or NAME=RUN", hint="name a run folder")
        for run in load_run_sets(path):
            measured, host = measurement_of(run), run.settings.get("node.hostname")
            server = name or (f"{host}, {measured.system}" if host else measured.system)
            # Logs of the first rounds lack the batch: use the global batch of the run configuration.
            batch_size, ranks = run.settings.get("configuration.batch_size"), run.ranks
            batch = measured.batch or (float(batch_size) * ranks if isinstance(batch_size, int) and ranks else None)
            measured = replace(measured, label=server, system=server, batch=batch)
            kind = links.get(server) or links.get(str(host)) or _link_kind(run)
            runs.append(ServerRun(server=server, side=run, measured=measured, links=kind))
    return _label_runs(runs)


def _label_runs(runs: Sequence[ServerRun]) -> list[ServerRun]:
    # Add framework, precision and batch to the label if a server has multiple runs.
    by_server = grouped(runs, lambda run: (run.server, run.measured.benchmark))
    labelled = []
    for run in runs:
        settings, same = _setting(run), by_server[run.server, run.measured.benchmark]
        # With strong scaling, the batch per GPU follows from the GPU count.
        among = (same, same, [other for other in same if other.measured.gpus == run.measured.gpus])
        label_parts = [
            settings[index] for index in range(3) if len({_setting(other)[index] for other in among[index]}) > 1
        ]
        labelled.append(
            replace(run, measured=replace(run.measured, label=", ".join([run.server, *filter(None, label_parts)])))
        )
    return labelled


def _setting(run: ServerRun) -> tuple[str, str, str]:
    # Framework, precision and batch per GPU.
    measured = run.measured
    batch = f"batch {measured.batch / measured.gpus:,.0f} a GPU" if measured.batch and measured.gpus else ""
    return measured.framework or "", measured.precision, batch


def _link_kind(run: RunSet) -> str:
    # The links that the run found, a system description names, or the form of the accelerator shows.
    if (run.ranks or 0) < 2 or run.is_cpu:
        return ""
    links = run.passport.get("links")
    if isinstance(links, dict) and links.get("kind"):
        return str(links["kind"])
    text = f"{run.hardware.accelerator_interconnect or ''} {run.hardware.accelerator or ''}".lower()
    words = {"nvlink": NVLINK, "nvswitch": NVLINK, "sxm": NVLINK, "pci": PCIE}
    return next((kind for word, kind in words.items() if word in text), "")


def base_of(runs: Sequence[ServerRun], requested: str | None) -> str:
    """Return the base: the requested server, otherwise a server with a P100, otherwise the first."""
    names = dict.fromkeys(run.server for run in runs)
    if requested is not None and requested not in names:
        raise unknown_name("base", requested, names)
    if requested is not None:
        return requested
    cards = (run for run in runs if family(run.side.hardware.accelerator) == BASE_FAMILY)
    return next(cards, runs[0]).server


def tables(runs: Sequence[ServerRun], base: str | None = None) -> list[Table]:
    """Return all tables with rows for these runs; EncoreError if none."""
    if not runs:
        raise EncoreError("no run was found", expected="run folders from one or more servers", hint="name RUN...")
    measured = [run.measured for run in runs]
    candidates = [
        time_to_target(runs),
        relative_scores(runs, base),
        scaling_efficiency(measured),
        by_links(runs),
        by_precision(runs),
        first_epochs(runs),
        by_framework(runs),
        by_batch(runs),
    ]
    return [table for table in candidates if table.rows]


def relative_scores(runs: Sequence[ServerRun], base: str | None = None) -> Table:
    """Return scores relative to the base with its fewest GPUs per benchmark; no rows without a base.

    With multiple base runs on this GPU count, the first counts.
    """
    base_name = base_of(runs, base)
    # The last of multiple runs with the same name counts.
    ordered = sorted(
        (run.measured for run in reversed(runs)), key=lambda measured: (measured.benchmark, -(measured.gpus or 0))
    )
    if not any(measured.minutes and measured.system == base_name for measured in ordered):
        return Table(title=f"Score relative to {base_name}", columns=(), rows=())
    return relative_to(ordered, base_name)


def time_to_target(runs: Sequence[ServerRun]) -> Table:
    rows = []
    for run in sorted(runs, key=lambda run: (run.measured.benchmark, run.server, run.measured.gpus or 0)):
        measured, run_set = run.measured, run.side
        span = interval(run_set.score) if run_set.score else None
        rows.append((
            measured.benchmark, run.server, measured.framework, measured.gpus,
            run_set.ranks if run_set.is_cpu else None, run.links, measured.precision, compact(measured.batch),
            measured.minutes, *(span or (None, None)), measured.minutes_per_epoch, measured.epochs,
            f"{run_set.converged} of {run_set.runs}",
        ))  # fmt: skip
    columns = (
        "benchmark", "server", "framework", "GPUs", "CPU ranks", "links", "precision", "batch", "minutes",
        f"{percent(LEVEL)} from", f"{percent(LEVEL)} to", "minutes per epoch", "epochs", "reached",
    )  # fmt: skip
    return Table(title="Time to the target", columns=columns, rows=tuple(rows), note="Batch: of all GPUs together.")


def by_links(runs: Sequence[ServerRun]) -> Table:
    """Return PCIe and NVLink runs that are otherwise equal except for the server."""
    return Table(
        title="PCIe against NVLink",
        columns=("benchmark", "GPUs", "PCIe", "NVLink", "PCIe min", "NVLink min", "speed-up %", "saved min"),
        rows=tuple(
            (
                pcie.measured.benchmark, pcie.measured.gpus, pcie.server, nvlink.server, slow, fast,
                (slow / fast - 1) * 100, slow - fast,
            )
            for same in grouped(runs, lambda run: run.settings_key).values()
            for pcie, nvlink, slow, fast in _pairs(same, lambda run: run.links == PCIE, lambda run: run.links == NVLINK)
        ),
    )  # fmt: skip


def by_precision(runs: Sequence[ServerRun]) -> Table:
    """Return single and mixed precision: percent and minutes of the time to target.

    Uses equal batches if a server has them: mixed precision has room for larger batches.
    """
    rows: list[tuple[Cell, ...]] = []
    for same in grouped(runs, lambda run: (run.server, *run.settings_key[:3])).values():
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
                compact(single.measured.batch), compact(mixed.measured.batch),
            )
            for single, mixed, slow, fast in equal or pairs
        ]  # fmt: skip
    columns = (
        "benchmark", "server", "GPUs", "mixed", "fp32 min", "mixed min", "speed-up %", "saved min", "saved %",
        "fp32 batch", "mixed batch",
    )  # fmt: skip
    return Table(title="Single against mixed precision", columns=columns, rows=tuple(rows))


def first_epochs(runs: Sequence[ServerRun]) -> Table:
    """Return the times for one and two epochs: a single-epoch run does not show the later ones."""
    epochs = [(run.measured, run.side.phases.get("first_epoch_s"), run.side.phases.get("epoch_s")) for run in runs]
    return Table(
        title="One against two epochs",
        columns=("benchmark", "server", "GPUs", "one epoch min", "two epochs min", "two over one"),
        rows=tuple(
            (
                measured.benchmark,
                measured.label,
                measured.gpus,
                first / 60,
                (first + later) / 60,
                (first + later) / first,
            )
            for measured, first, later in epochs
            if first and later
        ),
        note="Without evaluations; medians over the runs. The second epoch is the median of all later ones. Below 2 "
        "the first epoch is slower due to disk reads and warm-up: a single epoch is biased by this ratio.",
    )


def by_framework(runs: Sequence[ServerRun]) -> Table:
    """Return frameworks on the same server: epochs, time per epoch, time to target."""
    same = grouped(runs, lambda run: (run.server, run.measured.benchmark, run.measured.gpus)).values()
    return Table(
        title="Frameworks against each other",
        columns=(
            "benchmark", "server", "GPUs", "framework", "precision", "epochs", "minutes per epoch", "minutes",
            "times as fast",
        ),
        rows=tuple(
            (
                measured.benchmark, measured.system, measured.gpus, measured.framework, measured.precision,
                measured.epochs, measured.minutes_per_epoch, minutes, max(slow for _, slow in pairs) / minutes,
            )
            for pairs in (_variants(group, lambda measured: measured.framework) for group in same)
            for measured, minutes in pairs
        ),
    )  # fmt: skip


def by_batch(runs: Sequence[ServerRun]) -> Table:
    """Return the effect of larger batches on epochs and minutes, all else being equal."""
    same = grouped(runs, lambda run: (run.server, *run.settings_key[:4])).values()
    by_size = (
        sorted(_variants(group, lambda measured: measured.batch), key=lambda pair: pair[0].batch or 0.0)
        for group in same
    )
    return Table(
        title="Batch variants",
        columns=(
            "benchmark", "server", "GPUs", "batch", "epochs", "minutes per epoch", "minutes",
            "speed-up over the smallest",
        ),
        rows=tuple(
            (
                measured.benchmark, measured.system, measured.gpus, compact(measured.batch), measured.epochs,
                measured.minutes_per_epoch, minutes, pairs[0][1] / minutes,
            )
            for pairs in by_size
            for measured, minutes in pairs
        ),
    )  # fmt: skip


def _variants(runs: Iterable[ServerRun], value: Callable[[Measurement], object]) -> list[tuple[Measurement, float]]:
    # Finished runs with their minutes, if they differ in the value; otherwise none.
    finished = [(run.measured, run.measured.minutes) for run in runs if run.measured.minutes and value(run.measured)]
    return finished if len({value(measured) for measured, _ in finished}) > 1 else []


def _pairs(
    runs: Iterable[ServerRun], first: Callable[[ServerRun], bool], second: Callable[[ServerRun], bool]
) -> list[tuple[ServerRun, ServerRun, float, float]]:
    # Pairs of finished runs (first, second), with their minutes.
    finished = [(run, run.measured.minutes) for run in runs if run.measured.minutes]
    return [
        (first_run, second_run, slow, fast)
        for first_run, slow in finished
        if first(first_run)
        for second_run, fast in finished
        if second(second_run)
    ]


def gpus_needed(runs: Sequence[ServerRun]) -> Table:
    """Return the fewest GPUs, a power of two, per benchmark and server, and the interval of the minutes on them.

    A single measured GPU count gives no model: the measured minutes are compared with the limit.
    """
    finished = [run for run in runs if run.measured.gpus and run.measured.minutes]
    rows: list[tuple[Cell, ...]] = []
    for (benchmark, server), same in sorted(
        grouped(finished, lambda run: (run.measured.benchmark, run.server)).items()
    ):
        points: dict[int, float] = {}
        for gpus, minutes in ((run.measured.gpus or 0, run.measured.minutes or 0.0) for run in same):
            points[gpus] = min(minutes, points.get(gpus, minutes))
        counts = ", ".join(map(str, sorted(points)))
        rows += [(benchmark, server, counts, name, *_fewest_gpus(points, limit)) for name, limit in LIMITS]
    return Table(
        title="GPUs for a day, four hours, two hours",
        columns=(
            "benchmark", "server", "measured on", "within", "GPUs", "minutes", "95 % from", "95 % to",
            "GPUs to be sure", "how",
        ),
        rows=tuple(rows),
        note="GPUs: the fewest, a power of two, with expected minutes within the limit; to be sure: with the "
        "upper bound of the 95 % interval within it. The model assumes the same epochs for all GPU counts: if a "
        "larger batch needs more epochs, more GPUs are needed.",
    )  # fmt: skip


def _fewest_gpus(points: dict[int, float], limit: float) -> tuple[Cell, ...]:
    if len(points) < 2:
        ((gpus, minutes),) = points.items()
        if minutes <= limit:
            return (gpus, minutes, None, None, None, "measured")
        return (None, minutes, None, None, None, "not enough; the model needs a second measured GPU count")
    model = fit_strong_scaling(points)
    counts = [2**power for power in range(MOST_GPUS.bit_length())]
    # Intervals require a search: compute them only if the expected minutes are within the limit.
    likely = [n for n in counts if sum(model.parts(strong_scaling_point(n)).values()) <= limit]
    if not likely:
        return (None, None, None, None, None, f"not with {MOST_GPUS} GPUs")
    fewest, sure = likely[0], next((n for n in likely if model.predict(strong_scaling_point(n)).high <= limit), None)
    prediction = model.predict(strong_scaling_point(fewest))
    how = "model, measured there" if fewest in points else "model"
    return (fewest, prediction.value, prediction.low, prediction.high, sure, how)


# -- machine load while a run's clock was running, from the telemetry of its run folder --------------------------

_KIB_PER_MIB = 1024.0
# Columns and telemetry fields: of the machine, then per GPU; counters are cumulative.
_OF_MACHINE = {"CPU %": "cpu_percent", "memory MiB": "memory_used_mib"}
_OF_GPUS = {
    "GPU %": "use_percent", "GPU memory MiB": "memory_mib", "GPU watts": "power_watts",
    "PCIe sent": "pcie_sent_kib_s", "PCIe received": "pcie_received_kib_s",
}  # fmt: skip
_COUNTERS = {"NVLink sent": "nvlink_sent_kib", "NVLink received": "nvlink_received_kib"}
_COLUMNS = ("minutes", *_OF_MACHINE, "GPUs", *_OF_GPUS, *_COUNTERS)


def mean_utilisation(logs: Sequence[RunLog]) -> dict[str, Cell]:
    """Return means over the timed parts of the runs, by column; empty without readings in it."""
    nodes = [by_node(log) for log in logs]
    parts = [part for parts_by_node in nodes for part in parts_by_node.values()]
    readings = [reading for part in parts for reading in part]
    if not readings:
        return {}
    cards = [card for reading in readings for card in reading.get("gpus", ())]
    means = {column: _mean(reading.get(name) for reading in readings) for column, name in _OF_MACHINE.items()}
    for column, name in _OF_GPUS.items():
        mean = _mean(card.get(name) for card in cards)
        means[column] = mean / _KIB_PER_MIB if mean is not None and name.endswith("_kib_s") else mean
    seconds = sum(
        (log.elapsed_minutes or 0.0) * 60 for log, parts_by_node in zip(logs, nodes, strict=True) if parts_by_node
    )
    return {
        "minutes": seconds / 60,
        "GPUs": max(
            sum(max(len(r.get("gpus", ())) for r in part) for part in parts_by_node.values())
            for parts_by_node in nodes
            if parts_by_node
        ),
        **means,
        **{column: _rate(parts, name) for column, name in _COUNTERS.items()},
    }


def utilisation_table(runs: Iterable[ServerRun]) -> Table:
    utilisations = [(run.measured, mean_utilisation(run.side.logs)) for run in runs]
    return Table(
        title="Utilisation over the timed part",
        columns=("server", "benchmark", *_COLUMNS),
        formats=dict.fromkeys((*_OF_MACHINE, *_OF_GPUS), ".1f"),
        rows=tuple(
            (measured.label, measured.benchmark, *(means[column] for column in _COLUMNS))
            for measured, means in utilisations
            if means
        ),
        note="Means of the samples between run_start and run_stop (one per second), over all GPUs; traffic "
        "in MiB/s per GPU. GPU %: fraction of the time with a running kernel, not the occupancy.",
    )


def _mean(values: Iterable[Any]) -> float | None:
    numbers = [float(value) for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None


def _rate(parts: Sequence[list[dict[str, Any]]], name: str) -> float | None:
    # MiB/s per GPU from a cumulative KiB counter: first and last reading per part.
    rates = []
    for readings in parts:
        for gpu in range(min((len(reading.get("gpus", ())) for reading in readings), default=0)):
            points = [(r["time"], r["gpus"][gpu].get(name)) for r in readings if r["gpus"][gpu].get(name) is not None]
            if len(points) > 1 and points[-1][0] > points[0][0]:
                rates.append((points[-1][1] - points[0][1]) / _KIB_PER_MIB / (points[-1][0] - points[0][0]))
    return _mean(rates)


# -- printed figures of the study, and the pages -----------------------------------------------------------------

# Study tables with a corresponding table here, in study order.
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
    "Measured on CPUs: ranks replace GPUs, Gloo replaces NCCL. These figures are for this machine and do not "
    "reproduce published figures."
)


def published_tables() -> list[Table]:
    columns = ("benchmark", "system", "GPUs", "batch", "precision", "figure", "printed", "unit", "context")
    by_place = grouped(
        (dell_figure for dell_figure in load_figures() if dell_figure.source == DELL),
        lambda dell_figure: dell_figure.place,
    )
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
                for figure in by_place[location]
            ),
            note=f"{DELL}, {location}.",
        )
        for location, title in PLACES
        if location in by_place
    ]  # fmt: skip


def servers_report(
    runs: Sequence[str], *, base: str | None = None, machines: Sequence[Path] = (), rooflines: Sequence[Path] = ()
) -> Report:
    """Return the complete report on runs, machines and rooflines."""
    described = [load_machine(path) for path in machines]
    loaded_runs = load_runs(runs, {machine.server.name: machine.server.kind for machine in described})
    for run in loaded_runs:
        # Runs of earlier versions of Encore, or of other programs, lack these fields.
        with suppress(KeyError, TypeError, AttributeError):
            server = from_json(run.side.passport["links"])
            if server.name not in {machine.server.name for machine in described}:
                described.append(Machine(server))
    measured = [roofline.load(folder) for folder in rooflines]
    parts = [machine_report(machine) for machine in described] + [roofline_report(part) for part in measured]
    compared = [*tables(loaded_runs, base), gpus_needed(loaded_runs), utilisation_table(loaded_runs)]
    figures = [*_figures(loaded_runs, base), *(figure for part in parts for figure in part.figures)]
    # Keys may repeat between machines, but are also file names.
    keys = Counter[str]()
    for number, figure in enumerate(figures):
        keys[figure.key] += 1
        if keys[figure.key] > 1:
            figures[number] = replace(figure, key=f"{figure.key}-{keys[figure.key]}")
    on_cpus = any(run.side.is_cpu for run in loaded_runs) or any(part.notices for part in parts)
    all_tables = [*compared, *(table for part in parts for table in part.tables)]
    return replace(page("Servers compared", all_tables, figures, on_cpus=on_cpus), studies=tuple(published_tables()))


def _figures(runs: Sequence[ServerRun], base: str | None) -> list[Figure]:
    measured = [run.measured for run in runs]
    labelled = [
        replace(measured_run, label=f"{measured_run.label}, {measured_run.gpus or '?'}") for measured_run in measured
    ]
    lines = [
        replace(
            measured_run,
            benchmark=", ".join(filter(None, (measured_run.benchmark, measured_run.system, measured_run.precision))),
        )
        for measured_run in measured
    ]
    figures: list[Figure | None] = [
        *(figure for name in dict.fromkeys(m.benchmark for m in labelled) for figure in quality_curves(labelled, name)),
        *time_over_gpus(lines),
        efficiency(measured),
        bars("relative", relative_scores(runs, base), (0, 1, 2), 4, "times as fast as the base"),
        bars("links-speed-up", by_links(runs), label=(0, 1, 3), value=6, axis="speed-up of NVLink, %"),
        bars("precision-speed-up", by_precision(runs), label=(0, 1, 3), value=6, axis="speed-up, %"),
        bars("frameworks", by_framework(runs), label=(0, 1, 3), value=8, axis="times as fast as the slowest"),
        bars("batches", by_batch(runs), label=(0, 1, 3), value=7, axis="speed-up over the smallest batch"),
    ]
    return [figure for figure in figures if figure is not None]


def machine_report(machine: Machine) -> Report:
    links, figures = [matrix(machine.server)] if machine.server.gpus else [], [picture(machine.server)]
    speeds, title = speeds_figure(machine), f"The machine {machine.server.name}"
    collectives = machine.speeds.get("collectives", ())
    rates = [(entry["bytes"], entry["rate"]) for entry in collectives if entry["kind"] == "all-reduce"]
    rates += [(size, rate) for size, rate in machine.by_tool.get("all-reduce", ())]
    sums = [allreduce_table(machine.speeds["ranks"], max(rates)[1])] if rates else []
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
