"""Measured trainings in one form, whether they come from logs, from a study or from a round.

from encore.results.compare.run_set import load_run_sets
from encore.results.report.measurements import measurement_of, study_measurements
rows = [measurement_of(run_set) for run_set in load_run_sets("results")] + study_measurements("microway-dgx1-scaling")
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from posixpath import commonpath

from encore.errors import EncoreError, unknown_name
from encore.results.compare.run_set import RunSet
from encore.results.format import count_of
from encore.results.logs.run_log import RunLog, submitter_of
from encore.results.logs.timing import deciding, length_of
from encore.results.published.published import load_figures, load_published
from encore.results.published.systems import cells_at, framework_of, model_of, release_of
from encore.results.table import Table, compact, grouped

_NUMBERED_FROM = 2  # Largest difference between logged and trained epochs


@dataclass(frozen=True)
class Curve:
    """Quality of one run over its logged length; ``name`` distinguishes several metrics."""

    name: str
    points: tuple[tuple[float, float], ...]
    target: float | None
    over: str = "epochs"  # Unit of the points' first number: epochs, samples, steps or samples, or evaluations
    quality: str = "quality"  # Metric, such as top-1 accuracy or log perplexity


@dataclass(frozen=True, kw_only=True)
class Measurement:
    label: str
    benchmark: str
    system: str
    framework: str | None = None
    gpus: int | None = None  # Accelerators; None on CPUs, where ``system`` has the number of ranks
    # Logs: samples per step over all GPUs. Studies may report samples per GPU.
    batch: float | None = None
    minutes_per_epoch: float | None = None
    epochs: float | None = None
    samples: float | None = None  # To the target, where the logs count no epochs
    minutes: float | None = None  # Time to the target
    precision: str = ""
    release: str | None = None  # Container release, such as 20.06
    curves: tuple[Curve, ...] = ()


def title_of(run_set: RunSet) -> str:
    """Return the full name: round, submitter and system if published, else the folder name."""
    if run_set.published is not None:
        return run_set.published.name
    if run_set.passport or run_set.folder is None:
        return run_set.label
    path = [part for part in run_set.folder.absolute().parts if part.lower() not in ("results", run_set.benchmark)]
    cells = cells_at(run_set.folder, run_set.round, run_set.benchmark)
    if cells and cells[0].submitter in path:
        return cells[0].name
    org = submitter_of(run_set.logs)
    names = path[-2:] if org is None else path[-1:]
    return "/".join([*([org] if org and org not in names else []), *names])


def measurement_of(run_set: RunSet) -> Measurement:
    hardware = run_set.hardware
    in_epochs = run_set.length_unit == "epochs"
    accelerator = model_of(hardware.accelerator) or hardware.accelerator or hardware.cpu or "?"
    image = str(run_set.passport.get("image") or "")
    system = f"CPU, {count_of(run_set.ranks, 'rank')}" if run_set.is_cpu and run_set.ranks else accelerator
    return Measurement(
        label=title_of(run_set),
        benchmark=run_set.benchmark or "?",
        system=f"{hardware.nodes} nodes, {system}" if (hardware.nodes or 1) > 1 else system,
        framework=framework_of(hardware.framework, str(run_set.passport.get("implementation") or ""), run_set.label),
        gpus=None if run_set.is_cpu else run_set.ranks,
        batch=run_set.global_batch,
        minutes_per_epoch=run_set.per_length.estimate if run_set.per_length and in_epochs else None,
        epochs=run_set.lengths.estimate if run_set.lengths and in_epochs else None,
        samples=run_set.lengths.estimate if run_set.lengths and run_set.length_unit == "samples" else None,
        minutes=run_set.score.estimate if run_set.score else None,
        precision=str(
            run_set.settings.get("configuration.precision") or run_set.hyperparameters.get("precision") or ""
        ),
        release=release_of(image, hardware.framework, run_set.label),
        curves=tuple(_curves(run_set.logs)),
    )


def study_measurements(key: str) -> list[Measurement]:
    """Return the measurements in the study's tables, one per model, GPU count, batch and precision."""
    cells: dict[tuple[str, str, int | None, int | None, str], dict[str, float]] = {}
    for figure in load_figures():
        if figure.source != key or figure.relation != "=" or not figure.place.startswith("table"):
            continue
        if figure.quantity in ("minutes_per_epoch", "epochs"):
            setup = (figure.model, figure.system, figure.gpus, figure.batch, figure.precision)
            cells.setdefault(setup, {})[figure.quantity] = figure.value
    return [
        Measurement(
            label=f"{model}, {gpus} GPUs",
            benchmark=model,
            system=system,
            gpus=gpus,
            batch=batch,
            minutes_per_epoch=values["minutes_per_epoch"],
            epochs=values["epochs"],
            minutes=values["minutes_per_epoch"] * values["epochs"],
            precision=precision,
        )
        for (model, system, gpus, batch, precision), values in cells.items()
        if len(values) == 2
    ]


