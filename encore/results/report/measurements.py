"""Measured trainings in one form, whether they come from logs, from a study or from a round.

from encore.results.report.measurements import of_side, of_study
rows = [of_side(side) for side in load_sides("results")] + of_study("microway-dgx1-scaling")
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from encore.results.compare.digest import submission
from encore.results.compare.sides import Side
from encore.results.logs.run_log import RunLog
from encore.results.logs.timing import deciding, length_of
from encore.results.published.published import PublishedResult, load_figures
from encore.results.published.systems import cells_at, framework_of, model_of, release_of
from encore.results.words import count_of

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
    """One benchmark trained on one system."""

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


def title_of(side: Side) -> str:
    """Return the whole name of a set: round, submitter and system of a public one, else what its folder is called."""
    if side.published is not None:
        return side.published.name
    if side.passport or side.folder is None:
        return side.label
    path = [part for part in side.folder.absolute().parts if part.lower() not in ("results", side.benchmark)]
    cells = cells_at(side.folder, side.round, side.benchmark)
    if cells and cells[0].submitter in path:
        return cells[0].name
    org = next((run.org for run in side.logs if run.org), None)
    named = path[-2:] if org is None else path[-1:]
    return "/".join([*([org] if org and org not in named else []), *named])


def of_side(side: Side) -> Measurement:
    """Return the measurement that a set of runs is."""
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
        precision=_precision(side),
        release=release_of(image, hardware.framework, side.label),
        curves=tuple(_curves(side.logs)),
    )


def of_published(cell: PublishedResult) -> Measurement:
    """Return the measurement that a published cell is, with its epochs where they are known."""
    return of_side(submission(cell))


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


def _precision(side: Side) -> str:
    stated = side.settings.get("configuration.precision") or side.hyperparameters.get("precision")
    return str(stated or "")


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
