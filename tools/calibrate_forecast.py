"""Measure the accuracy of forecasts for unfinished runs, and by how much their intervals must be widened.

    python -m tools.calibrate_forecast training_results_v0.5 ... training_results_v5.1

overwrites encore/results/data/forecast.json. DIR: checkout of a round. Logs that reached the target are
cut after 5, 10 and 20 % of the time and after ten minutes, and the time is forecast without public runs of the same
round. ``held_out`` and ``by_round`` evaluate a round with the data of all other rounds; ``moves`` are for all rounds.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from encore.results.compare.forecast import (
    STAGES,
    Lengths,
    Pace,
    known_lengths,
    minutes_to_target,
    pace_of,
    spread,
    weighted_quantiles,
)
from encore.results.logs.parallel import map_files
from encore.results.logs.run_log import RunLog, read_run
from encore.results.logs.timing import marks_of
from encore.results.published.published import DATA
from encore.results.rules import later_name
from encore.results.scores.score import find_sets
from tools import Folders, run

CUTS: Mapping[str, float | None] = {"5 %": 0.05, "10 %": 0.1, "20 %": 0.2, "10 minutes": None}
LEAST_S = 720  # Runs shorter than this are not cut after ten minutes
# Fraction of the true times in the interval of the same rounds. Differences between rounds are larger than within one:
# slightly more than 90 % is needed for 90 % in a held-out round.
LEVEL = 0.905
FEWEST = 40  # minimum forecasts per stage for benchmark-specific moves

Judged = tuple[float, float, float]  # Whether it was inside, relative error, relative width


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A truncated log: the pace at that time, if known, and the true time."""

    cut: str
    pace: Pace | None
    elapsed: float
    minutes: float


@dataclass(frozen=True, kw_only=True)
class Read:
    """Converged runs in a set; the first one has the batch and hyperparameters for all."""

    benchmark: str
    round: str
    first: RunLog
    cuts: Sequence[Cut]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A forecast: quantiles (None without a forecast) and true time, as logarithms of minutes."""

    round: str
    cut: str
    stage: str
    times: Sequence[float] | None
    true: float


def cuts_of(log: RunLog) -> list[Cut]:
    seconds, marks = (log.minutes or 0.0) * 60, marks_of(log)
    cuts = []
    for name, share in CUTS.items():
        elapsed = 600.0 if share is None else share * seconds
        if share is not None or seconds >= LEAST_S:
            pace = pace_of([mark for mark in marks if mark.seconds <= elapsed])
            cuts.append(Cut(cut=name, pace=pace, elapsed=elapsed, minutes=log.minutes or 0.0))
    return cuts


def read_cut(path: Path, round_: str) -> tuple[RunLog, list[Cut]]:
    log = read_run(path, round_)
    cuts = cuts_of(log) if log.converged else []
    log.quality, log.phases, log.stated, log.progress = (), [], [], []
    return log, cuts


def read_sets(folder: Path) -> list[Read]:
    listed_sets = list(find_sets(folder))
    files = [file for _, files_of_set in listed_sets for file in files_of_set]
    round_ = folder.name.rpartition("_")[2]
    results = map_files(partial(read_cut, round_=round_), files)
    sets = []
    for _, files_of_set in listed_sets:
        read = [next(results) for _ in files_of_set]
        logs = [log for log, cuts in read if cuts]
        name = later_name(logs[0].benchmark, round_) if logs else None
        if name and logs[0].global_batch:
            cuts = [cut for _, of_run in read for cut in of_run]
            sets.append(Read(benchmark=name, round=round_, first=logs[0], cuts=cuts))
    return sets


def rows_of(sets: Iterable[Read], *held_out: str) -> list[Row]:
    """Forecast every truncated log without runs from the same round and from the rounds ``held_out``."""
    rows = []
    for read in sets:
        lengths = known_lengths(read.first, excluded_rounds={read.round, *held_out})
        rows += [row_of(read.round, cut, lengths) for cut in read.cuts]
    return rows


def row_of(round_: str, cut: Cut, lengths: Lengths | None) -> Row:
    times = minutes_to_target(cut.pace, lengths, cut.elapsed) if cut.pace and lengths else None
    return Row(
        round=round_,
        cut=cut.cut,
        stage=cut.pace.stage if cut.pace else "",
        times=None if times is None else tuple(times.tolist()),
        true=math.log(cut.minutes),
    )


def moves_of(rows: Sequence[Row], stage: str) -> list[float] | None:
    """Return the shifts of lower bound, median and upper bound; all rounds have equal weight."""
    forecasts = [row for row in rows if row.stage == stage and row.times]
    if len(forecasts) < FEWEST:
        return None
    of_round = {name: sum(row.round == name for row in forecasts) for name in {row.round for row in forecasts}}
    weights = np.array([1 / of_round[row.round] for row in forecasts])
    times = np.array([row.times for row in forecasts])
    true = np.array([row.true for row in forecasts])
    quantile = (1 + LEVEL) / 2
    below = weighted_quantiles(times[:, 0] - true, weights, [quantile])
    middle = weighted_quantiles(true - times[:, 1], weights, [0.5])
    above = weighted_quantiles(true - times[:, 2], weights, [quantile])
    return [round(float(move[0]), 5) for move in (below, middle, above)]


def of_benchmark(sets: Sequence[Read]) -> tuple[list[Row], dict[str, list[Row]]]:
    """Return the forecasts without the log's round, and by round the forecasts for other rounds without that round."""
    rounds = sorted({read.round for read in sets})
    held_out = {
        round_name: rows_of([read for read in sets if read.round != round_name], round_name) for round_name in rounds
    }
    return rows_of(sets), held_out


