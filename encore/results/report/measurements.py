"""Measured trainings in one form, whether they come from logs, from a study or from a round.

from encore.results.logs.run_log import submitter_of
from encore.results.report.measurements import measurement_of, of_study
rows = [measurement_of(run_set) for run_set in load_run_sets("results")] + of_study("microway-dgx1-scaling")
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import commonpath

from encore.errors import EncoreError
from encore.names import unknown
from encore.results.compare.run_set import RunSet, submission
from encore.results.format import count_of
from encore.results.logs.run_log import RunLog, submitter_of
from encore.results.logs.timing import deciding, length_of
from encore.results.published.published import PublishedResult, load_figures, load_published
from encore.results.published.systems import cells_at, framework_of, model_of, release_of
from encore.results.table import Table, grouped, whole

_NUMBERED_FROM = 2  # Epochs by which a log's numbers may differ from those that were trained


@dataclass(frozen=True)
class Curve:
    """Quality of one run over what its log counts; ``name`` says which quality, where there are several."""

    name: str
    points: tuple[tuple[float, float], ...]
    target: float | None
    over: str = "epochs"  # Unit of the points' first number: epochs, samples, steps or samples, or evaluations
    quality: str = "quality"  # What it is, such as top-1 accuracy or log perplexity


@dataclass(frozen=True, kw_only=True)
class Measurement:
    label: str
    benchmark: str
    system: str
    framework: str | None = None
    gpus: int | None = None  # Accelerators; None of a run on CPUs, whose system has its ranks
    # As the source counts it: samples of a step over all GPUs in logs; studies also write it per GPU.
    batch: float | None = None
    minutes_per_epoch: float | None = None
    epochs: float | None = None
    samples: float | None = None  # To the target, where the logs count no epochs
    minutes: float | None = None  # Time to the target
    precision: str = ""
    release: str | None = None  # Container release, such as 20.06
    curves: tuple[Curve, ...] = ()


def title_of(side: RunSet) -> str:
    """Return the whole name of a set: round, submitter and system of a public one, else what its folder is called."""
    if side.published is not None:
        return side.published.name
    if side.passport or side.folder is None:
        return side.label
    path = [part for part in side.folder.absolute().parts if part.lower() not in ("results", side.benchmark)]
    cells = cells_at(side.folder, side.round, side.benchmark)
    if cells and cells[0].submitter in path:
        return cells[0].name
    org = submitter_of(side.logs)
    named = path[-2:] if org is None else path[-1:]
    return "/".join([*([org] if org and org not in named else []), *named])


def measurement_of(side: RunSet) -> Measurement:
    hardware = side.hardware
    in_epochs = side.length_unit == "epochs"
    accelerator = model_of(hardware.accelerator) or hardware.accelerator or hardware.cpu or "?"
    image = str(side.passport.get("image") or "")
    system = f"CPU, {count_of(side.ranks, 'rank')}" if side.is_cpu and side.ranks else accelerator
    return Measurement(
        label=title_of(side),
        benchmark=side.benchmark or "?",
        system=f"{hardware.nodes} nodes, {system}" if (hardware.nodes or 1) > 1 else system,
        framework=framework_of(hardware.framework, str(side.passport.get("implementation") or ""), side.label),
        gpus=None if side.is_cpu else side.ranks,
        batch=side.global_batch,
        minutes_per_epoch=side.per_length.estimate if side.per_length and in_epochs else None,
        epochs=side.lengths.estimate if side.lengths and in_epochs else None,
        samples=side.lengths.estimate if side.lengths and side.length_unit == "samples" else None,
        minutes=side.score.estimate if side.score else None,
        precision=str(side.settings.get("configuration.precision") or side.hyperparameters.get("precision") or ""),
        release=release_of(image, hardware.framework, side.label),
        curves=tuple(_curves(side.logs)),
    )


def of_published(cell: PublishedResult) -> Measurement:
    return measurement_of(submission(cell))


def of_study(key: str) -> list[Measurement]:
    """Return the measurements of a study's tables: one for each model, number of GPUs, batch and precision."""
    cells: dict[tuple[str, str, int | None, int | None, str], dict[str, float]] = {}
    for figure in load_figures():
        if figure.source != key or figure.relation != "=" or not figure.place.startswith("table"):
            continue
        if figure.quantity in ("minutes_per_epoch", "epochs"):
            where = (figure.model, figure.system, figure.gpus, figure.batch, figure.precision)
            cells.setdefault(where, {})[figure.quantity] = figure.value
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


