"""Results of a sweep: steady-state samples per second, time to target, and a comparison of releases.

from encore.lab.studies.throughput import measured, throughput_table
print(throughput_table(measured(open_folder(path, Sweep))).as_markdown())

Published figures by release are in the benchmark's ``published_releases.toml``; tables mark them as published.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from encore import catalogue, files, paths
from encore.lab.scaling.cost_model import Point, fit_steps
from encore.lab.studies.folder import Folder, State
from encore.lab.studies.sweep import GridPoint, Sweep
from encore.results.logs.run_log import read_run
from encore.results.report.figures import Figure, bars, over_gpus
from encore.results.report.report import build_report, write_files
from encore.results.statistics import Sample
from encore.results.table import Cell, Table, grouped
from encore.run.follow import Tail

_STEADY = 0.2  # fraction of warm-up steps in runs without a second epoch


@dataclass(frozen=True, kw_only=True)
class Result:
    point: GridPoint
    state: State
    global_batch: int | None = None
    # Training throughput over all epochs except the first of each run; without evaluations.
    samples_per_second: Sample | None = None
    input_share: float | None = None  # fraction of the training time spent waiting for data
    minutes: Sample | None = None  # time to the target of the runs that reached it
    reached: int = 0
    runs: int = 0
    unit: str = "samples"  # unit of the batch: token positions for the Transformer
    on_cpu: bool = False  # ranks without GPUs

    def times_as_fast_as(self, base: Result | None) -> float | None:
        if base is None or self.samples_per_second is None or base.samples_per_second is None:
            return None
        return self.samples_per_second.estimate / base.samples_per_second.estimate


def measured(folder: Folder[Sweep]) -> list[Result]:
    return [_result(folder, point) for point in folder.study.points()]


def _result(folder: Folder[Sweep], point: GridPoint) -> Result:
    state, run = folder.state(point), folder.run_of(point)
    if run is None or state != "done":
        return Result(point=point, state=state)
    streams = [Tail(experiment.metrics).read() for experiment in run.experiments()]
    speeds = [speed for stream in streams for speed in steady_speeds(stream)]
    shares = [record["input_share"] for stream in streams for record in stream if record["kind"] == "epoch"]
    starts = [record for stream in streams for record in stream if record["kind"] == "start"]
    logs = [read_run(experiment.result) for experiment in run.experiments() if experiment.result.exists()]
    minutes = [log.minutes for log in logs if log.minutes is not None]
    configuration = files.read_json(run.path / "run.json").get("configuration", {})
    return Result(
        point=point,
        state=state,
        global_batch=starts[0]["global_batch_size"] if starts else None,
        samples_per_second=Sample.of(speeds) if speeds else None,
        input_share=statistics.median(shares) if shares else None,
        minutes=Sample.of(minutes) if minutes else None,
        reached=len(minutes),
        runs=len(streams),
        unit=starts[0].get("batch_unit", "samples") if starts else "samples",
        on_cpu=configuration.get("device", {}).get("value") == "cpu",
    )


def devices(results: Iterable[Result]) -> str:
    """Return the unit of the points' device counts: GPUs, or ranks on a CPU."""
    return "ranks" if any(result.on_cpu for result in results) else "GPUs"


def _speed(results: Sequence[Result]) -> str:
    # Column name of speeds, from the batch unit of the finished points.
    return f"{next((result.unit for result in results if result.state == 'done'), 'samples')}/s"


def steady_speeds(stream: Sequence[dict[str, Any]]) -> list[float]:
    """Return samples per second of all epochs after warm-up.

    The first epoch after a start is warm-up. Without further epochs, the last four fifths of its steps count.
    """
    marks = [record for record in stream if record["kind"] in ("start", "epoch")]
    warm = [record for previous, record in itertools.pairwise(marks) if previous["kind"] == record["kind"] == "epoch"]
    if warm:
        return [float(record["samples_per_second"]) for record in warm]
    starts = [record for record in marks if record["kind"] == "start"]
    steps = [record for record in stream if record["kind"] == "step"]
    steady = steps[int(_STEADY * len(steps)) :]
    if not starts or len(steady) < 2 or steady[-1]["time"] <= steady[0]["time"]:
        return []
    count = steady[-1]["step"] - steady[0]["step"]
    return [count * starts[0]["global_batch_size"] / (steady[-1]["time"] - steady[0]["time"])]