def judged(
    rows: Sequence[Row], held_out: Mapping[str, Sequence[Row]], pooled: Sequence[Row]
) -> list[tuple[Row, Judged]]:
    """Return the held-out forecasts with: true time inside the interval, error of the median, interval width."""
    results: list[tuple[Row, Judged]] = []
    moves: dict[tuple[str, str], list[float] | None] = {}
    for row in rows:
        if row.times is None:
            continue
        key = row.round, row.stage
        if key not in moves:
            elsewhere = [candidate for candidate in pooled if candidate.round != row.round]
            moves[key] = moves_of(held_out[row.round], row.stage) or moves_of(elsewhere, row.stage)
        below, middle, above = moves[key] or (0.0, 0.0, 0.0)
        lower, expected, upper = spread(np.array(row.times), below, middle, above)
        true = math.exp(row.true)
        is_inside = lower * (1 - 1e-9) <= true <= upper * (1 + 1e-9)
        results.append((row, (float(is_inside), abs(expected / true - 1), upper / lower - 1)))
    return results


def counted(forecasts: Sequence[Judged]) -> dict[str, object]:
    values = np.array(forecasts)
    middle = {"inside": values[:, 0].mean(), "error": np.median(values[:, 1]), "width": np.median(values[:, 2])}
    return {"forecasts": len(forecasts), **{key: round(float(value), 4) for key, value in middle.items()}}


def table(name: str, rows: Sequence[Row], results: Sequence[tuple[Row, Judged]]) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = []
    for cut in CUTS:
        runs, matches = sum(row.cut == cut for row in rows), [matches for row, matches in results if row.cut == cut]
        if runs:
            lines.append(
                {"benchmark": name, "cut": cut, "runs": runs, **(counted(matches) if matches else {"forecasts": 0})}
            )
    return lines


def by_round(results: Sequence[tuple[Row, Judged]]) -> list[dict[str, object]]:
    rounds = sorted({row.round for row, _ in results})
    return [{"round": name, **counted([forecast for row, forecast in results if row.round == name])} for name in rounds]


def main(folders: Folders) -> None:
    sets: dict[str, list[Read]] = defaultdict(list)
    for folder in folders:
        for read in read_sets(folder):
            sets[read.benchmark].append(read)
        print(folder.name, flush=True)
    names = sorted(sets)
    with ProcessPoolExecutor() as pool:
        by_benchmark = dict(zip(names, pool.map(of_benchmark, [sets[name] for name in names]), strict=True))
    lines, everything = [], [row for rows, _ in by_benchmark.values() for row in rows]
    total: list[tuple[Row, Judged]] = []
    moves: dict[str, dict[str, list[float]]] = {}
    for name, (rows, held_out) in by_benchmark.items():
        pooled = [row for other, (read, _) in by_benchmark.items() if other != name for row in read]
        results = judged(rows, held_out, pooled)
        total += results
        lines += table(name, rows, results)
        # Moves from a single round do not generalize: use the moves for all benchmarks.
        several = len({row.round for row in rows}) > 1
        moves[name] = {stage: read for stage in STAGES if several and (read := moves_of(rows, stage))}
        print(name, flush=True)
    lines += table("all", everything, total)
    moves["any"] = {stage: read for stage in STAGES if (read := moves_of(everything, stage))}
    content = {"level": LEVEL, "moves": moves, "held_out": lines, "by_round": by_round(total)}
    (DATA / "forecast.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    for line in (*lines, *content["by_round"]):
        print(line)


if __name__ == "__main__":
    run(main, __doc__)
