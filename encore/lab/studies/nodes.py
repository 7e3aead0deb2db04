"""A study of frameworks on several nodes: a sweep of one benchmark for each, and the printed figures next to it.

from encore.lab.studies.nodes import load, sweep_of, tables
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
from encore.results.statistics import Sample
from encore.results.table import Cell, Table
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
    found = by_framework(study, results)
    figures = [each for each in load_figures() if each.source == study.source]
    what = devices(results)
    return [make(study, found, figures, what) for make in (_inputs, _speeds, _gains)]


def _inputs(
    study: NodeStudy, found: Mapping[str, Sequence[Result]], figures: Sequence[StudyFigure], what: str
) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for each in study.frameworks:
        for precision in dict.fromkeys(result.point.precision for result in found[each.name]):
            batch = next(r.point.batch for r in found[each.name] if r.point.precision == precision)
            own = [f for f in figures if f.context == each.printed and f.precision == precision]
            printed = [next((f.printed for f in own if f.quantity == q), "") for q in ("batch_per_gpu", "epochs")]
            rows.append((each.name, precision, batch, each.printed, *printed))
    each_has = "batch of a rank" if what == "ranks" else "batch of a GPU"
    columns = ("framework", "precision", each_has, "printed of", "printed batch", "printed epochs")
    return Table(title="Inputs (table 2)", columns=columns, rows=tuple(rows))


def _speeds(
    study: NodeStudy, found: Mapping[str, Sequence[Result]], figures: Sequence[StudyFigure], what: str
) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for each in study.frameworks:
        speeds = {(r.point.precision, r.point.gpus): r.samples_per_second for r in found[each.name]}
        for result in found[each.name]:
            point, base = result.point, speeds.get((result.point.precision, 1))
            own = result.samples_per_second
            value, low, high = ratio(own, base) if own and base and point.gpus > 1 else (None, None, None)
            printed = _printed(figures, "speedup", each, point.precision, point.gpus)
            rows.append((
                each.name, point.precision, point.nodes, point.gpus, own.estimate if own else None, value, low, high,
                value / point.gpus if value else None, printed, result.state,
            ))  # fmt: skip
    columns = (
        "framework", "precision", "nodes", what, "images/s", "speed-up", "from", "to", "efficiency",
        "printed speed-up", "state",
    )  # fmt: skip
    note = (
        f"Against one of the {what}, with the same batch of each; without the first epoch. Nothing else is printed as a"
        " number."
    )
    return Table(title="Performance and speed-up (figures 2 and 3)", columns=columns, rows=tuple(rows), note=note)


def _gains(study: NodeStudy, found: Mapping[str, Sequence[Result]], figures: Sequence[StudyFigure], what: str) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for each in study.frameworks:
        by_point: dict[tuple[int, int], dict[str | None, Sample]] = {}
        for result in found[each.name]:
            if result.samples_per_second:
                place = (result.point.nodes, result.point.gpus)
                by_point.setdefault(place, {})[result.point.precision] = result.samples_per_second
        own = [f for f in figures if f.quantity == "gain_percent" and f.context.startswith(each.printed)]
        ends = " to ".join(f.printed for f in own if f.gpus is None)
        for (nodes, gpus), speeds in by_point.items():
            if {"fp16", "fp32"} <= set(speeds):
                found_ratio = ratio(speeds["fp16"], speeds["fp32"])
                alone = next((f.printed for f in own if f.gpus == gpus), ends)
                rows.append((each.name, nodes, gpus, *map(in_percent, found_ratio), alone))
    columns = ("framework", "nodes", what, "fp16 over fp32, %", "from", "to", "printed, %")
    return Table(title="What fp16 gains", columns=columns, rows=tuple(rows))


def _printed(
    figures: Sequence[StudyFigure], quantity: str, framework: Framework, precision: str | None, gpus: int
) -> str:
    wanted = (quantity, precision, gpus)
    same = (each for each in figures if (each.quantity, each.precision, each.gpus) == wanted)
    return next((each.printed for each in same if each.context.startswith(framework.printed)), "")