def _with_ratios(results: Sequence[Result]) -> list[tuple[Result, Result | None, float | None]]:
    # Results with their base (fewest GPUs with the same precision), and the speed ratio.
    rows = []
    for result in results:
        measured = [r for r in results if r.samples_per_second and r.point.precision == result.point.precision]
        base = min(measured, key=lambda r: (r.point.gpus, r.point.nodes), default=None)
        rows.append((result, base, result.times_as_fast_as(base)))
    return rows


def speed_ups(results: Sequence[Result]) -> dict[str, list[tuple[float, float]]]:
    """Return GPUs and speed-up over the fewest GPUs, by precision; for equal GPU counts, with the fewest nodes."""
    lines: dict[str, dict[float, float]] = {}
    for result, _, ratio in sorted(_with_ratios(results), key=lambda row: (row[0].point.gpus, row[0].point.nodes)):
        if ratio:
            lines.setdefault(result.point.precision or "throughput", {}).setdefault(result.point.gpus, ratio)
    return {name: sorted(points.items()) for name, points in lines.items()}


def speed_up_figure(
    lines: Mapping[str, Sequence[tuple[float, float]]], table: Table, devices: str = "GPUs"
) -> Figure | None:
    """Return the speed-up over the fewest GPUs (or other ``devices``) as lines by name."""
    several = [(name, points) for name, points in lines.items() if len(points) > 1]
    if not several:
        return None
    counts = [count for _, points in several for count, _ in points]
    linear = [(count, count / min(counts)) for count in (min(counts), max(counts))]
    title = "Speed-up of the throughput"
    return over_gpus("speed-up", title, several, table, "speed-up", linear=linear, axis=devices)


def throughput_table(results: Sequence[Result]) -> Table:
    """Return a row per point; speed-up and efficiency against the fewest GPUs of the same precision."""
    unit, speed = devices(results), _speed(results)
    rows: list[tuple[Cell, ...]] = []
    for result, base, ratio in _with_ratios(results):
        sample = result.samples_per_second
        rows.append((
            result.point.key,
            result.global_batch,
            sample.estimate if sample else None,
            f"{sample.cv:.1%}" if sample and sample.cv is not None else "",
            ratio,
            ratio * base.point.gpus / result.point.gpus if ratio and base else None,
            f"{result.input_share:.0%}" if result.input_share is not None else "",
            result.minutes.estimate if result.minutes else None,
            f"{result.reached} of {result.runs}" if result.state == "done" else result.state,
        ))  # fmt: skip
    return Table(
        title=f"Throughput by number of {unit}",
        columns=("point", "batch", speed, "spread", "speed-up", "efficiency", "waiting", "min", "reached"),
        formats={speed: ",.1f", "speed-up": ".3f", "efficiency": ".3f"},
        rows=tuple(rows),
        note=f"Point: nodes x {unit}. Speed: training only, without the first epoch and evaluations; spread:"
        f" standard deviation over epochs. Speed-up against the fewest {unit}; efficiency is speed-up over the"
        f" growth in {unit}. Waiting: fraction of the time without data. Minutes: time to target of the runs that"
        " reached it.",
    )


