"""Measures how often ``encore compare`` calls the losses or qualities of genuine runs other than noise, and of others.

    python -m tools.noise_rates                     # public sets, by benchmark and by round: 3 minutes
    python -m tools.noise_rates --runs results      # losses of run folders with several experiments

Of each set, runs are tested against others of the same set, and once more as if each evaluation came one later, which
nothing but another training explains. The digests keep 30 evaluations at most, so that longer runs are left out.
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
LEAST = 5  # Runs of a set that is measured


def late(series: Series) -> Series:
    # The same values one evaluation later
    return replace(series, values=(series.values[0], *series.values[:-1]))


def trials(
    every: Sequence[Series], count: int | None, number: int, chance: random.Random
) -> Iterator[tuple[Series, list[Series]]]:
    # Yield runs with others of their set, all of them or ``count``; of runs that are equal there is one
    runs = list({each.values: each for each in every}.values())
    for one in chance.sample(runs, min(number, len(runs))) if len(runs) >= max(LEAST, (count or 0) + 1) else ():
        others = [each for each in runs if each is not one]
        yield one, others if count is None else chance.sample(others, count)


def measured(every: Sequence[Series], count: int | None, is_loss: bool, seed: int = 0) -> Counter[str]:
    # Numbers of runs that were tested, and that were outside as they are and late
    found: Counter[str] = Counter()
    number = len(every) if is_loss else OF_A_SET
    for one, others in trials(every, count, number, random.Random(str((len(every), count, seed)))):
        found["tested"] += 1
        found["outside"] += run_in_band(one, others, is_loss, LEVEL).first is not None
        if count is None and len(one.at) > 1:
            found["late tested"] += 1
            found["late"] += run_in_band(late(one), others, is_loss, LEVEL).first is not None
    return found


def table(title: str, name: str, rows: dict[str, Counter[str]]) -> str:
    shares = {
        key: (
            each["tested"],
            *(
                100 * each[top] / each[of] if each[of] else None
                for top, of in (("outside", "tested"), ("late", "late tested"))
            ),
        )
        for key, each in rows.items()
    }
    columns = (name, "runs tested", "outside, %", "one evaluation late, %")
    made = Table(title=title, columns=columns, rows=tuple((key, *each) for key, each in shares.items()))
    return replace(made, formats=dict.fromkeys(columns[2:], ".1f")).as_markdown()


def main(
    runs: Annotated[list[Path], typer.Option(help="trees of run folders; default: the public sets")] = (),
) -> None:
    rows: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    if runs:
        sides = [side for root in runs for side in load_run_sets(root)]
        for benchmark in sorted({side.benchmark or "?" for side in sides}):
            every = [each for side in sides if side.benchmark == benchmark for each in losses_of(side)]
            for count in (2, 3, 4, 6):
                for seed in range(10):
                    rows["runs"][f"{benchmark}, against {count}"] += measured(every, count, is_loss=True, seed=seed)
    else:
        kept = [name for name in ROUNDS if (DATA / "digests" / f"{name}.jsonl.xz").is_file()]
        for side in (side for name in kept for side in digests(name)):
            for every in qualities_of(side).values():
                found = measured(every, None, is_loss=False)
                for kind, key in (("benchmark", side.benchmark), ("round", side.round), ("runs", "all of the others")):
                    rows[kind][key or "?"] += found
                for count in (2, 3, 4, 9):
                    rows["runs"][f"{count}"] += measured(every, count, is_loss=False)
    for kind, found in rows.items():
        print(table(kind, kind, {key: each for key, each in found.items() if each["tested"]}), end="\n\n")


if __name__ == "__main__":
    run(main, __doc__)
