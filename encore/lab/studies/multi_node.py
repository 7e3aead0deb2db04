"""A study of frameworks on several nodes: a sweep of one benchmark for each, and the printed figures next to it.

from encore.lab.studies.multi_node import load, sweep_of, tables
for point in sweep_of(load("multi-node"), small=True, request=Request(name="", gpus=None)).points():
    print(point.key)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from encore import catalogue, names
from encore.catalogue import Strict
from encore.lab.studies.definition import DATA
from encore.lab.studies.results import in_percent, ratio
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
    """The grid of each framework; several nodes with all their GPUs alone."""

    nodes: tuple[int, ...]
    gpus: tuple[int, ...]
    precisions: tuple[str, ...]  # each with the batch of a GPU: fp32:64
    settings: tuple[str, ...]
    seconds: float | None = None  # of a point, as it was measured; None: nobody knows before one has run


class NodeStudy(Points):
    title: str
    source: str
    frameworks: tuple[Framework, ...]
    small: Points


def load(name: str) -> NodeStudy:
    return catalogue.parse(NodeStudy, DATA / "nodes" / f"{name}.toml")


def sweep_of(study: NodeStudy, small: bool, request: Request, images: Mapping[str, str] = {}) -> Sweep:
    """Return the sweep of all frameworks; ``request`` has what the user gave, ``images`` are by framework."""
    part = study.small if small else study
    known = [each.name for each in study.frameworks]
    for name in images:
        if name not in known:
            raise names.unknown("framework in --image", name, known)
    return Sweep(
        request=replace(request, settings=(*part.settings, *request.settings)),
        benchmarks={each.benchmark: images.get(each.name) for each in study.frameworks},
        nodes=part.nodes,
        gpus=part.gpus,
        precisions=part.precisions,
        mode="weak",
        full_nodes=True,
    )


def by_framework(study: NodeStudy, results: Sequence[Result]) -> dict[str, list[Result]]:
    return {
        each.name: [result for result in results if result.point.benchmark == each.benchmark]
        for each in study.frameworks
    }


def tables(study: NodeStudy, results: Sequence[Result]) -> list[Table]:
    """Return the study's table 2 and the tables behind its figures 2 and 3, from the points of each framework."""
    inputs: list[tuple[Cell, ...]] = []
    speeds: list[tuple[Cell, ...]] = []
    gains: list[tuple[Cell, ...]] = []
    figures = [each for each in load_figures() if each.source == study.source]
    for framework in study.frameworks:
        name = framework.name
        own = [each for each in figures if each.context.startswith(framework.printed)]
        ours = by_framework(study, results)[name]
        known = {(r.point.nodes, r.point.gpus, r.point.precision): r.samples_per_second for r in ours}
        for precision, same in grouped(ours, lambda each: each.point.precision).items():
            batch, epochs = (
                _printed(own, quantity=quantity, precision=precision, context=framework.printed)
                for quantity in ("batch_per_gpu", "epochs")
            )
            inputs.append((name, precision, same[0].point.batch, framework.printed, batch, epochs))
        for each in ours:
            point, speed, base = each.point, each.samples_per_second, known.get((1, 1, each.point.precision))
            value, low, high = ratio(speed, base) if speed and base and point.gpus > 1 else (None, None, None)
            speeds.append((
                name, point.precision, point.nodes, point.gpus, speed.estimate if speed else None, value, low, high,
                value / point.gpus if value else None,
                _printed(own, quantity="speedup", precision=point.precision, gpus=point.gpus), each.state,
            ))  # fmt: skip
        percents = [each for each in own if each.quantity == "gain_percent"]
        ends = " to ".join(each.printed for each in percents if each.gpus is None)
        for nodes, gpus in dict.fromkeys((r.point.nodes, r.point.gpus) for r in ours):
            half, single = known.get((nodes, gpus, "fp16")), known.get((nodes, gpus, "fp32"))
            if half and single:
                printed = _printed(percents, gpus=gpus) or ends
                gains.append((name, nodes, gpus, *map(in_percent, ratio(half, single)), printed))
    what = devices(results)
    each_has = "batch of a rank" if what == "ranks" else "batch of a GPU"
    note = (
        f"Against one of the {what}, with the same batch of each; without the first epoch. Nothing else is printed as a"
        " number."
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
                "framework", "precision", "nodes", what, "images/s", "speed-up", "from", "to", "efficiency",
                "printed speed-up", "state",
            ),
            rows=tuple(speeds),
            note=note,
        ),
        Table(
            title="What fp16 gains",
            columns=("framework", "nodes", what, "fp16 over fp32, %", "from", "to", "printed, %"),
            rows=tuple(gains),
        ),
    ]  # fmt: skip


def _printed(figures: Sequence[StudyFigure], **wanted: object) -> str:
    # As it is printed of what is wanted; empty where it is not.
    same = (f for f in figures if all(getattr(f, name) == value for name, value in wanted.items()))
    return next((figure.printed for figure in same), "")