# Yield one curve per run and metric, over the length that all logs share, else over evaluation numbers.
def _curves(runs: Sequence[RunLog]) -> Iterator[Curve]:
    positions = [_evaluation_positions(run) for run in runs if run.quality]
    (over, *other_units) = dict.fromkeys(over for over, _ in positions) or ("evaluations",)
    over = "evaluations" if other_units else over
    for run, (_, run_positions) in zip((run for run in runs if run.quality), positions, strict=True):
        numbers = [float(number) for number in range(1, len(run_positions) + 1)]
        targets = {target.name: target for target in run.targets}
        curves: dict[str, list[tuple[float, float]]] = {}
        for position, point in zip(numbers if over == "evaluations" else run_positions, run.quality, strict=True):
            for name, value in point.values.items():
                curves.setdefault(name, []).append((position, value))
        for name, points in curves.items():
            target = targets.get(name)
            quality = target.quality if target else ("quality" if name == "value" else name)
            yield Curve(name, tuple(points), target.value if target else None, over, quality)


# Unit of the run's length and position of every evaluation; ``evaluations`` if some positions are missing.
def _evaluation_positions(run: RunLog) -> tuple[str, list[float]]:
    length, last = length_of(run), deciding(run)
    over = length.unit if length else "evaluations"
    logged = [point.samples if over == "samples" else point.epoch for point in run.quality]
    positions = [position for position in logged if position is not None]
    # End the curve at the run's length: the log may number epochs from 0 or from -1.
    at_end = last.epoch if last is not None else None
    shift = length.value - at_end if length is not None and at_end is not None and over == "epochs" else 0.0
    several = len(set(positions)) > 1 or len(positions) == 1
    if len(positions) < len(logged) or not several or abs(shift) > _NUMBERED_FROM:
        return "evaluations", [0.0] * len(logged)
    return over, [position + shift for position in positions]


# -- tables ---------------------------------------------------------------------------------------------------------


def synopsis(measurements: Sequence[Measurement]) -> list[Table]:
    columns = ("system", "GPUs", "batch", "minutes per epoch", "epochs", "samples", "minutes", "precision")
    return [
        Table(
            title=f"Synopsis of {benchmark}",
            columns=columns,
            rows=tuple(
                (
                    measurement.label if "/" in measurement.label else measurement.system,
                    measurement.gpus,
                    compact(measurement.batch),
                    measurement.minutes_per_epoch,
                    compact(measurement.epochs),
                    compact(measurement.samples),
                    measurement.minutes,
                    measurement.precision,
                )
                for measurement in _sort_by_gpus(of_benchmark)
            ),
        ).filled()
        for benchmark, of_benchmark in grouped(measurements, lambda measurement: measurement.benchmark).items()
    ]