# Yield each quality of each run over what all logs of the set count; else over the number of the evaluation.
def _curves(runs: Sequence[RunLog]) -> Iterator[Curve]:
    places = [_places(run) for run in runs if run.quality]
    (over, *others) = dict.fromkeys(over for over, _ in places) or ("evaluations",)
    over = "evaluations" if others else over
    for run, (_, counted) in zip((run for run in runs if run.quality), places, strict=True):
        numbers = [float(number) for number in range(1, len(counted) + 1)]
        targets = {target.name: target for target in run.targets}
        curves: dict[str, list[tuple[float, float]]] = {}
        for place, point in zip(numbers if over == "evaluations" else counted, run.quality, strict=True):
            for name, value in point.values.items():
                curves.setdefault(name, []).append((place, value))
        for name, points in curves.items():
            target = targets.get(name)
            quality = target.quality if target else ("quality" if name == "value" else name)
            yield Curve(name, tuple(points), target.value if target else None, over, quality)


# Unit of a run's length and where each evaluation is in it; evaluations where some are nowhere.
def _places(run: RunLog) -> tuple[str, list[float]]:
    length, last = length_of(run), deciding(run)
    over = length.unit if length else "evaluations"
    counted = [point.samples if over == "samples" else point.epoch for point in run.quality]
    places = [place for place in counted if place is not None]
    # The curve ends where the run's length does, though the log may number its epochs from 0 or from -1.
    at_end = last.epoch if last is not None else None
    shift = length.value - at_end if length is not None and at_end is not None and over == "epochs" else 0.0
    several = len(set(places)) > 1 or len(places) == 1
    if len(places) < len(counted) or not several or abs(shift) > _NUMBERED_FROM:
        return "evaluations", [0.0] * len(counted)
    return over, [place + shift for place in places]


# -- tables ---------------------------------------------------------------------------------------------------------


