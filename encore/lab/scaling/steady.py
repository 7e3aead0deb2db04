"""How to part a machine, hour by hour, so that its benchmarks are run most often a day.

    from encore.lab.scaling.steady import most_runs
    for phase in most_runs(jobs, gpus=8).phases:
        print(phase.share, phase.slots)

The steady state of a machine that is parted into slots, differently at different hours, is a linear program
(``scipy.optimize.linprog``): rounds a day are made as many as possible, no benchmark runs more than there are
slots of its size. Its columns are ways to part the machine. There are many, so they are made when they are
wanted (Gilmore and Gomory, "A linear programming approach to the cutting-stock problem", Operations Research 9,
1961): the next one is the knapsack that is worth most at the current prices of slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from encore.lab.scaling.curves import Option
from encore.lab.scaling.sharing import Job, one_by_one

_MINUTES_A_DAY = 1440
_NOTHING = 1e-7

_Use = tuple[int, Option]  # index of a job, and the option it runs by
_Parting = tuple[int, ...]  # slots of each size


@dataclass(frozen=True)
class Share:
    """How a benchmark is run in the steady state."""

    benchmark: str
    option: Option
    busy: float  # slots of this size that it keeps busy, averaged over the day

    @property
    def runs_per_day(self) -> float:
        return self.busy * _MINUTES_A_DAY / self.option.minutes


@dataclass(frozen=True)
class Phase:
    """A part of the day in which the machine is parted in one way."""

    share: float  # of the day, 0 to 1
    slots: tuple[tuple[int, int], ...]  # how many slots, and of how many GPUs


@dataclass(frozen=True)
class SteadyState:
    """What a machine can do day after day."""

    gpus: int
    rounds_per_day: float  # how often a day every benchmark is run as often as wanted
    phases: tuple[Phase, ...]
    shares: tuple[Share, ...]


def rounds_one_by_one(jobs: Sequence[Job]) -> float:
    """Return rounds a day where every run has the machine for itself."""
    return _MINUTES_A_DAY / one_by_one(jobs)


def most_runs(jobs: Sequence[Job], gpus: int) -> SteadyState:
    """Return the steady state with the most rounds a day; in a round each benchmark is run ``count`` times."""
    sizes = sorted({option.gpus for job in jobs for option in job.options})
    uses = [(number, option) for number, job in enumerate(jobs) for option in job.options]
    partings = [tuple(gpus // size if size == each else 0 for each in sizes) for size in sizes]
    while True:
        found = _solved(jobs, sizes, uses, partings)
        # Signs: linprog gives the change of the minimum by each right-hand side, which is never positive.
        prices, worth = -found.ineqlin.marginals[len(jobs) : -1], -found.ineqlin.marginals[-1]
        best, value = _dearest(sizes, [float(price) for price in prices], gpus)
        if value <= worth * (1 + _NOTHING) + _NOTHING or best in partings:
            break
        partings.append(best)
    rounds, busy, shares = found.x[0], found.x[1 : 1 + len(uses)], found.x[1 + len(uses) :]
    return SteadyState(
        gpus=gpus,
        rounds_per_day=float(rounds),
        phases=tuple(
            Phase(
                share=float(share),
                slots=tuple((count, size) for count, size in zip(parting, sizes, strict=True) if count),
            )
            for parting, share in zip(partings, shares, strict=True)
            if share > _NOTHING
        ),
        shares=tuple(
            Share(benchmark=jobs[number].benchmark, option=option, busy=float(amount))
            for (number, option), amount in zip(uses, busy, strict=True)
            if amount > _NOTHING
        ),
    )


def _solved(jobs: Sequence[Job], sizes: list[int], uses: list[_Use], partings: list[_Parting]) -> Any:
    # The best use of these partings. Unknowns: rounds, slots kept busy by each use, share of each parting.
    import numpy as np
    from scipy.optimize import linprog

    first = 1 + len(uses)
    unknowns = first + len(partings)
    wanted = np.zeros((len(jobs), unknowns))
    taken = np.zeros((len(sizes), unknowns))
    day = np.zeros((1, unknowns))
    for number, job in enumerate(jobs):
        wanted[number, 0] = job.count
    for place, (number, option) in enumerate(uses, 1):
        wanted[number, place] = -_MINUTES_A_DAY / option.minutes
        taken[sizes.index(option.gpus), place] = 1.0
    for place, parting in enumerate(partings, first):
        taken[:, place] = [-count for count in parting]
        day[0, place] = 1.0
    goal = np.zeros(unknowns)
    goal[0] = -1.0
    limits = np.concatenate([np.zeros(len(jobs) + len(sizes)), [1.0]])
    return linprog(goal, A_ub=np.concatenate([wanted, taken, day]), b_ub=limits, method="highs")


def _dearest(sizes: list[int], prices: list[float], gpus: int) -> tuple[_Parting, float]:
    # The parting whose slots are worth most: an unbounded knapsack, by dynamic programming.
    values: list[tuple[float, int | None]] = [(0.0, None)]
    for total in range(1, gpus + 1):
        best: tuple[float, int | None] = (values[total - 1][0], None)
        for place, size in enumerate(sizes):
            if size <= total and values[total - size][0] + prices[place] > best[0] + 1e-12:
                best = (values[total - size][0] + prices[place], place)
        values.append(best)
    counts, total = [0] * len(sizes), gpus
    while total > 0:
        chosen = values[total][1]
        total -= 1 if chosen is None else sizes[chosen]
        if chosen is not None:
            counts[chosen] += 1
    return tuple(counts), values[gpus][0]