def speed_up_table(measurements: Sequence[Measurement]) -> Table:
    """Return the speed-up over the smallest number of GPUs, by time to the target."""
    return Table(
        title="Speed-up by number of GPUs",
        columns=("benchmark", "system", "from GPUs", "to GPUs", "speed-up"),
        rows=tuple(
            (
                measurement.benchmark,
                _system_type(measurement),
                base.gpus,
                measurement.gpus,
                _ratio(base.minutes, measurement.minutes),
            )
            for base, measurement in _scaling_pairs(measurements)
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
                measurement.benchmark,
                _system_type(measurement),
                base.gpus,
                measurement.gpus,
                _ratio(base.minutes, measurement.minutes, _growth(base, measurement)),
                _ratio(base.minutes_per_epoch, measurement.minutes_per_epoch, _growth(base, measurement)),
            )
            for base, measurement in _scaling_pairs(measurements)
        ),
        note="By the time to the target, and by the time of an epoch, which leaves convergence out.",
    )


def relative_to(measurements: Sequence[Measurement], baseline: str) -> Table:
    """Return the baseline's time divided by the time of every measurement: above 1 is faster.

    ``baseline`` is a label or a system, case-insensitive.
    """
    baseline_name = baseline.lower()
    bases = {
        measurement.benchmark: measurement.minutes
        for measurement in measurements
        if baseline_name
        in (measurement.label.lower(), measurement.system.lower(), *measurement.label.lower().split("/"))
        and measurement.minutes
    }
    if not bases:
        raise _unknown_baseline(measurements, baseline)
    return Table(
        title=f"Score relative to {baseline}",
        columns=("benchmark", "system", "GPUs", "minutes", "times as fast"),
        rows=tuple(
            (
                measurement.benchmark,
                measurement.label,
                measurement.gpus,
                measurement.minutes,
                bases[measurement.benchmark] / measurement.minutes,
            )
            for measurement in measurements
            if measurement.minutes and measurement.benchmark in bases
        ),
    )


# Error for an unknown baseline, with the option that adds a published one.
def _unknown_baseline(measurements: Sequence[Measurement], baseline: str) -> EncoreError:
    labels = sorted({measurement.label.lstrip("/") for measurement in measurements})
    error = unknown_name("baseline", baseline, labels)
    benchmarks = {measurement.benchmark for measurement in measurements}
    cells = [cell for cell in load_published() if cell.score_minutes and cell.benchmark in benchmarks]
    exact = [cell.name for cell in cells if baseline.lower() in (cell.name.lower(), cell.system.lower())]
    near = exact or [cell.name for cell in cells if baseline.lower() in cell.name.lower()]
    if near and (exact or not error.hint):
        name = max(near, key=lambda published: len(commonpath([published, *labels])))
        part = commonpath([name, *labels])
        part = part if "/" in part else name
        error.hint = f"add the published system: --published {shlex.quote(part)} --baseline {shlex.quote(name)}"
    return error


def by_release(measurements: Sequence[Measurement]) -> Table:
    """Return speed-up by container release, on the same system, against the oldest release."""
    with_release = [measurement for measurement in measurements if measurement.release and measurement.minutes]
    same = grouped(
        with_release,
        lambda measurement: (measurement.benchmark, measurement.system, measurement.gpus, measurement.precision),
    ).values()
    by_age = [sorted(group, key=lambda measurement: measurement.release or "") for group in same]
    return Table(
        title="Speed-up by container release",
        columns=("benchmark", "system", "release", "minutes", "speed-up", "speed-up per epoch"),
        rows=tuple(
            (
                measurement.benchmark,
                f"{measurement.gpus or '?'} x {measurement.system}",
                measurement.release,
                measurement.minutes,
                _ratio(group[0].minutes, measurement.minutes),
                _ratio(group[0].minutes_per_epoch, measurement.minutes_per_epoch),
            )
            for group in by_age
            for measurement in group
            if group[0].release != group[-1].release
        ),
        note="Rounds differ in targets and hyperparameters as well; the speed-up of an epoch leaves both out.",
    )


