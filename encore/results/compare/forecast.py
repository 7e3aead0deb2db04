"""Forecast an unfinished run's time to target, from its pace and the lengths of other runs.

    from encore.results.compare.forecast import forecast
    result = forecast(read_run("result_0.txt"))
    print(result.minutes, result.low, result.high)

Remaining time: current pace (including evaluations and startup) times remaining length. The length to the target is
estimated from the epochs or samples of all public runs and reference convergence points of the benchmark. They are
scaled to this global batch with a regression, and weighted by similarity of batch and hyperparameters; each set and
each point has the same total weight. The interval is the 5 % and 95 % quantile times the pace, widened by the
calibration in ``data/forecast.json``: per benchmark and amount of pace data, the margin that covers 90 % of the true
times in public logs (conformalized quantile regression: Romano et al., NeurIPS 2019).
``tools/calibrate_forecast.py`` measures the calibration, for each round from the other rounds.
"""

import functools
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from encore.results.compare.expected import Forecast
from encore.results.compliance.convergence import points_folder
from encore.results.compliance.own_rules import small_data_findings
from encore.results.format import count_of
from encore.results.logs.metrics import lines_of, record_of
from encore.results.logs.run_log import Reason, RunLog, read_run
from encore.results.logs.timing import Length, Mark, in_unit, length_of, marks_of
from encore.results.published.published import DATA, DIGESTS
from encore.results.published.published import lines_of as digests_of
from encore.results.rules import benchmark_of, canonical, later_name

Numbers = NDArray[np.float64]

QUANTILES = (0.05, 0.5, 0.95)
# Distances between global batches, as natural logarithms: weight exp(-1/2) relative to an equal batch, and limit for
# the regression of the length on the batch
_NEAR_BATCH, _FAR_BATCH = 0.25, 1.0
# A set with half the hyperparameters equal has weight exp(-15) relative to a set with all equal
_MISMATCH_PENALTY = 30.0
_POINT_SIMILARITY = 0.5  # Assumed fraction of equal hyperparameters for reference points: the rules fix half of them
_MIN_SHARED_KEYS = 3  # Minimum of hyperparameters in both logs for a meaningful fraction
_OTHER_UNIT = math.log(4)  # Reference points further from the submitted runs are in another unit
_CONVERGENCE = re.compile(
    r"opt_|lars|lamb|sgd|adam|learning|warmup|decay|momentum|seq|accum|epoch|label|weight|step|lora|max_"
)
_LARGEST = 1e11  # Reference points of runs that did not converge have an infinite number
# Amount of pace data, by number of evaluations
STAGES = ("first mark", "marks", "evaluations", "many evaluations")
_MANY_EVALUATIONS = 4


class KnownLengths(NamedTuple):
    """Logarithms of the lengths to the target, for one set of public runs or one reference point."""

    round: str
    batch: float
    lengths: Numbers
    hyperparameters: Mapping[str, object] | None  # None: a reference point


class Lengths(NamedTuple):
    """Logarithms of the expected lengths and their weights, with the number of public runs and reference points."""

    values: Numbers
    weights: Numbers
    runs: int
    points: int

    def quantiles(self, levels: Sequence[float] = QUANTILES) -> Numbers:
        return weighted_quantiles(self.values, self.weights, levels)


class Pace(NamedTuple):
    """Where a run is, and seconds per epoch or sample since; ``stage`` is how much that rests on."""

    seconds: float
    length: float
    seconds_per_unit: float
    stage: str


