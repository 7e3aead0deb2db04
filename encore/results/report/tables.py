"""The tables that studies of MLPerf are made of, from any measurements.

from encore.results.report.tables import speed_up_table
for row in speed_up_table(of_study("microway-dgx1-scaling")).rows:
    print(row)
"""

import shlex
from collections.abc import Sequence
from os.path import commonpath

from encore.errors import EncoreError
from encore.names import unknown
from encore.results.published.published import load_published
from encore.results.report.measurements import Measurement
from encore.results.table import Cell, Table, grouped, whole


def synopsis(measurements: Sequence[Measurement]) -> list[Table]:
    """Return one table per benchmark: GPUs, batch, minutes per epoch, epochs, precision."""
    return [
        Table(
            title=f"Synopsis of {benchmark}",
            columns=("system", "GPUs", "batch", "minutes per epoch", "epochs", "samples", "minutes", "precision"),
            rows=tuple(
                (
                    each.label if each.label.count("/") else each.system,
                    each.gpus,
                    whole(each.batch),
                    each.minutes_per_epoch,
                    whole(each.epochs),
                    whole(each.samples),
                    each.minutes,
                    each.precision,
                )
                for each in _by_gpus(of_benchmark)
            ),
        ).filled()
        for benchmark, of_benchmark in grouped(measurements, lambda each: each.benchmark).items()
    ]


def speed_up_table(measurements: Sequence[Measurement]) -> Table:
    """Return how many times faster than on the fewest GPUs, by the time to the target."""
    return Table(
        title="Speed-up by number of GPUs",
        columns=("benchmark", "system", "from GPUs", "to GPUs", "speed-up"),
        rows=tuple(
            (
                each.benchmark,
                _without_nodes(each),
                base.gpus,
                each.gpus,
                (base.minutes or 0) / (each.minutes or 1),
            )
            for base, each in _scaled(measurements)
        ),
        note="Total training time on the fewest GPUs over the one on several.",
    )


def scaling_efficiency(measurements: Sequence[Measurement]) -> Table:
    """Return speed-up over the growth in GPUs: 1 is linear."""
    return Table(
        title="Scaling efficiency",
        columns=("benchmark", "system", "from GPUs", "to GPUs", "efficiency", "efficiency per epoch"),
        rows=tuple(
            (
                each.benchmark,
                _without_nodes(each),
                base.gpus,
                each.gpus,
                (base.minutes or 0) / (each.minutes or 1) / _growth(base, each),
                base.minutes_per_epoch / each.minutes_per_epoch / _growth(base, each)
                if base.minutes_per_epoch and each.minutes_per_epoch
                else None,
            )
            for base, each in _scaled(measurements)
        ),
        note="By the time to the target, and by the time of an epoch, which leaves convergence out.",
    )


# What to say of a baseline that is not in the tables: how to add it where it was published.
def _unknown_baseline(measurements: Sequence[Measurement], baseline: str) -> EncoreError:
    labels = sorted({each.label.lstrip("/") for each in measurements})
    error = unknown("baseline", baseline, labels)
    benchmarks = {each.benchmark for each in measurements}
    cells = [cell for cell in load_published() if cell.score_minutes and cell.benchmark in benchmarks]
    exact = [cell.name for cell in cells if baseline.lower() in (cell.name.lower(), cell.system.lower())]
    near = exact or [cell.name for cell in cells if baseline.lower() in cell.name.lower()]
    if near and (exact or not error.hint):
        name = max(near, key=lambda each: len(commonpath([each, *labels])))
        part = commonpath([name, *labels])
        part = part if "/" in part else name
        error.hint = f"add the published system: --published {shlex.quote(part)} --baseline {shlex.quote(name)}"
    return error


def relative_to(measurements: Sequence[Measurement], baseline: str) -> Table:
    """Score of each system relative to the baseline's: above 1 is faster.

    ``baseline`` is a measurement's label or system, in any case.
    """
    wanted = baseline.lower()
    bases = {
        each.benchmark: each
        for each in measurements
        if wanted in (each.label.lower(), each.system.lower(), *each.label.lower().split("/")) and each.minutes
    }
    if not bases:
        raise _unknown_baseline(measurements, baseline)
    return Table(
        title=f"Score relative to {baseline}",
        columns=("benchmark", "system", "GPUs", "minutes", "times as fast"),
        rows=tuple(
            (each.benchmark, each.label, each.gpus, each.minutes, base.minutes / each.minutes)
            for each in measurements
            if each.minutes and (base := bases.get(each.benchmark)) is not None and base.minutes
        ),
    )