def synopsis(measurements: Sequence[Measurement]) -> list[Table]:
    columns = ("system", "GPUs", "batch", "minutes per epoch", "epochs", "samples", "minutes", "precision")
    return [
        Table(
            title=f"Synopsis of {benchmark}",
            columns=columns,
            rows=tuple(
                (
                    each.label if "/" in each.label else each.system,
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
            (each.benchmark, _without_nodes(each), base.gpus, each.gpus, _over(base.minutes, each.minutes))
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
                _over(base.minutes, each.minutes, _growth(base, each)),
                _over(base.minutes_per_epoch, each.minutes_per_epoch, _growth(base, each)),
            )
            for base, each in _scaled(measurements)
        ),
        note="By the time to the target, and by the time of an epoch, which leaves convergence out.",
    )


def relative_to(measurements: Sequence[Measurement], baseline: str) -> Table:
    """Return the time of the baseline, a label or system in any case, over that of each: above 1 is faster."""
    wanted = baseline.lower()
    bases = {
        each.benchmark: each.minutes
        for each in measurements
        if wanted in (each.label.lower(), each.system.lower(), *each.label.lower().split("/")) and each.minutes
    }
    if not bases:
        raise _unknown_baseline(measurements, baseline)
    return Table(
        title=f"Score relative to {baseline}",
        columns=("benchmark", "system", "GPUs", "minutes", "times as fast"),
        rows=tuple(
            (each.benchmark, each.label, each.gpus, each.minutes, bases[each.benchmark] / each.minutes)
            for each in measurements
            if each.minutes and each.benchmark in bases
        ),
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


def by_release(measurements: Sequence[Measurement]) -> Table:
    """Return speed-up by container release, on the same system, against the oldest release."""
    known = [each for each in measurements if each.release and each.minutes]
    same = grouped(known, lambda each: (each.benchmark, each.system, each.gpus, each.precision)).values()
    by_age = [sorted(group, key=lambda each: each.release or "") for group in same]
    return Table(
        title="Speed-up by container release",
        columns=("benchmark", "system", "release", "minutes", "speed-up", "speed-up per epoch"),
        rows=tuple(
            (
                each.benchmark,
                f"{each.gpus or '?'} x {each.system}",
                each.release,
                each.minutes,
                _over(group[0].minutes, each.minutes),
                _over(group[0].minutes_per_epoch, each.minutes_per_epoch),
            )
            for group in by_age
            for each in group
            if group[0].release != group[-1].release
        ),
        note="Rounds differ in targets and hyperparameters as well; the speed-up of an epoch leaves both out.",
    )


def by_precision(measurements: Sequence[Measurement]) -> Table:
    """Return speed-up of each precision against the slowest one, on the same system and GPUs."""
    known = [each for each in measurements if each.precision and each.minutes_per_epoch]
    same = grouped(known, lambda each: (each.benchmark, each.system, each.gpus, each.framework)).values()
    with_slowest = [(group, max(group, key=lambda each: each.minutes_per_epoch or 0.0)) for group in same]
    return Table(
        title="Precision against precision",
        columns=("benchmark", "system", "precision", "minutes per epoch", "speed-up", "against"),
        rows=tuple(
            (
                each.benchmark,
                f"{each.gpus or '?'} x {each.system}",
                each.precision,
                each.minutes_per_epoch,
                _over(slowest.minutes_per_epoch, each.minutes_per_epoch),
                slowest.precision,
            )
            for group, slowest in with_slowest
            for each in group
            if len({each.precision for each in group}) > 1
        ),
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
            (each.benchmark, each.label, number, *point) for each, number, curve in found for point in curve.points
        ),
    )


def all_tables(measurements: Sequence[Measurement], baseline: str | None = None) -> list[Table]:
    """Return every table that these measurements fill; EncoreError where there is nothing to tabulate."""
    if not measurements:
        raise EncoreError("no measurement to make tables of", hint="name a run, or a study with --study")
    made = (speed_up_table, scaling_efficiency, by_release, by_precision)
    tables = [*synopsis(measurements), *(table(measurements) for table in made)]
    relative = [relative_to(measurements, baseline)] if baseline is not None else []
    return [table for table in (*tables, *relative) if table.rows]


def _over(one: float | None, other: float | None, growth: float = 1.0) -> float | None:
    return one / other / growth if one and other else None


def _growth(base: Measurement, each: Measurement) -> float:
    return (each.gpus or 1) / (base.gpus or 1)


# Each measurement with the one on the fewest GPUs of the same kind: of several the one of the same batch, all together
# or of each GPU, else the fastest.
def _scaled(measurements: Sequence[Measurement]) -> Iterator[tuple[Measurement, Measurement]]:
    known = [each for each in measurements if each.gpus and each.minutes]
    for kind in grouped(known, _kind).values():
        same = _by_gpus(kind)
        bases = [each for each in same if each.gpus == same[0].gpus]
        for each in same[len(bases) :]:
            batches = (each.batch, (each.batch or 0.0) / _growth(same[0], each))
            yield next((base for base in bases if base.batch and base.batch in batches), bases[0]), each


def _kind(each: Measurement) -> tuple[object, ...]:
    return each.benchmark, _without_nodes(each), each.framework, each.precision, each.release


# The system's name without the number of nodes, which must not part what is to be compared.
def _without_nodes(each: Measurement) -> str:
    return each.system.rpartition("nodes, ")[2]


def _by_gpus(measurements: Sequence[Measurement]) -> list[Measurement]:
    return sorted(measurements, key=lambda each: (each.gpus or 0, each.minutes or 0.0))