def forecast(run: RunLog, marks: Sequence[Mark] = (), own_lengths: Sequence[float] = ()) -> Forecast | None:
    """Forecast when the run reaches its target; None if its log does not contain any progress yet.

    ``marks``: progress from Encore's metrics. ``own_lengths``: lengths to the target of runs with the same
    configuration.
    """
    marks_seen = marks_of(run, marks)
    pace = pace_of(marks_seen)
    benchmark = benchmark_of(run.benchmark)
    if pace is None or benchmark is None or run.start_s is None:
        return None
    elapsed = max((run.last_s or 0.0) - run.start_s, pace.seconds)
    result = Forecast(
        run=run.path.name if run.path.name != "result.txt" else f"{run.path.parent.name}/{run.path.name}",
        elapsed_minutes=elapsed / 60,
        length=pace.length,
        unit=benchmark.points_in,
        minutes_per_length=pace.seconds_per_unit / 60,
        why="the length of a run is not known",
    )
    lengths = known_lengths(run, own_lengths)
    if lengths is None:
        return result
    times = minutes_to_target(pace, lengths, elapsed)
    if times is None:
        return replace(result, why=f"it has trained further than each of {count_of(lengths.runs, 'known run')}")
    low, middle, high = widen(times, later_name(run.benchmark, run.round), pace.stage)
    return replace(
        result,
        minutes=float(max(middle, elapsed / 60)),
        low=float(max(low, elapsed / 60)),
        high=float(high),
        length_to_target=max(math.exp(lengths.quantiles([0.5])[0]), pace.length),
        runs=lengths.runs,
        points=lengths.points,
        why="",
    )


def forecast_runs(runs: Sequence[RunLog], folder: Path | None = None) -> list[Forecast]:
    """Forecast all runs in a set that did not finish or reach their target yet.

    Runs of the set that reached the target provide lengths. For an Encore run folder, ``folder``, only experiments
    without a result file are forecast: a result file without run_stop belongs to a crashed run.
    """
    if folder is not None and (folder / "run.json").is_file():
        unfinished = [
            read_run(log)
            for log in sorted(folder.glob("experiment_*/result.txt"))
            if log.is_file() and not (folder / f"{log.parent.name.replace('experiment', 'result')}.txt").exists()
        ]
    else:
        unfinished = [run for run in runs if run.reason is Reason.NO_STOP]
    waiting = [run for run in unfinished if not (run.targets and run.met)]
    forecasts = [forecast(run, read_marks(run), _own_lengths(runs, run.benchmark)) for run in waiting]
    return [result for result in forecasts if result is not None]


# Lengths to the target of the benchmark's converged runs, in the benchmark's unit
def _own_lengths(runs: Sequence[RunLog], benchmark: str | None) -> list[float]:
    benchmark_info = benchmark_of(benchmark)
    reached = [run for run in runs if run.converged and run.benchmark == benchmark and benchmark_info]
    lengths = [(run, length) for run in reached if (length := length_of(run))]
    unit = benchmark_info.points_in if benchmark_info else ""
    return [
        converted
        for run, length in lengths
        if (converted := in_unit(length, unit, run.train_samples, run.global_batch))
    ]


def read_marks(run: RunLog) -> list[Mark]:
    """Return the first and latest step since the last start, from ``metrics.jsonl`` in the log's folder."""
    benchmark, start_s = benchmark_of(run.benchmark), run.start_s
    start, steps = "", list[str]()
    for line in lines_of(run.path.parent / "metrics.jsonl") if run.path.name == "result.txt" else ():
        if '"kind": "start"' in line:
            start, steps = line, []
        elif '"kind": "step"' in line and line.endswith("\n"):
            steps[1:] = [line]
    start_record = record_of(start)
    if benchmark is None or start_record is None or start_s is None or not start_record.steps_per_epoch:
        return []
    step_length = (
        start_record.global_batch_size if benchmark.points_in == "samples" else 1 / start_record.steps_per_epoch
    )
    records = [record for line in steps if (record := record_of(line)) and record.time > start_s and record.step]
    return [Mark(record.time - start_s, record.step * step_length) for record in records if step_length]


