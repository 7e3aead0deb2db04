"""What the points of a study measured: samples per second in steady state, and the time to the target.

from encore.lab.studies.throughput import measured, throughput_table
print(throughput_table(measured(open_folder(path, Sweep))).as_markdown())
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from encore import files
from encore.lab.scaling.cost_model import Point, Prediction, fit_steps
from encore.lab.studies.folder import Folder, State
from encore.lab.studies.sweep import GridPoint, Sweep
from encore.results.logs.run_log import read_run
from encore.results.statistics import Sample
from encore.results.table import Cell, Table
from encore.run.follow import Tail

NOTE = (
    "Point: nodes x {devices}. Speed is that of training, without the first epoch and the evaluations; spread is its "
    "standard deviation over epochs. Speed-up against the fewest {devices}; efficiency is speed-up over the growth in "
    "{devices}. Waiting: share of the time without data. Minutes to the target, of the runs that reached it."
)
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
    speeds, warm = [], False
    for record in stream:
        if record["kind"] == "start":
            warm = False
        elif record["kind"] == "epoch":
            if warm:
                speeds.append(float(record["samples_per_second"]))
            warm = True
    return speeds or _by_steps(stream)


def _by_steps(stream: Sequence[dict[str, Any]]) -> list[float]:
    starts = [record for record in stream if record["kind"] == "start"]
    steps = [record for record in stream if record["kind"] == "step"]
    kept = steps[int(_STEADY * len(steps)) :]
    if not starts or len(kept) < 2 or kept[-1]["time"] <= kept[0]["time"]:
        return []
    count = kept[-1]["step"] - kept[0]["step"]
    return [count * starts[0]["global_batch_size"] / (kept[-1]["time"] - kept[0]["time"])]


def _base(results: Sequence[Result], precision: str | None) -> Result | None:
    known = [r for r in results if r.samples_per_second and r.point.precision == precision]
    return min(known, key=lambda r: (r.point.gpus, r.point.nodes), default=None)


def speed_ups(results: Sequence[Result]) -> dict[str, list[tuple[float, float]]]:
    """Return GPUs and speed-up over the fewest GPUs, by precision; of points with as many, the one on fewest nodes."""
    lines: dict[str, dict[float, float]] = {}
    for each in sorted(results, key=lambda r: (r.point.gpus, r.point.nodes)):
        base = _base(results, each.point.precision)
        if base and base.samples_per_second and each.samples_per_second:
            ratio = each.samples_per_second.estimate / base.samples_per_second.estimate
            lines.setdefault(each.point.precision or "throughput", {}).setdefault(each.point.gpus, ratio)
    return {name: sorted(found.items()) for name, found in lines.items()}


def throughput_table(results: Sequence[Result]) -> Table:
    """Return a row per point; speed-up and efficiency against the fewest GPUs of the same precision."""
    what, speed = devices(results), _speed(results)
    return Table(
        title=f"Throughput by number of {what}",
        columns=("point", "batch", speed, "spread", "speed-up", "efficiency", "waiting", "min", "reached"),
        formats={speed: ",.1f", "speed-up": ".3f", "efficiency": ".3f"},
        rows=tuple(_row(each, _base(results, each.point.precision)) for each in results),
        note=NOTE.format(devices=what),
    )


def _row(each: Result, base: Result | None) -> tuple[Cell, ...]:
    speed, ratio, efficiency = each.samples_per_second, None, None
    if speed and base and base.samples_per_second:
        ratio = speed.estimate / base.samples_per_second.estimate
        efficiency = ratio * base.point.gpus / each.point.gpus
    return (
        each.point.key,
        each.global_batch,
        speed.estimate if speed else None,
        f"{speed.cv:.1%}" if speed and speed.cv is not None else "",
        ratio,
        efficiency,
        f"{each.input_share:.0%}" if each.input_share is not None else "",
        each.minutes.estimate if each.minutes else None,
        f"{each.reached} of {each.runs}" if each.state == "done" else each.state,
    )


def predictions(folder: Folder[Sweep], results: Sequence[Result], gpus: Sequence[int]) -> Table:
    """Return samples per second on other numbers of GPUs, by the cost model fitted to the points of each precision.

    No row for a precision that ended on one number of GPUs only. Everything on one node is predicted on one
    node, however many GPUs that would have.
    """
    what, speed = devices(results), _speed(results)
    rows: list[tuple[Cell, ...]] = []
    for precision in dict.fromkeys(each.point.precision for each in results):
        known = [r for r in results if r.samples_per_second and r.point.precision == precision]
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
            rows.append(_predicted_row(precision, count, nodes, total, step))
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
    batch, speed = each.global_batch or 1, each.samples_per_second
    return Point(
        gpus=each.point.gpus,
        nodes=each.point.nodes,
        samples_per_gpu=batch / each.point.gpus,
        time=batch / speed.estimate if speed else 0.0,
    )


def _predicted_row(precision: str | None, count: int, nodes: int, total: int, step: Prediction) -> tuple[Cell, ...]:
    return (count, nodes, precision or "", total, total / step.value, total / step.high, total / step.low)
