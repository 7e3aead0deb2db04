"""Measure how often the verdicts of ``encore compare`` are right, on simulated runs and on public sets.

    python -m tools.calibrate_verdicts                      # a minute; rewrites encore/results/data/calibration.csv
    python -m tools.calibrate_verdicts --logs DIR --logs DIR    # also the rows of public sets, from these trees of logs

Pairs of sets are sampled from one population, and all times of one are multiplied by a known factor, alternating in
direction. Public sets are split at random instead. Everything is seeded. ``make docs`` puts the table in
docs/compare.md.
"""

import csv
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from encore.results.compare.compare import WITHIN, Verdict, decide, length_factor, make_factor
from encore.results.compare.run_set import TrainedRun, length_samples
from encore.results.logs.timing import length_of
from encore.results.published.tables import COLUMNS, DATA_FILE, load_calibration
from encore.results.scores.score import score_folder
from encore.results.statistics import Sample
from tools import run

Runs = list[tuple[float, float]]  # minutes and epochs per run
Population = Callable[[random.Random], tuple[float, float]]

TRIALS = 2000
SPLITS = 20
APART = (0.0, 0.05, 0.1, 0.2)
SIZES = ((1, 5), (3, 5), (5, 5), (10, 10))
PUBLIC_SIZES = ((1, 4), (3, 5), (5, 5))
_STEP_NOISE = 0.003  # standard deviation of a system's time per epoch, as in public sets with equal epochs
_DIFFERENT = (Verdict.FASTER, Verdict.SLOWER, Verdict.CONVERGES_DIFFERENTLY)


def population(epochs: Callable[[random.Random], float], spread: float = _STEP_NOISE) -> Population:
    # Runs with these epochs and a random time per epoch

    def draw(chance: random.Random) -> tuple[float, float]:
        length = epochs(chance)
        return length * chance.gauss(1.0, spread), length

    return draw


def stepped(epochs: int, extra: int, share: float) -> Population:
    # Runs; the fraction ``share`` needs ``extra`` more epochs, for evaluations every epoch or every four
    return population(lambda chance: float(epochs + (extra if chance.random() < share else 0)))


POPULATIONS: dict[str, Population] = {
    **{f"time per epoch, spread {n} %": population(lambda chance: 1.0, n / 100) for n in (1, 2, 4)},
    "epochs, spread 4 %": population(lambda chance: chance.lognormvariate(0.0, 0.04)),
    "epochs, spread 8 %": population(lambda chance: chance.lognormvariate(0.0, 0.08)),
    "40 epochs, 44 in a tenth of the runs": stepped(40, 4, 0.1),
    "4 epochs, 5 in a fifth of the runs": stepped(4, 1, 0.2),
    "14 epochs, 15 in half of the runs": stepped(14, 1, 0.5),
}
# Sets that converge differently: few runs may not show it
SHIFTS: dict[str, tuple[Population, Population]] = {
    "4 epochs in all runs against 5 in 3 of 10": (stepped(4, 1, 0.0), stepped(4, 1, 0.3)),
    "4 epochs in all runs against 5 in 6 of 10": (stepped(4, 1, 0.0), stepped(4, 1, 0.6)),
    "40 epochs in all runs against 44 in 8 of 10": (stepped(40, 4, 0.0), stepped(40, 4, 0.8)),
}


def verdict_of(current: Runs, baseline: Runs) -> Verdict:
    # The verdict on two sets of runs that are comparable
    sides = []
    for runs in (current, baseline):
        trimmed = 1 if len(runs) >= 5 else 0
        included = range(trimmed, len(runs) - trimmed)
        trained = [
            TrainedRun(*run, reached=True, counted=number in included) for number, run in enumerate(sorted(runs))
        ]
        sides.append((Sample.of([minutes for minutes, _ in runs], trimmed), *length_samples(trained, trimmed)))
    (score, lengths, per_length), (their_score, their_lengths, their_per_length) = sides
    time = make_factor("time", "min", score, their_score)
    if time is None:
        raise ValueError("a set without runs")
    per_epoch = make_factor("minutes per epoch", "min", per_length, their_per_length)
    epochs = length_factor("epochs", lengths, their_lengths)
    return decide(time, per_epoch, epochs, WITHIN, single=len(current) == 1)[0]