def pace_of(marks: Sequence[Mark]) -> Pace | None:
    """Return the pace between the first and last evaluation, or between the first and last mark."""
    evaluated = [mark for mark in marks if mark.evaluated]
    if not marks:
        return None
    if len(evaluated) > 1:
        marks, stage = evaluated, STAGES[3] if len(evaluated) >= _MANY_EVALUATIONS else STAGES[2]
    else:
        marks, stage = (marks, STAGES[1]) if len(marks) > 1 else ([Mark(0.0, 0.0), *marks], STAGES[0])
    first, last = marks[0], marks[-1]
    return Pace(last.seconds, last.length, (last.seconds - first.seconds) / (last.length - first.length), stage)


def minutes_to_target(pace: Pace, lengths: Lengths, elapsed: float) -> Numbers | None:
    """Return the quantiles of the logarithm of the minutes, from ``elapsed`` seconds on."""
    remaining = lengths.values > math.log(pace.length * (1 + 1e-4))
    if not remaining.any() or not lengths.weights[remaining].sum() > 0:
        return None
    seconds = pace.seconds + (np.exp(lengths.values[remaining]) - pace.length) * pace.seconds_per_unit
    minutes = np.log(np.maximum(seconds, elapsed) / 60)
    return weighted_quantiles(minutes, lengths.weights[remaining], QUANTILES)


def widen(times: Numbers, benchmark: str | None, stage: str) -> tuple[float, float, float]:
    """Return the lower end, the median and the upper end in minutes, calibrated with public logs."""
    moves = _calibration()
    below, middle, above = moves.get(benchmark, {}).get(stage) or moves["any"][stage]
    return spread(times, below, middle, above)


def spread(times: Numbers, below: float, middle: float, above: float) -> tuple[float, float, float]:
    low, expected, high = times[0] - below, times[1] + middle, times[2] + above
    return math.exp(min(low, expected)), math.exp(expected), math.exp(max(high, expected))


@functools.cache
def _calibration() -> Any:
    return json.loads((DATA / "forecast.json").read_text("utf-8"))["moves"]


def known_lengths(
    run: RunLog, own_lengths: Sequence[float] = (), excluded_rounds: Collection[str] = ()
) -> Lengths | None:
    """Return lengths to the target of similar runs, without the public sets of ``excluded_rounds``.

    Public runs do not apply to toy data sets: only ``own_lengths`` count.
    """
    name = later_name(run.benchmark, run.round)
    batch = run.global_batch if (run.global_batch or 0) > 0 else None
    public = public_lengths(name) if name and batch and not small_data_findings(run) else ()
    sets = [length_set for length_set in public if length_set.round not in excluded_rounds]
    if own_lengths:
        sets.append(KnownLengths("", batch or 1.0, np.log(np.array(own_lengths)), run.hyperparameters))
    if not sets:
        return None
    values = np.concatenate([length_set.lengths for length_set in sets])
    counts = [len(length_set.lengths) for length_set in sets]
    log_ratios = np.repeat([math.log(length_set.batch / (batch or length_set.batch)) for length_set in sets], counts)
    set_weights = np.repeat([1 / count for count in counts], counts)
    similarities = np.repeat(
        [_similarity(run.hyperparameters, length_set.hyperparameters) for length_set in sets], counts
    )
    batch_weights = (
        np.exp(-0.5 * (log_ratios / _NEAR_BATCH) ** 2)
        + 0.02 * np.exp(-0.5 * (log_ratios / _FAR_BATCH) ** 2)
        + 1e-5 * np.exp(-abs(log_ratios))
    )
    moved = values - _slope(log_ratios, values, set_weights) * log_ratios
    runs = sum(len(length_set.lengths) for length_set in sets if length_set.hyperparameters is not None)
    points = sum(length_set.hyperparameters is None for length_set in sets)
    return Lengths(moved, set_weights * batch_weights * similarities, runs, points)


