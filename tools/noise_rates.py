"""Measure how often ``encore compare`` classifies losses or qualities as outside of noise, for genuine and changed
runs.

    python -m tools.noise_rates                     # public sets, by benchmark and by round: 3 minutes
    python -m tools.noise_rates --runs results      # losses of run folders with several experiments

Runs are tested against other runs of the same set, first unchanged, then with each evaluation shifted by one, which
only a different training can explain. The digests contain at most 30 evaluations, so that longer runs are excluded.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from encore.results.compare.noise import LEVEL, Series, losses_of, qualities_of, run_in_band
from encore.results.compare.run_set import digests, load_run_sets
from encore.results.published.published import DATA
from encore.results.rules import ROUNDS
from encore.results.table import Table
from tools import run

OF_A_SET = 2  # Runs that are tested
LEAST = 5  # Minimum runs in a set


def late(series: Series) -> Series:
    # The same values one evaluation later
    return replace(series, values=(series.values[0], *series.values[:-1]))


def trials(
    sets: Sequence[Series], count: int | None, number: int, chance: random.Random
) -> Iterator[tuple[Series, list[Series]]]:
    # Yield a run and the other runs in the set, all or ``count``; equal runs count once
    runs = list({other.values: other for other in sets}.values())
    for subject in chance.sample(runs, min(number, len(runs))) if len(runs) >= max(LEAST, (count or 0) + 1) else ():
        rest = [other for other in runs if other is not subject]
        yield subject, rest if count is None else chance.sample(rest, count)


def measured(sets: Sequence[Series], count: int | None, is_loss: bool, seed: int = 0) -> Counter[str]:
    # Numbers of runs that were tested, and that were outside as they are and late
    counts: Counter[str] = Counter()
    number = len(sets) if is_loss else OF_A_SET
    for subject, rest in trials(sets, count, number, random.Random(str((len(sets), count, seed)))):
        counts["tested"] += 1
        counts["outside"] += run_in_band(subject, rest, is_loss, LEVEL).first is not None
        if count is None and len(subject.at) > 1:
            counts["late tested"] += 1
            counts["late"] += run_in_band(late(subject), rest, is_loss, LEVEL).first is not None
    return counts


def table(title: str, name: str, rows: dict[str, Counter[str]]) -> str:
    shares = {
        key: (
            row["tested"],
            *(
                100 * row[top] / row[of] if row[of] else None
                for top, of in (("outside", "tested"), ("late", "late tested"))
            ),
        )
        for key, row in rows.items()
    }
    columns = (name, "runs tested", "outside, %", "one evaluation late, %")
    rates = Table(title=title, columns=columns, rows=tuple((key, *row) for key, row in shares.items()))
    return replace(rates, formats=dict.fromkeys(columns[2:], ".1f")).as_markdown()


def main(
    runs: Annotated[list[Path], typer.Option(help="trees of run folders; default: the public sets")] = (),
) -> None:
    rows: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    if runs:
        sides = [run_set for root in runs for run_set in load_run_sets(root)]
        for benchmark in sorted({run_set.benchmark or "?" for run_set in sides}):
            sets = [series for run_set in sides if run_set.benchmark == benchmark for series in losses_of(run_set)]
            for count in (2, 3, 4, 6):
                for seed in range(10):
                    rows["runs"][f"{benchmark}, against {count}"] += measured(sets, count, is_loss=True, seed=seed)
    else:
        rounds = [name for name in ROUNDS if (DATA / "digests" / f"{name}.jsonl.xz").is_file()]
        for run_set in (run_set for name in rounds for run_set in digests(name)):
            for sets in qualities_of(run_set).values():
                counts = measured(sets, None, is_loss=False)
                for kind, key in (
                    ("benchmark", run_set.benchmark),
                    ("round", run_set.round),
                    ("runs", "all of the others"),
                ):
                    rows[kind][key or "?"] += counts
                for count in (2, 3, 4, 9):
                    rows["runs"][f"{count}"] += measured(sets, count, is_loss=False)
    for kind, counts in rows.items():
        print(table(kind, kind, {key: series for key, series in counts.items() if series["tested"]}), end="\n\n")


if __name__ == "__main__":
    run(main, __doc__)