def predictions(folder: Folder[Sweep], results: Sequence[Result], gpus: Sequence[int]) -> Table:
    """Return predicted samples per second at other GPU counts, from the cost model fitted to the points of each
    precision.

    Precisions with a single finished GPU count are omitted. If all points are on one node, predictions are for a
    single node with any number of GPUs.
    """
    unit, speed = devices(results), _speed(results)
    rows: list[tuple[Cell, ...]] = []
    for precision, measured in grouped(
        (r for r in results if r.samples_per_second), lambda r: r.point.precision
    ).items():
        if len({result.point.gpus for result in measured}) < 2:
            continue
        model = fit_steps([_point(result) for result in measured])
        per_node = max(result.point.gpus_per_node for result in measured)
        several = any(result.point.nodes > 1 for result in measured)
        batch = measured[0].global_batch or 1
        for count in gpus:
            total = batch if folder.study.mode == "strong" else batch // measured[0].point.gpus * count
            nodes = -(-count // per_node) if several else 1
            step = model.predict(Point(gpus=count, nodes=nodes, samples_per_gpu=total / count))
            speeds = (total / step.value, total / step.high, total / step.low)
            rows.append((count, nodes, precision or "", total, *speeds))
    return Table(
        title="Predicted throughput",
        columns=(unit, "nodes", "precision", "global batch", speed, "95 % from", "95 % to"),
        formats={speed: ",.1f", "95 % from": ",.1f", "95 % to": ",.1f"},
        rows=tuple(rows),
        note="By the cost model of docs/scaling.md, on the number of nodes in the row, with the interval of a "
        f"measurement. Empty with fewer than two finished numbers of {unit}.",
    )


def _point(result: Result) -> Point:
    # A measured point as the cost model wants it: seconds per step.
    point, batch, speed = result.point, result.global_batch or 1, result.samples_per_second
    seconds = batch / speed.estimate if speed else 0.0
    return Point(gpus=point.gpus, nodes=point.nodes, samples_per_gpu=batch / point.gpus, time=seconds)


# -- releases of an image -----------------------------------------------------------------------------------------

MEASURED = "this sweep"


class PublishedRelease(catalogue.Strict):
    release: str
    machine: str
    speed_up: float  # relative to the first release of the figure


class PublishedReleases(catalogue.Strict):
    source: str
    conditions: str
    figures: tuple[PublishedRelease, ...]


def published(benchmark: str) -> PublishedReleases | None:
    path = paths.benchmark_folder(benchmark) / "published_releases.toml"
    return catalogue.parse(PublishedReleases, path) if path.exists() else None


def releases_table(results: Sequence[Result], figure: PublishedReleases | None) -> Table:
    """Return a row per release and GPU count, with the speed-up over the first release on this GPU count."""
    rows: list[tuple[Cell, ...]] = []
    first: dict[tuple[object, ...], Result] = {}
    for result in results:
        base = first.setdefault((result.point.nodes, result.point.gpus, result.point.precision), result)
        speed = result.samples_per_second.estimate if result.samples_per_second else None
        rows.append((result.point.image, f"{result.point.gpus} GPUs", speed, result.times_as_fast_as(base), MEASURED))
    note = "Samples per second of training; speed-up over the first release on the same number of GPUs."
    if figure:
        rows += [(entry.release, entry.machine, None, entry.speed_up, "published") for entry in figure.figures]
        note += f" Published: {figure.source}; {figure.conditions}; not measured here."
    return Table(
        title="Speed-up by release of the image",
        columns=("release", "machine", "samples/s", "speed-up", "from"),
        formats={"samples/s": ",.1f", "speed-up": ".2f"},
        rows=tuple(rows),
        note=note,
    )


def releases_figure(table: Table) -> Figure | None:
    rows = tuple(row for row in table.rows if row[3] is not None)
    if not any(row[4] == MEASURED for row in rows):
        return None
    return bars("release-sweep", replace(table, rows=rows), label=(0, 1, 4), value=3, axis="speed-up")


# -- sweep report -------------------------------------------------------------------------------------------------


def sweep_tables(folder: Folder[Sweep], results: Sequence[Result], predict: Sequence[int] = ()) -> list[Table]:
    """Return the tables of throughput, published releases, and predictions for other GPU counts."""
    tables = [throughput_table(results)]
    if folder.study.images:
        tables.append(releases_table(results, published(folder.study.request.name)))
    return [*tables, predictions(folder, results, predict)] if predict else tables


def write(folder: Folder[Sweep], results: Sequence[Result], tables: Sequence[Table]) -> list[Path]:
    """Write FOLDER/report with these tables and the content of `encore report` for the finished runs."""
    runs = [folder.run_of(result.point) for result in results if result.state == "done"]
    report = build_report([run.path for run in runs if run is not None])
    figure = (
        releases_figure(tables[1])
        if folder.study.images
        else speed_up_figure(speed_ups(results), tables[0], devices(results))
    )
    figures = (figure, *report.figures) if figure else report.figures
    return write_files(replace(report, tables=(*tables, *report.tables), figures=figures), folder.path / "report")
