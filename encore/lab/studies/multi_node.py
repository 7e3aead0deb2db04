"""Multi-node study of frameworks: a sweep of one benchmark per framework, compared with printed figures.

from encore.lab.studies.multi_node import load, sweep_of, tables
for point in sweep_of(load("multi-node"), small=True, request=Request(name="", gpus=None)).points():
    print(point.key)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from encore import catalogue
from encore.catalogue import Strict
from encore.errors import unknown_name
from encore.lab.studies.definition import DATA
from encore.lab.studies.results import ratio, to_percent
from encore.lab.studies.sweep import Sweep
from encore.lab.studies.throughput import Result, devices
from encore.results.published.published import StudyFigure, load_figures
from encore.results.table import Cell, Table, grouped
from encore.run.planning import Request


class Framework(Strict):
    name: str
    benchmark: str
    printed: str  # the framework's name in the printed figures


class Points(Strict):
    """Grid per framework; multi-node points use all GPUs of the nodes."""

    nodes: tuple[int, ...]
    gpus: tuple[int, ...]
    precisions: tuple[str, ...]  # with the batch per GPU: fp32:64
    settings: tuple[str, ...]
    seconds: float | None = None  # duration of a point in the study; None: unknown before the first run


class NodeStudy(Points):
    title: str
    source: str
    frameworks: tuple[Framework, ...]
    small: Points


def load(name: str) -> NodeStudy:
    return catalogue.parse(NodeStudy, DATA / "nodes" / f"{name}.toml")


def sweep_of(study: NodeStudy, small: bool, request: Request, images: Mapping[str, str] = {}) -> Sweep:
    """Return the sweep of all frameworks; ``request`` has the user's options, ``images`` are by framework."""
    part = study.small if small else study
    framework_names = [framework.name for framework in study.frameworks]
    for name in images:
        if name not in framework_names:
            raise unknown_name("framework in --image", name, framework_names)
    return Sweep(
        request=replace(request, settings=(*part.settings, *request.settings)),
        benchmarks={framework.benchmark: images.get(framework.name) for framework in study.frameworks},
        nodes=part.nodes,
        gpus=part.gpus,
        precisions=part.precisions,
        mode="weak",
        full_nodes=True,
    )


def by_framework(study: NodeStudy, results: Sequence[Result]) -> dict[str, list[Result]]:
    return {
        framework.name: [result for result in results if result.point.benchmark == framework.benchmark]
        for framework in study.frameworks
    }


def tables(study: NodeStudy, results: Sequence[Result]) -> list[Table]:
    """Return the study's table 2 and the tables of its figures 2 and 3, from the points of all frameworks."""
    inputs: list[tuple[Cell, ...]] = []
    speeds: list[tuple[Cell, ...]] = []
    gains: list[tuple[Cell, ...]] = []
    figures = [figure for figure in load_figures() if figure.source == study.source]
    for framework in study.frameworks:
        name = framework.name
        printed_figures = [figure for figure in figures if figure.context.startswith(framework.printed)]
        measured = by_framework(study, results)[name]
        speed_by_point = {(r.point.nodes, r.point.gpus, r.point.precision): r.samples_per_second for r in measured}
        for precision, same in grouped(measured, lambda result: result.point.precision).items():
            batch, epochs = (
                _printed_value(printed_figures, quantity=quantity, precision=precision, context=framework.printed)
                for quantity in ("batch_per_gpu", "epochs")
            )
            inputs.append((name, precision, same[0].point.batch, framework.printed, batch, epochs))
        for result in measured:
            point, speed, base = (
                result.point,
                result.samples_per_second,
                speed_by_point.get((1, 1, result.point.precision)),
            )
            value, low, high = ratio(speed, base) if speed and base and point.gpus > 1 else (None, None, None)
            speeds.append((
                name, point.precision, point.nodes, point.gpus, speed.estimate if speed else None, value, low, high,
                value / point.gpus if value else None,
                _printed_value(printed_figures, quantity="speedup", precision=point.precision, gpus=point.gpus),
                result.state,
            ))  # fmt: skip
        percents = [figure for figure in printed_figures if figure.quantity == "gain_percent"]
        ends = " to ".join(figure.printed for figure in percents if figure.gpus is None)
        for nodes, gpus in dict.fromkeys((r.point.nodes, r.point.gpus) for r in measured):
            half, single = speed_by_point.get((nodes, gpus, "fp16")), speed_by_point.get((nodes, gpus, "fp32"))
            if half and single:
                printed = _printed_value(percents, gpus=gpus) or ends
                gains.append((name, nodes, gpus, *map(to_percent, ratio(half, single)), printed))
    unit = devices(results)
    each_has = "batch of a rank" if unit == "ranks" else "batch of a GPU"
    note = (
        f"Against one of the {unit}, with the same batch for each, without the first epoch. The study prints no other"
        " numbers."
    )
    return [
        Table(
            title="Inputs (table 2)",
            columns=("framework", "precision", each_has, "printed of", "printed batch", "printed epochs"),
            rows=tuple(inputs),
        ),
        Table(
            title="Performance and speed-up (figures 2 and 3)",
            columns=(
                "framework", "precision", "nodes", unit, "images/s", "speed-up", "from", "to", "efficiency",
                "printed speed-up", "state",
            ),
            rows=tuple(speeds),
            note=note,
        ),
        Table(
            title="What fp16 gains",
            columns=("framework", "nodes", unit, "fp16 over fp32, %", "from", "to", "printed, %"),
            rows=tuple(gains),
        ),
    ]  # fmt: skip


def _printed_value(figures: Sequence[StudyFigure], **fields: object) -> str:
    # The printed value; empty if the study does not print it.
    same = (f for f in figures if all(getattr(f, name) == value for name, value in fields.items()))
    return next((figure.printed for figure in same), "")