def by_precision(measurements: Sequence[Measurement]) -> Table:
    """Return the speed-up per precision relative to the slowest, on the same system and GPUs."""
    with_precision = [
        measurement for measurement in measurements if measurement.precision and measurement.minutes_per_epoch
    ]
    same = grouped(
        with_precision,
        lambda measurement: (measurement.benchmark, measurement.system, measurement.gpus, measurement.framework),
    ).values()
    with_slowest = [(group, max(group, key=lambda measurement: measurement.minutes_per_epoch or 0.0)) for group in same]
    return Table(
        title="Precision against precision",
        columns=("benchmark", "system", "precision", "minutes per epoch", "speed-up", "against"),
        rows=tuple(
            (
                measurement.benchmark,
                f"{measurement.gpus or '?'} x {measurement.system}",
                measurement.precision,
                measurement.minutes_per_epoch,
                _ratio(slowest.minutes_per_epoch, measurement.minutes_per_epoch),
                slowest.precision,
            )
            for group, slowest in with_slowest
            for measurement in group
            if len({measurement.precision for measurement in group}) > 1
        ),
    )


def quality_table(measurements: Sequence[Measurement], name: str, over: str) -> Table:
    """Return the data for a quality plot: all evaluations of metric ``name`` over one unit."""
    curves = [
        (measurement, number, curve)
        for measurement in measurements
        for number, curve in enumerate(
            curve for curve in measurement.curves if (curve.name, curve.over) == (name, over)
        )
    ]
    quality = curves[0][2].quality if curves else "quality"
    return Table(
        title=f"{quality[0].upper()}{quality[1:]} over {over}",
        columns=("benchmark", "system", "run", over, quality),
        rows=tuple(
            (measurement.benchmark, measurement.label, number, *point)
            for measurement, number, curve in curves
            for point in curve.points
        ),
    )


def all_tables(measurements: Sequence[Measurement], baseline: str | None = None) -> list[Table]:
    """Return all non-empty tables; raises EncoreError without measurements."""
    if not measurements:
        raise EncoreError("no measurement to make tables of", hint="name a run, or a study with --study")
    builders = (speed_up_table, scaling_efficiency, by_release, by_precision)
    tables = [*synopsis(measurements), *(table(measurements) for table in builders)]
    relative = [relative_to(measurements, baseline)] if baseline is not None else []
    return [table for table in (*tables, *relative) if table.rows]


def _ratio(numerator: float | None, denominator: float | None, growth: float = 1.0) -> float | None:
    return numerator / denominator / growth if numerator and denominator else None


def _growth(base: Measurement, measurement: Measurement) -> float:
    return (measurement.gpus or 1) / (base.gpus or 1)


# Pair measurements with the measurement on the fewest GPUs of the same group: with the same batch (global or per GPU)
# if there are several, else the fastest.
def _scaling_pairs(measurements: Sequence[Measurement]) -> Iterator[tuple[Measurement, Measurement]]:
    timed = [measurement for measurement in measurements if measurement.gpus and measurement.minutes]
    kinds = grouped(
        timed, lambda each: (each.benchmark, _system_type(each), each.framework, each.precision, each.release)
    )
    for kind in kinds.values():
        same = _sort_by_gpus(kind)
        bases = [measurement for measurement in same if measurement.gpus == same[0].gpus]
        for measurement in same[len(bases) :]:
            batches = (measurement.batch, (measurement.batch or 0.0) / _growth(same[0], measurement))
            yield next((base for base in bases if base.batch and base.batch in batches), bases[0]), measurement


# System name without the number of nodes, so that different sizes stay comparable.
def _system_type(measurement: Measurement) -> str:
    return measurement.system.rpartition("nodes, ")[2]


def _sort_by_gpus(measurements: Sequence[Measurement]) -> list[Measurement]:
    return sorted(measurements, key=lambda measurement: (measurement.gpus or 0, measurement.minutes or 0.0))