def tally(pairs: Iterator[tuple[Runs, Runs]], apart: float) -> Counter[str]:
    # Count reproduced and different verdicts, with the current set slower or faster by ``apart``
    counts: Counter[str] = Counter()
    for number, (current, baseline) in enumerate(pairs):
        times = 1 + apart if number % 2 else 1 / (1 + apart)
        verdict = verdict_of([(minutes * times, epochs) for minutes, epochs in current], baseline)
        counts["trials"] += 1
        counts["reproduced"] += verdict is Verdict.REPRODUCED
        counts["different"] += verdict in _DIFFERENT
    return counts


def simulated(
    name: str, sizes: tuple[int, int], trials: int, populations: tuple[Population, Population]
) -> Iterator[tuple[Runs, Runs]]:
    # Yield pairs of sets, deterministic
    chance = random.Random(f"{name} {sizes}")
    for _ in range(trials):
        current, baseline = ([draw(chance) for _ in range(size)] for draw, size in zip(populations, sizes, strict=True))
        yield current, baseline


def split(sets: Sequence[Runs], sizes: tuple[int, int], times: int) -> Iterator[tuple[Runs, Runs]]:
    # Yield disjoint parts per set
    chance = random.Random(f"public {sizes}")
    for runs in sets:
        for _ in range(times):
            sample = chance.sample(runs, sum(sizes))
            yield sample[: sizes[0]], sample[sizes[0] :]


def public_sets(folders: Sequence[Path]) -> list[Runs]:
    # Every set below the folders with a score, epochs and enough runs to be split
    sets = []
    for root in folders:
        for score in score_folder(root):
            lengths = [(run.minutes, length_of(run)) for run in score.converged]
            runs = [(minutes, length.value) for minutes, length in lengths if minutes and length and length.value]
            if score.score_minutes is not None and len(runs) >= min(map(sum, PUBLIC_SIZES)):
                sets.append(runs)
    return sets


def row(population: str, sizes: tuple[int, int], apart: str, tallied: Counter[str]) -> dict[str, str]:
    # A line of the file
    counts = [str(tallied[name]) for name in ("trials", "reproduced", "different")]
    return dict(zip(COLUMNS, (population, *map(str, sizes), apart, *counts), strict=True))


def rows_of_simulation() -> Iterator[dict[str, str]]:
    for name, sizes, apart in itertools.product(POPULATIONS, SIZES, APART):
        pairs = simulated(name, sizes, TRIALS, (POPULATIONS[name], POPULATIONS[name]))
        yield row(name, sizes, f"{apart:g}", tally(pairs, apart))
    for name, sizes in itertools.product(SHIFTS, SIZES):
        yield row(name, sizes, "shift", tally(simulated(name, sizes, TRIALS, SHIFTS[name]), 0.0))


def rows_of_public_sets(sets: Sequence[Runs]) -> Iterator[dict[str, str]]:
    # Yield the rows for public sets
    for sizes in PUBLIC_SIZES:
        enough = [runs for runs in sets if len(runs) >= sum(sizes)]
        for apart in APART:
            counts = tally(split(enough, sizes, SPLITS), apart)
            yield row(f"{len(enough)} public sets, split", sizes, f"{apart:g}", counts)


def main(logs: Annotated[list[Path], typer.Option(help="a tree of public logs")] = ()) -> None:
    rows = list(rows_of_simulation())
    if logs:
        rows += rows_of_public_sets(public_sets(logs))
    elif DATA_FILE.is_file():
        rows += [line for line in load_calibration() if "public" in line["population"]]
    with DATA_FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    run(main, __doc__)
