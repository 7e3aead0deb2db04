"""Servers, or settings of one, compared with each other by runs of the suite: the tables of the study.

from encore.lab.studies.servers import load_runs, tables
for table in tables(load_runs(["a=results/a", "b=results/b"]), base=None):
    print(table.as_markdown())
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from encore.errors import EncoreError
from encore.names import unknown
from encore.results.compare.sides import Side, load_sides
from encore.results.published.systems import family
from encore.results.report.measurements import Measurement, of_side, relative_to, scaling_efficiency
from encore.results.statistics import LEVEL, interval
from encore.results.table import Cell, Table, grouped, whole
from encore.results.words import percent

BASE_FAMILY = "P100"  # the accelerator that the study takes as the base, as the first round of MLPerf did
PCIE, NVLINK = "PCIe", "NVLink"
SINGLE = ("fp32",)


@dataclass(frozen=True, kw_only=True)
class ServerRun:
    server: str
    side: Side
    # Its system is the server's name; its label also has what sets this one apart from others on this server.
    measured: Measurement
    links: str = ""  # PCIe or NVLink between its GPUs; empty where that is not known, or there are fewer than two

    @property
    def where(self) -> tuple[object, ...]:
        """What must be equal where two servers, and nothing else, are compared with each other."""
        each = self.measured
        return (each.benchmark, each.framework, each.gpus, each.precision, each.batch)


def load_runs(named: Sequence[str], links: Mapping[str, str] | None = None) -> list[ServerRun]:
    """Return every set below the folders ``NAME=FOLDER`` or ``FOLDER``; ``links``: NVLink or PCIe by server or host."""
    found = []
    for text in named:
        name, _, path = text.partition("=") if "=" in text and not Path(text).exists() else ("", "", text)
        if not Path(path).exists():
            raise EncoreError(f"there is no {path}", expected="RUN or NAME=RUN", hint="name a run folder")
        for side in load_sides(path):
            measured = of_side(side)
            server = name or _name(side, measured)
            batch = measured.batch or _configured_batch(side)
            named_so = replace(measured, label=server, system=server, batch=batch)
            kind = _given(links or {}, server, side) or _links_of(side)
            found.append(ServerRun(server=server, side=side, measured=named_so, links=kind))
    return _distinct(found)


def _configured_batch(side: Side) -> float | None:
    # The batch of all ranks by the run's configuration: logs of the first rounds have none.
    batch = side.settings.get("configuration.batch_size")
    return float(batch) * side.ranks if isinstance(batch, int) and side.ranks else None


def _distinct(runs: Sequence[ServerRun]) -> list[ServerRun]:
    # The runs with framework, precision and batch in the label where a server has several of them.
    by_server = grouped(runs, lambda run: (run.server, run.measured.benchmark))
    found = []
    for run in runs:
        own, same = _setting(run), by_server[run.server, run.measured.benchmark]
        # Where a training is scaled strongly, the batch of a GPU follows from their number.
        as_many = [other for other in same if other.measured.gpus == run.measured.gpus]
        among = (same, same, as_many)
        words = [own[at] for at in range(3) if len({_setting(other)[at] for other in among[at]}) > 1]
        found.append(replace(run, measured=replace(run.measured, label=", ".join([run.server, *filter(None, words)]))))
    return found


def _setting(run: ServerRun) -> tuple[str, str, str]:
    each = run.measured
    batch = f"batch {each.batch / each.gpus:,.0f} a GPU" if each.batch and each.gpus else ""
    return each.framework or "", each.precision, batch


def _name(side: Side, measured: Measurement) -> str:
    # The machine's name and accelerator of a run that was given without a name.
    host = side.settings.get("node.hostname")
    return f"{host}, {measured.system}" if host else measured.system


def _given(links: Mapping[str, str], server: str, side: Side) -> str:
    return links.get(server) or links.get(str(side.settings.get("node.hostname")), "")


def _links_of(side: Side) -> str:
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
    """Return minutes to the target of each set, with the interval of its mean."""
    rows = []
    for run in sorted(runs, key=lambda run: (run.measured.benchmark, run.server, run.measured.gpus or 0)):
        each, side = run.measured, run.side
        span = interval(side.score) if side.score else None
        ranks = side.ranks if side.is_cpu else None
        rows.append(
            (
                each.benchmark, run.server, each.framework, each.gpus, ranks, run.links,
                each.precision, whole(each.batch), each.minutes, span[0] if span else None, span[1] if span else None,
                each.minutes_per_epoch,
                each.epochs, f"{side.converged} of {side.runs}",
            )
        )  # fmt: skip
    bounds = (f"{percent(LEVEL)} from", f"{percent(LEVEL)} to")
    columns = (
        "benchmark", "server", "framework", "GPUs", "CPU ranks", "links", "precision", "batch", "minutes", *bounds,
        "minutes per epoch", "epochs", "reached",
    )  # fmt: skip
    note = "Batch: of all GPUs together."
    return Table(title="Time to the target", columns=columns, rows=tuple(rows), note=note)


def by_links(runs: Sequence[ServerRun]) -> Table:
    rows = tuple(
        (
            pcie.measured.benchmark, pcie.measured.gpus, pcie.server, nvlink.server, slow, fast,
            (slow / fast - 1) * 100, slow - fast,
        )
        for same in grouped(runs, lambda run: run.where).values()
        for pcie, nvlink, slow, fast in _pairs(same, lambda run: run.links == PCIE, lambda run: run.links == NVLINK)
    )  # fmt: skip
    columns = ("benchmark", "GPUs", "PCIe", "NVLink", "PCIe min", "NVLink min", "speed-up %", "saved min")
    return Table(title="PCIe against NVLink", columns=columns, rows=rows)


def by_precision(runs: Sequence[ServerRun]) -> Table:
    """Return single against mixed precision: percent and minutes of the time to the target.

    Of equal batches, where a server has such: mixed precision has room for larger ones.
    """
    rows: list[tuple[Cell, ...]] = []
    for same in grouped(runs, lambda run: (run.server, *run.where[:3])).values():
        pairs = list(_pairs(same, _is_single, lambda run: bool(run.measured.precision) and not _is_single(run)))
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
    rows: list[tuple[Cell, ...]] = []
    for same in grouped(runs, lambda run: (run.server, run.measured.benchmark, run.measured.gpus)).values():
        known = _several(same, lambda each: each.framework)
        slowest = max((minutes for _, minutes in known), default=0.0)
        rows += [
            (
                each.benchmark, each.system, each.gpus, each.framework, each.precision, each.epochs,
                each.minutes_per_epoch, minutes, slowest / minutes,
            )
            for each, minutes in known
        ]  # fmt: skip
    columns = (
        "benchmark", "server", "GPUs", "framework", "precision", "epochs", "minutes per epoch", "minutes",
        "times as fast",
    )  # fmt: skip
    return Table(title="Frameworks against each other", columns=columns, rows=tuple(rows))


def by_batch(runs: Sequence[ServerRun]) -> Table:
    """Return what a larger batch does to epochs and minutes, all else being equal."""
    rows: list[tuple[Cell, ...]] = []
    for same in grouped(runs, lambda run: (run.server, *run.where[:4])).values():
        known = sorted(_several(same, lambda each: each.batch), key=lambda pair: pair[0].batch or 0.0)
        rows += [
            (
                each.benchmark, each.system, each.gpus, whole(each.batch), each.epochs, each.minutes_per_epoch,
                minutes, known[0][1] / minutes,
            )
            for each, minutes in known
        ]  # fmt: skip
    columns = (
        "benchmark", "server", "GPUs", "batch", "epochs", "minutes per epoch", "minutes", "speed-up over the smallest",
    )  # fmt: skip
    return Table(title="Batch variants", columns=columns, rows=tuple(rows))


def _several(runs: Iterable[ServerRun], value: Callable[[Measurement], object]) -> list[tuple[Measurement, float]]:
    # The runs that ended with their minutes, where they differ in a value; none where they do not.
    known = [(run.measured, run.measured.minutes) for run in runs if run.measured.minutes and value(run.measured)]
    return known if len({value(each) for each, _ in known}) > 1 else []


def _is_single(run: ServerRun) -> bool:
    return run.measured.precision in SINGLE


def _pairs(
    runs: Iterable[ServerRun], first: Callable[[ServerRun], bool], second: Callable[[ServerRun], bool]
) -> Iterator[tuple[ServerRun, ServerRun, float, float]]:
    # Yield each pair of a first and a second run that both ended, with their minutes.
    known = [(run, run.measured.minutes) for run in runs if run.measured.minutes]
    yield from ((one, other, slow, fast) for one, slow in known if first(one) for other, fast in known if second(other))