# Slope of the log length over the log batch, shrunk to 0 if the batches hardly differ
def _slope(log_ratios: Numbers, values: Numbers, set_weights: Numbers) -> float:
    weights = set_weights * (np.exp(-0.5 * (log_ratios / _FAR_BATCH) ** 2) + 1e-3 * np.exp(-abs(log_ratios)))
    total = weights.sum()
    log_ratios = log_ratios - (weights * log_ratios).sum() / total
    values = values - (weights * values).sum() / total
    return float((weights * log_ratios * values).sum() / ((weights * log_ratios**2).sum() + 0.05 * total))


def _similarity(current: Mapping[str, object], baseline: Mapping[str, object] | None) -> float:
    share = _POINT_SIMILARITY
    if baseline is not None:
        shared_keys = [key for key in current.keys() & baseline.keys() if _CONVERGENCE.search(key)]
        share = (
            sum(current[key] == baseline[key] for key in shared_keys) / len(shared_keys)
            if len(shared_keys) >= _MIN_SHARED_KEYS
            else 0.3
        )
    return math.exp(-_MISMATCH_PENALTY * (1 - share))


@functools.cache
def public_lengths(benchmark: str) -> tuple[KnownLengths, ...]:
    """Return all public sets and reference points for a benchmark (current name) that count in its unit."""
    info = benchmark_of(benchmark)
    unit = info.points_in if info else "epochs"
    rounds = sorted(file.name.removesuffix(".jsonl.xz") for file in DIGESTS.glob("*.jsonl.xz"))
    sets = [length_set for name in rounds for length_set in _read_round(benchmark, name, unit)]
    points = _reference_points(benchmark)
    if sets:
        middle = float(np.median(np.concatenate([length_set.lengths for length_set in sets])))
        points = [
            length_set for length_set in points if abs(float(np.median(length_set.lengths)) - middle) < _OTHER_UNIT
        ]
    return (*sets, *points)


def _read_round(benchmark: str, round_: str, unit: str) -> list[KnownLengths]:
    info = benchmark_of(benchmark)
    names = {benchmark, info.earlier if info and info.earlier else benchmark}
    starts = tuple(f'"benchmark":{json.dumps(name)},' for name in names if later_name(name, round_) == benchmark)
    sets = []
    for line in digests_of(round_)[1:]:
        if not any(start in line for start in starts):
            continue
        entry = json.loads(line)
        runs = zip(entry["lengths"], entry["reasons"], strict=True)
        reached = [Length(length, entry["unit"]) for length, reason in runs if length and reason is None]
        size, batch = entry["train_samples"], entry["global_batch"]
        lengths = [converted for length in reached if (converted := in_unit(length, unit, size, batch))]
        if lengths and entry["global_batch"]:
            sets.append(
                KnownLengths(round_, entry["global_batch"], np.log(np.array(lengths)), entry["hyperparameters"])
            )
    return sets


# Distinct reference convergence points of all rounds
def _reference_points(benchmark: str) -> list[KnownLengths]:
    points: dict[tuple[float, ...], KnownLengths] = {}
    for file in sorted(points_folder().glob("training_*/rcps_*.json")):
        round_ = "v" + file.parent.name.removeprefix("training_").removesuffix(".0")
        if later_name(canonical(file.stem.removeprefix("rcps_")), round_) != benchmark:
            continue
        for point in json.loads(file.read_text("utf-8")).values():
            needed: Sequence[float] = next(
                (value for key, value in point.items() if key.lower().endswith("to converge")), ()
            )
            lengths = sorted(float(length) for length in needed if 0 < length < _LARGEST)
            if len(lengths) > 1:
                reference = KnownLengths("", float(point["BS"]), np.log(np.array(lengths)), None)
                points.setdefault((reference.batch, *lengths), reference)
    return list(points.values())


def weighted_quantiles(values: Numbers, weights: Numbers, levels: Sequence[float]) -> Numbers:
    order = np.argsort(values)
    ordered = weights[order]
    positions = (np.cumsum(ordered) - 0.5 * ordered) / ordered.sum()
    return np.interp(levels, positions, values[order])
