"""What the points of a sweep measured: samples per second in steady state, the time to the target, releases compared.

from encore.lab.studies.throughput import measured, throughput_table
print(throughput_table(measured(open_folder(path, Sweep))).as_markdown())

The published figures of a benchmark by release are in its ``published_releases.toml``; they are marked as such.
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

_STEADY = 0.2  # share of the steps that warm up where a run has no second epoch


@dataclass(frozen=True, kw_only=True)
class Result:
    point: GridPoint
    state: State
    global_batch: int | None = None
    # Training alone, over the epochs of all runs but the first epoch of each; evaluations left out.
    samples_per_second: Sample | None = None
    input_share: float | None = None  # share of the training time spent waiting for data
    minutes: Sample | None = None  # time to the target of the runs that reached it
    reached: int = 0
    runs: int = 0
    unit: str = "samples"  # what a batch counts: the Transformer's are token positions
    on_cpu: bool = False  # its ranks had no GPUs

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
    logs = [read_run(each.result) for each in run.experiments() if each.result.exists()]
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
    """Return what the points have several of: GPUs, or the ranks of a CPU."""
    return "ranks" if any(each.on_cpu for each in results) else "GPUs"


def _speed(results: Sequence[Result]) -> str:
    # The name of a column of speeds, by what the batch of the points that ended counts.
    return f"{next((each.unit for each in results if each.state == 'done'), 'samples')}/s"


def steady_speeds(stream: Sequence[dict[str, Any]]) -> list[float]:
    """Return samples per second of each epoch that did not warm up.

    The first epoch after a start warms up. Where there is no other, the last four fifths of its steps count.
    """
    marks = [record for record in stream if record["kind"] in ("start", "epoch")]
    warm = [record for before, record in itertools.pairwise(marks) if before["kind"] == record["kind"] == "epoch"]
    if warm:
        return [float(record["samples_per_second"]) for record in warm]
    starts = [record for record in marks if record["kind"] == "start"]
    steps = [record for record in stream if record["kind"] == "step"]
    kept = steps[int(_STEADY * len(steps)) :]
    if not starts or len(kept) < 2 or kept[-1]["time"] <= kept[0]["time"]:
        return []
    count = kept[-1]["step"] - kept[0]["step"]
    return [count * starts[0]["global_batch_size"] / (kept[-1]["time"] - kept[0]["time"])]


def _with_ratios(results: Sequence[Result]) -> list[tuple[Result, Result | None, float | None]]:
    # Each result with the one on the fewest GPUs of its precision, and its speed over that one's.
    found = []
    for each in results:
        known = [r for r in results if r.samples_per_second and r.point.precision == each.point.precision]
        base = min(known, key=lambda r: (r.point.gpus, r.point.nodes), default=None)
        found.append((each, base, each.times_as_fast_as(base)))
    return found


def speed_ups(results: Sequence[Result]) -> dict[str, list[tuple[float, float]]]:
    """Return GPUs and speed-up over the fewest GPUs, by precision; of points with as many, the one on fewest nodes."""
    lines: dict[str, dict[float, float]] = {}
    for each, _, ratio in sorted(_with_ratios(results), key=lambda found: (found[0].point.gpus, found[0].point.nodes)):
        if ratio:
            lines.setdefault(each.point.precision or "throughput", {}).setdefault(each.point.gpus, ratio)
    return {name: sorted(found.items()) for name, found in lines.items()}


def speed_up_figure(
    lines: Mapping[str, Sequence[tuple[float, float]]], table: Table, devices: str = "GPUs"
) -> Figure | None:
    """Return the throughput over the one on the fewest GPUs, or other ``devices``: these and speed-up, by name."""
    several = [(name, points) for name, points in lines.items() if len(points) > 1]
    if not several:
        return None
    least = min(points[0][0] for _, points in several)
    most = max(points[-1][0] for _, points in several)
    linear = [(least, 1.0), (most, most / least)]
    title = "Speed-up of the throughput"
    return over_gpus("speed-up", title, several, table, "speed-up", linear=linear, axis=devices)


def throughput_table(results: Sequence[Result]) -> Table:
    """Return a row per point; speed-up and efficiency against the fewest GPUs of the same precision."""
    what, speed = devices(results), _speed(results)
    rows: list[tuple[Cell, ...]] = []
    for each, base, ratio in _with_ratios(results):
        sample = each.samples_per_second
        rows.append((
            each.point.key,
            each.global_batch,
            sample.estimate if sample else None,
            f"{sample.cv:.1%}" if sample and sample.cv is not None else "",
            ratio,
            ratio * base.point.gpus / each.point.gpus if ratio and base else None,
            f"{each.input_share:.0%}" if each.input_share is not None else "",
            each.minutes.estimate if each.minutes else None,
            f"{each.reached} of {each.runs}" if each.state == "done" else each.state,
        ))  # fmt: skip
    return Table(
        title=f"Throughput by number of {what}",
        columns=("point", "batch", speed, "spread", "speed-up", "efficiency", "waiting", "min", "reached"),
        formats={speed: ",.1f", "speed-up": ".3f", "efficiency": ".3f"},
        rows=tuple(rows),
        note=f"Point: nodes x {what}. Speed is that of training, without the first epoch and the evaluations; spread"
        f" is its standard deviation over epochs. Speed-up against the fewest {what}; efficiency is speed-up over the"
        f" growth in {what}. Waiting: share of the time without data. Minutes to the target, of the runs that reached"
        " it.",
    )


def predictions(folder: Folder[Sweep], results: Sequence[Result], gpus: Sequence[int]) -> Table:
    """Return samples per second on other numbers of GPUs, by the cost model fitted to the points of each precision.

    No row for a precision that ended on one number of GPUs only. Everything on one node is predicted on one
    node, however many GPUs that would have.
    """
    what, speed = devices(results), _speed(results)
    rows: list[tuple[Cell, ...]] = []
    for precision, known in grouped((r for r in results if r.samples_per_second), lambda r: r.point.precision).items():
        if len({each.point.gpus for each in known}) < 2:
            continue
        model = fit_steps([_point(each) for each in known])
        per_node = max(each.point.gpus_per_node for each in known)
        several = any(each.point.nodes > 1 for each in known)
        batch = known[0].global_batch or 1
        for count in gpus:
            total = batch if folder.study.mode == "strong" else batch // known[0].point.gpus * count
            nodes = -(-count // per_node) if several else 1
            step = model.predict(Point(gpus=count, nodes=nodes, samples_per_gpu=total / count))
            speeds = (total / step.value, total / step.high, total / step.low)
            rows.append((count, nodes, precision or "", total, *speeds))
    return Table(
        title="Predicted throughput",
        columns=(what, "nodes", "precision", "global batch", speed, "95 % from", "95 % to"),
        formats={speed: ",.1f", "95 % from": ",.1f", "95 % to": ",.1f"},
        rows=tuple(rows),
        note="By the cost model of docs/scaling.md, on the number of nodes in its row; the interval is where a "
        f"measurement would be. Empty where fewer than two numbers of {what} have ended.",
    )


def _point(each: Result) -> Point:
    # A measured point as the cost model wants it: seconds per step.
    point, batch, speed = each.point, each.global_batch or 1, each.samples_per_second
    seconds = batch / speed.estimate if speed else 0.0
    return Point(gpus=point.gpus, nodes=point.nodes, samples_per_gpu=batch / point.gpus, time=seconds)


# -- releases of an image -----------------------------------------------------------------------------------------

MEASURED = "this sweep"


class PublishedRelease(catalogue.Strict):
    release: str
    machine: str
    speed_up: float  # over the first one of its figure


class PublishedReleases(catalogue.Strict):
    source: str
    conditions: str
    figures: tuple[PublishedRelease, ...]


def published(benchmark: str) -> PublishedReleases | None:
    path = paths.benchmark_folder(benchmark) / "published_releases.toml"
    return catalogue.parse(PublishedReleases, path) if path.exists() else None


def releases_table(results: Sequence[Result], figure: PublishedReleases | None) -> Table:
    """Return a row per release and number of GPUs, with its speed-up over the first release on as many."""
    rows: list[tuple[Cell, ...]] = []
    first: dict[tuple[object, ...], Result] = {}
    for each in results:
        base = first.setdefault((each.point.nodes, each.point.gpus, each.point.precision), each)
        speed = each.samples_per_second.estimate if each.samples_per_second else None
        rows.append((each.point.image, f"{each.point.gpus} GPUs", speed, each.times_as_fast_as(base), MEASURED))
    note = "Samples per second of training; speed-up over the first release on as many GPUs."
    if figure:
        rows += [(each.release, each.machine, None, each.speed_up, "published") for each in figure.figures]
        note += f" Published: {figure.source}; {figure.conditions}; not measured here."
    return Table(
        title="Speed-up by release of the image",
        columns=("release", "machine", "samples/s", "speed-up", "from"),
        formats={"samples/s": ",.1f", "speed-up": ".2f"},
        rows=tuple(rows),
        note=note,
    )


def releases_figure(table: Table) -> Figure | None:
    known = tuple(row for row in table.rows if row[3] is not None)
    if not any(row[4] == MEASURED for row in known):
        return None
    return bars("release-sweep", replace(table, rows=known), label=(0, 1, 4), value=3, axis="speed-up")


# -- the report of a sweep ----------------------------------------------------------------------------------------


def tables_of(folder: Folder[Sweep], results: Sequence[Result], predict: Sequence[int] = ()) -> list[Table]:
    """Return the throughput, next to that of published releases, and what is predicted of other numbers of GPUs."""
    tables = [throughput_table(results)]
    if folder.study.images:
        tables.append(releases_table(results, published(folder.study.request.name)))
    return [*tables, predictions(folder, results, predict)] if predict else tables


def write(folder: Folder[Sweep], results: Sequence[Result], tables: Sequence[Table]) -> list[Path]:
    """Write FOLDER/report with these tables and all that `encore report` says of the runs that have ended."""
    runs = [folder.run_of(each.point) for each in results if each.state == "done"]
    report = build_report([run.path for run in runs if run is not None])
    if folder.study.images:
        figure = releases_figure(tables[1])
    else:
        figure = speed_up_figure(speed_ups(results), tables[0], devices(results))
    drawn = (figure, *report.figures) if figure else report.figures
    return write_files(replace(report, tables=(*tables, *report.tables), figures=drawn), folder.path / "report")
