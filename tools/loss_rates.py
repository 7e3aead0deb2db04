"""Measure how often ``encore compare`` finds that training losses differ, for genuine and changed runs.

    $ python -m tools.loss_rates                                  # public sets with losses in their logs: a minute
    $ python -m tools.loss_rates --reference RUN --changed RUN    # run folders with several experiments

Runs are cut at fractions of the reference's median length. Public sets are tested against the other runs of the set,
against sets with equal hyperparameters of other submitters, and against sets with another learning rate or batch.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from encore.results.compare.loss_curve import compare_losses, loss_curves
from encore.results.compare.run_set import LossCurve, RunSet, digests, load_run_set
from encore.results.published.published import DATA
from encore.results.rules import ROUNDS
from encore.results.table import Table
from tools import run

CUTS = (0.1, 0.2, 0.5, 1.0)
LEAST = 5  # Minimum runs in a set
REPEATS = 5

Rates = defaultdict[tuple[str, str, float], Counter[str]]


def cut(curve: LossCurve, samples: float) -> LossCurve:
    count = sum(position <= samples for position in curve[0])
    return curve[0][:count], curve[1][:count]


def measure(rates: Rates, name: str, kind: str, runs: Sequence[LossCurve], references: Sequence[LossCurve]) -> None:
    length = median(curve[0][-1] for curve in references)
    for fraction in CUTS:
        tested = [cut(curve, fraction * length) for curve in runs]
        verdict = compare_losses(tested, references).verdict if all(curve[0] for curve in tested) else "no losses"
        rates[name, kind, fraction][verdict] += 1


def key_of(run_set: RunSet) -> tuple[object, ...]:
    names = ("opt_base_learning_rate", "opt_learning_rate_warmup_steps")
    return (run_set.benchmark, run_set.round, run_set.global_batch, *map(run_set.hyperparameters.get, names))


# Pairs of sets and what differs, if that is one of the hyperparameters or the submitter
def pairs(sets: Sequence[RunSet]) -> Iterator[tuple[RunSet, RunSet, str]]:
    for reference in sets:
        for changed in sets:
            (*kind, batch, rate, warmup), (*other_kind, other_batch, other_rate, other_warmup) = map(
                key_of, (reference, changed)
            )
            if kind != other_kind or changed is reference or not isinstance(rate, float | int):
                continue
            ratio = float(other_rate) / rate if isinstance(other_rate, float | int) else 0.0
            if (batch, rate, warmup) == (other_batch, other_rate, other_warmup):
                yield reference, changed, "equal hyperparameters"
            elif (batch, warmup) == (other_batch, other_warmup) and abs(ratio - 1.25) < 0.02:
                yield reference, changed, "learning rate x 1.25"
            elif ratio == 1.0 and other_batch == 2 * batch:
                yield reference, changed, "batch x 2"
            elif (batch, ratio) == (other_batch, 1.0):
                yield reference, changed, "other warm-up"


def measure_public(rates: Rates, chance: random.Random, tested: int) -> None:
    rounds = [name for name in ROUNDS if (DATA / "digests" / f"{name}.jsonl.xz").is_file()]
    sets = [side for name in rounds for side in digests(name) if len(side.losses) >= LEAST]
    for side in sets:
        for _ in range(REPEATS):
            runs = list(side.losses)
            chance.shuffle(runs)
            measure(rates, side.benchmark or "?", "same set", runs[:tested], runs[tested:])
    by_kind = defaultdict(list)
    for reference, changed, kind in pairs(sets):
        by_kind[kind, reference.label].append((reference, changed))
    for (kind, _), candidates in sorted(by_kind.items()):
        reference, changed = chance.choice(candidates)
        measure(rates, reference.benchmark or "?", kind, chance.sample(changed.losses, tested), reference.losses)


def main(
    reference: Annotated[Path | None, typer.Option(help="run folder; default: the public sets")] = None,
    changed: Annotated[list[Path], typer.Option(help="run folder with another configuration; repeatable")] = (),  # type: ignore[assignment]
    tested: Annotated[int, typer.Option(min=1, help="number of runs that are tested together")] = 1,
) -> None:
    rates: Rates = defaultdict(Counter)
    chance = random.Random(0)
    if reference is None:
        measure_public(rates, chance, tested)
    else:
        curves = loss_curves(load_run_set(reference))
        for number in range(len(curves)):
            measure(rates, reference.name, "same set", [curves[number]], curves[:number] + curves[number + 1 :])
        for path in changed:
            for curve in loss_curves(load_run_set(path)):
                measure(rates, reference.name, path.name, [curve], curves)
    rows = []
    for name, kind in sorted({key[:2] for key in rates}):
        counts = [rates[name, kind, fraction] for fraction in CUTS]
        decided = [count["differs"] + count["matches"] for count in counts]
        shares = [100 * count["differs"] / of if of else None for count, of in zip(counts, decided, strict=True)]
        rows.append((name, kind, decided[-1], *shares))
    columns = ("benchmark", "tested runs", "tests", *(f"{100 * fraction:g} %" for fraction in CUTS))
    table = Table(title="Runs whose losses differ, %", columns=columns, rows=tuple(rows))
    print(table.as_markdown())


if __name__ == "__main__":
    run(main, __doc__)