def by_release(measurements: Sequence[Measurement]) -> Table:
    """Return speed-up by container release, on the same system, against the oldest release."""
    rows: list[tuple[Cell, ...]] = []
    known = [each for each in measurements if each.release and each.minutes]
    for same in grouped(known, lambda each: (each.benchmark, each.system, each.gpus, each.precision)).values():
        ordered = sorted(same, key=lambda each: each.release or "")
        if len({each.release for each in ordered}) < 2:
            continue
        for each in ordered:
            per_epoch = ordered[0].minutes_per_epoch and each.minutes_per_epoch
            rows.append(
                (
                    each.benchmark,
                    f"{each.gpus or '?'} x {each.system}",
                    each.release,
                    each.minutes,
                    (ordered[0].minutes or 0) / (each.minutes or 1),
                    (ordered[0].minutes_per_epoch or 0) / each.minutes_per_epoch
                    if per_epoch and each.minutes_per_epoch
                    else None,
                )
            )
    return Table(
        title="Speed-up by container release",
        columns=("benchmark", "system", "release", "minutes", "speed-up", "speed-up per epoch"),
        rows=tuple(rows),
        note="Rounds differ in targets and hyperparameters as well; the speed-up of an epoch leaves both out.",
    )


def by_precision(measurements: Sequence[Measurement]) -> Table:
    """Return speed-up of each precision against the slowest one, on the same system and GPUs."""
    rows: list[tuple[Cell, ...]] = []
    known = [each for each in measurements if each.precision and each.minutes_per_epoch]
    for same in grouped(known, lambda each: (each.benchmark, each.system, each.gpus, each.framework)).values():
        slowest = max(same, key=lambda each: each.minutes_per_epoch or 0.0)
        if len({each.precision for each in same}) < 2:
            continue
        rows += [
            (
                each.benchmark,
                f"{each.gpus or '?'} x {each.system}",
                each.precision,
                each.minutes_per_epoch,
                (slowest.minutes_per_epoch or 0.0) / (each.minutes_per_epoch or 1.0),
                slowest.precision,
            )
            for each in same
        ]
    return Table(
        title="Precision against precision",
        columns=("benchmark", "system", "precision", "minutes per epoch", "speed-up", "against"),
        rows=tuple(rows),
    )


def quality_table(measurements: Sequence[Measurement], name: str, over: str) -> Table:
    """Return every evaluation of every run by the quality called ``name`` over one unit: what its plot shows."""
    found = [
        (each, number, curve)
        for each in measurements
        for number, curve in enumerate(curve for curve in each.curves if (curve.name, curve.over) == (name, over))
    ]
    quality = found[0][2].quality if found else "quality"
    return Table(
        title=f"{quality[0].upper()}{quality[1:]} over {over}",
        columns=("benchmark", "system", "run", over, quality),
        rows=tuple(
            (each.benchmark, each.label, number, place, value)
            for each, number, curve in found
            for place, value in curve.points
        ),
    )


def all_tables(measurements: Sequence[Measurement], baseline: str | None = None) -> list[Table]:
    """Return every table that these measurements fill; EncoreError where there is nothing to tabulate."""
    if not measurements:
        raise EncoreError("no measurement to make tables of", hint="name a run, or a study with --study")
    tables = [
        *synopsis(measurements),
        speed_up_table(measurements),
        scaling_efficiency(measurements),
        by_release(measurements),
        by_precision(measurements),
    ]
    if baseline is not None:
        tables.append(relative_to(measurements, baseline))
    return [table for table in tables if table.rows]


def _growth(base: Measurement, each: Measurement) -> float:
    return (each.gpus or 1) / (base.gpus or 1)


# Each measurement with the one on the fewest GPUs of the same kind, of several one of the same batch.
def _scaled(measurements: Sequence[Measurement]) -> list[tuple[Measurement, Measurement]]:
    known = [each for each in measurements if each.gpus and each.minutes]
    pairs = []
    for same in grouped(known, _kind).values():
        ordered = _by_gpus(same)
        bases = [each for each in ordered if each.gpus == ordered[0].gpus]
        pairs += [(_base_of(each, bases), each) for each in ordered[len(bases) :]]
    return pairs


# Base of the same batch, all together or of each GPU; else the fastest.
def _base_of(each: Measurement, bases: Sequence[Measurement]) -> Measurement:
    as_large = [b for b in bases if b.batch and each.batch and b.batch in (each.batch, each.batch / _growth(b, each))]
    return (as_large or list(bases))[0]


# System's name without the number of nodes, which must not part what is to be compared.
def _without_nodes(each: Measurement) -> str:
    return each.system.rpartition("nodes, ")[2]


def _kind(each: Measurement) -> tuple[object, ...]:
    return (each.benchmark, _without_nodes(each), each.framework, each.precision, each.release)


def _by_gpus(measurements: Sequence[Measurement]) -> list[Measurement]:
    return sorted(measurements, key=lambda each: (each.gpus or 0, each.minutes or 0.0))
