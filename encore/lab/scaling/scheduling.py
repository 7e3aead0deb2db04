"""Schedules of benchmarks on a shared machine, from their minutes by GPU count: shortest makespan, and most runs a day.

    from encore.lab.scaling.curves import load_curves, options
    from encore.lab.scaling.scheduling import Job, most_runs, shortest
    jobs = [Job("ssd", options("ssd", load_curves(["microway-dgx1-scaling"])["ssd"], gpus=8))]
    print(shortest(jobs, gpus=8).makespan, most_runs(jobs, gpus=8).rounds_per_day)

Benchmarks that scale badly should share: on fewer GPUs a run takes longer but uses fewer GPU-minutes.

The steady state with time-sliced partitions is a linear program (``scipy.optimize.linprog``): maximize rounds per
day, with no more than one run per slot. Its columns are the machine's partitions. They are too numerous to
enumerate, so columns are generated on demand (Gilmore and Gomory, "A linear programming approach to the
cutting-stock problem", Operations Research 9, 1961): the next partition is the most valuable knapsack at the current
slot prices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from encore.lab.scaling.curves import Option
from encore.results.report.figures import WIDTH, Figure
from encore.results.report.svg_plot import SERIES, Panel
from encore.results.table import Table, grouped

STATES = 400_000  # states of single GPUs that the search looks at before it stops and reports that it did
_MOST_RUNS = 100  # number of runs above which the list schedule is used without a search
_TINY = 1e-9


@dataclass(frozen=True)
class Job:
    """A benchmark that is to be run ``count`` times."""

    benchmark: str
    options: tuple[Option, ...]
    count: int = 1


@dataclass(frozen=True)
class Placement:
    """One run in a schedule; ``start`` in minutes."""

    benchmark: str
    option: Option
    start: float
    on_gpus: tuple[int, ...]  # numbers of the GPUs that it runs on

    @property
    def end(self) -> float:
        return self.start + self.option.minutes


@dataclass(frozen=True)
class Schedule:
    gpus: int
    placements: tuple[Placement, ...]
    bound: float  # lower bound on the makespan, minutes
    is_shortest: bool  # whether the search went through everything

    @property
    def makespan(self) -> float:
        return max(placement.end for placement in self.placements)


def sequential_minutes(jobs: Sequence[Job]) -> float:
    """Return the minutes of all runs in sequence, each on its fastest GPU count."""
    return sum(job.count * min(option.minutes for option in job.options) for job in jobs)


# Job index and option. A list of these pairs, sorted by start, is a schedule.
_Choice = tuple[int, Option]


def shortest(jobs: Sequence[Job], gpus: int, states: int = STATES) -> Schedule:
    """Return the schedule with the smallest makespan: branch and bound, starting from a list schedule.

    The search covers all start orders and all GPU counts. A run starts as soon as enough GPUs are free, but not
    before its predecessor; at least one optimal schedule has this form. Branches that cannot beat the best schedule
    are pruned by two bounds: remaining GPU-minutes over all GPUs, and the earliest end per run. After ``states``
    states the best schedule so far is returned with a lower bound.
    """
    guess = _list_schedule(jobs, gpus)
    few = sum(job.count for job in jobs) <= _MOST_RUNS
    better, complete = _search(jobs, gpus, _makespan(guess, gpus), states // gpus if few else 0)
    best = better or guess
    bound = _makespan(best, gpus) if complete else _lower_bound(jobs, gpus)
    return Schedule(gpus=gpus, placements=tuple(_placements(jobs, best, gpus)), bound=bound, is_shortest=complete)


def _search(jobs: Sequence[Job], gpus: int, limit: float, nodes: int) -> tuple[list[_Choice] | None, bool]:
    # Depth-first search in order of starts. Returns the best schedule, None if it does not beat the limit, and whether
    # the search was exhaustive with this number of nodes.
    works = [min(option.work for option in job.options) for job in jobs]
    best: list[_Choice] | None = None
    visited: set[tuple[tuple[int, ...], tuple[float, ...]]] = set()

    def is_hopeless(remaining: tuple[int, ...], free: tuple[float, ...]) -> bool:
        work = sum(free) + sum(count * work for count, work in zip(remaining, works, strict=True))
        return max(work / gpus, free[-1]) >= limit - _TINY or any(
            count and min(free[o.gpus - 1] + o.minutes for o in job.options) >= limit - _TINY
            for count, job in zip(remaining, jobs, strict=True)
        )

    def extend(choices: list[_Choice], remaining: tuple[int, ...], free: tuple[float, ...]) -> None:
        nonlocal best, limit, nodes
        if not any(remaining):
            if free[-1] < limit - _TINY:
                limit, best = free[-1], choices
            return
        if nodes <= 0 or (remaining, free) in visited or is_hopeless(remaining, free):
            return
        nodes -= 1
        visited.add((remaining, free))
        moves = [
            (free[option.gpus - 1] + option.minutes, number, option)
            for number, count in enumerate(remaining)
            if count
            for option in jobs[number].options
        ]
        for end, number, option in sorted(moves, key=lambda move: (move[0], move[2].gpus)):
            if end < limit - _TINY:
                rest = tuple(count - (i == number) for i, count in enumerate(remaining))
                extend([*choices, (number, option)], rest, _start_option(free, option))

    extend([], tuple(job.count for job in jobs), (0.0,) * gpus)
    return best, nodes > 0


def _start_option(free: tuple[float, ...], option: Option) -> tuple[float, ...]:
    # Ascending times at which the GPUs become free after ``option`` has started as early as possible. Later runs start
    # no earlier, so GPUs that were idle before that start count as free from then on.
    start = free[option.gpus - 1]
    rest = [max(time, start) for time in free[option.gpus :]]
    return tuple(sorted(rest + [start + option.minutes] * option.gpus))


def _makespan(choices: Sequence[_Choice], gpus: int) -> float:
    free = (0.0,) * gpus
    for _, option in choices:
        free = _start_option(free, option)
    return free[-1]


def _lower_bound(jobs: Sequence[Job], gpus: int) -> float:
    work = sum(job.count * min(option.work for option in job.options) for job in jobs)
    return max(work / gpus, *(min(option.minutes for option in job.options) for job in jobs))


def _list_schedule(jobs: Sequence[Job], gpus: int) -> list[_Choice]:
    # Best of two list schedules per deadline: all runs use the fewest GPU-minutes that meet it (the choice of Turek,
    # Wolf and Yu, "Approximate algorithms scheduling parallelizable tasks", SPAA 1992); the longest run starts first,
    # or the widest.
    candidates = []
    slowest_of_all = max(min(option.minutes for option in job.options) for job in jobs)
    deadlines = {option.minutes for job in jobs for option in job.options if option.minutes >= slowest_of_all}
    for deadline in sorted(deadlines):
        runs: list[_Choice] = []
        for number, job in enumerate(jobs):
            meeting = [option for option in job.options if option.minutes <= deadline]
            runs += [(number, min(meeting, key=lambda option: option.work))] * job.count
        candidates.append(sorted(runs, key=lambda run: (-run[1].minutes, -run[1].gpus)))
        candidates.append(sorted(runs, key=lambda run: (-run[1].gpus, -run[1].minutes)))
    return min(candidates, key=lambda candidate: _makespan(candidate, gpus))


def _placements(jobs: Sequence[Job], choices: Sequence[_Choice], gpus: int) -> Iterator[Placement]:
    # Yield the scheduled runs with start times and GPU numbers.
    free = [0.0] * gpus
    for number, option in choices:
        start = sorted(free)[option.gpus - 1]
        assigned = [gpu for gpu, time in enumerate(free) if time <= start][: option.gpus]
        # The next run does not start earlier than this one on any GPU.
        free = [max(time, start) for time in free]
        for gpu in assigned:
            free[gpu] = start + option.minutes
        yield Placement(benchmark=jobs[number].benchmark, option=option, start=start, on_gpus=tuple(assigned))


_MINUTES_A_DAY = 1440
_NOTHING = 1e-7

_Partition = tuple[int, ...]  # Number of slots by size


@dataclass(frozen=True)
class Share:
    benchmark: str
    option: Option
    busy: float  # busy slots of this size, averaged over the day

    @property
    def runs_per_day(self) -> float:
        return self.busy * _MINUTES_A_DAY / self.option.minutes


@dataclass(frozen=True)
class Phase:
    """Part of the day with a fixed partition of the machine."""

    share: float  # of the day, 0 to 1
    slots: tuple[tuple[int, int], ...]  # pairs of slot count and GPUs per slot


@dataclass(frozen=True)
class SteadyState:
    gpus: int
    rounds_per_day: float  # rounds a day; a round runs every benchmark ``count`` times
    phases: tuple[Phase, ...]
    shares: tuple[Share, ...]


def sequential_rounds(jobs: Sequence[Job]) -> float:
    return _MINUTES_A_DAY / sequential_minutes(jobs)


def most_runs(jobs: Sequence[Job], gpus: int) -> SteadyState:
    """Return the steady state with the highest rounds per day; a round runs every benchmark ``count`` times."""
    sizes = sorted({option.gpus for job in jobs for option in job.options})
    uses = [(number, option) for number, job in enumerate(jobs) for option in job.options]
    partitions = [tuple(gpus // size if size == slot_size else 0 for slot_size in sizes) for size in sizes]
    while True:
        solution = _solve_partitions(jobs, sizes, uses, partitions)
        # linprog returns derivatives of the minimum with respect to the right-hand sides, which are never positive.
        prices, worth = -solution.ineqlin.marginals[len(jobs) : -1], -solution.ineqlin.marginals[-1]
        best, value = _best_partition(sizes, prices, gpus)
        if value <= worth * (1 + _NOTHING) + _NOTHING or best in partitions:
            break
        partitions.append(best)
    rounds, busy, shares = solution.x[0], solution.x[1 : 1 + len(uses)], solution.x[1 + len(uses) :]
    return SteadyState(
        gpus=gpus,
        rounds_per_day=float(rounds),
        phases=tuple(
            Phase(
                share=float(share),
                slots=tuple((count, size) for count, size in zip(partition, sizes, strict=True) if count),
            )
            for partition, share in zip(partitions, shares, strict=True)
            if share > _NOTHING
        ),
        shares=tuple(
            Share(benchmark=jobs[number].benchmark, option=option, busy=float(amount))
            for (number, option), amount in zip(uses, busy, strict=True)
            if amount > _NOTHING
        ),
    )


def _solve_partitions(jobs: Sequence[Job], sizes: list[int], uses: list[_Choice], partitions: list[_Partition]) -> Any:
    # Solve for these partitions. Unknowns: rounds, busy slots per use, fraction of the day per partition. Rows: runs
    # per job, slots per size, the day.
    import numpy as np
    from scipy.optimize import linprog

    matrix = np.zeros((len(jobs) + len(sizes) + 1, 1 + len(uses) + len(partitions)))
    matrix[: len(jobs), 0] = [job.count for job in jobs]
    for column, (number, option) in enumerate(uses, 1):
        matrix[number, column] = -_MINUTES_A_DAY / option.minutes
        matrix[len(jobs) + sizes.index(option.gpus), column] = 1.0
    matrix[len(jobs) : -1, 1 + len(uses) :] = -np.transpose(partitions)
    matrix[-1, 1 + len(uses) :] = 1.0
    goal, limits = np.zeros(matrix.shape[1]), np.zeros(matrix.shape[0])
    goal[0], limits[-1] = -1.0, 1.0
    return linprog(goal, A_ub=matrix, b_ub=limits, method="highs")


def _best_partition(sizes: list[int], prices: Any, gpus: int) -> tuple[_Partition, float]:
    # Most valuable partition: an unbounded knapsack.
    from scipy.optimize import LinearConstraint, milp

    within = LinearConstraint([sizes], ub=gpus)
    solution = milp(-prices, integrality=[1] * len(sizes), constraints=within, options={"mip_rel_gap": 0})
    return tuple(round(count) for count in solution.x), float(-solution.fun)


def _source(option: Option) -> str:
    return option.how if option.low is None else f"{option.how}, {option.low:.3g} to {option.high:.3g}"


def schedule_table(schedule: Schedule) -> Table:
    """Return the runs by start; simultaneous runs with the same benchmark and GPU count share a row."""
    by_start = sorted(schedule.placements, key=lambda placement: (placement.start, placement.on_gpus))
    together = grouped(by_start, lambda placement: (placement.benchmark, placement.option, placement.start))
    return Table(
        title="Shortest total time",
        columns=("benchmark", "runs", "GPUs each", "on GPUs", "start", "end", "minutes", "minutes are"),
        formats={"start": ".2f", "end": ".2f", "minutes": ".2f"},
        rows=tuple(
            (
                benchmark,
                len(runs),
                option.gpus,
                _ranges(sorted(gpu for run in runs for gpu in run.on_gpus)),
                start,
                runs[0].end,
                option.minutes,
                _source(option),
            )
            for (benchmark, option, start), runs in together.items()
        ),
        note="Minutes from the first start.",
    )


def steady_table(steady: SteadyState) -> Table:
    return Table(
        title="Most runs a day",
        columns=("benchmark", "GPUs of a run", "at a time", "runs a day", "GPU-hours a run", "minutes are"),
        formats={"at a time": ".2f", "runs a day": ".2f", "GPU-hours a run": ".3f"},
        rows=tuple(
            (
                share.benchmark,
                share.option.gpus,
                share.busy,
                share.runs_per_day,
                share.option.work / 60,
                _source(share.option),
            )
            for share in steady.shares
        ),
        note="Runs at a time are averaged over the day. The machine is partitioned as "
        + "; ".join(
            f"{phase.share:.1%} of the day {' and '.join(f'{n} x {size}' for n, size in phase.slots)} GPUs"
            for phase in steady.phases
        )
        + ".",
    )


def sentences(jobs: Sequence[Job], schedule: Schedule, steady: SteadyState) -> Iterator[str]:
    """Yield sentences on the gain over sequential runs and the quality of the schedule."""
    proof = "no schedule of these choices is shorter"
    if not schedule.is_shortest:
        proof = f"the search was cut short: no schedule is shorter than {schedule.bound:.2f} minutes"
    rounds = sequential_rounds(jobs)
    yield (
        f"all done after {schedule.makespan:.2f} minutes ({proof}); "
        f"one after the other, each on what is fastest for it: {sequential_minutes(jobs):.2f}"
    )
    yield (
        f"rounds of all a day: {steady.rounds_per_day:.2f}; one after the other: {rounds:.2f}, "
        f"{steady.rounds_per_day / rounds - 1:+.0%}"
    )
    used = [entry.option for entry in schedule.placements] + [entry.option for entry in steady.shares]
    if any(option.how == "predicted" for option in used):
        yield "some minutes are predicted by the cost model outside the measured range: measure before relying on these"


def _ranges(numbers: Sequence[int]) -> str:
    # ``0-3, 6``.
    parts = grouped(enumerate(numbers), lambda pair: pair[1] - pair[0]).values()
    ends = ((part[0][1], part[-1][1]) for part in parts)
    return ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in ends)


def gantt(schedule: Schedule, table: Table) -> Figure:
    names = list(dict.fromkeys(placement.benchmark for placement in schedule.placements))
    row = max(12.0, min(26.0, 480 / schedule.gpus))
    panel = Panel(WIDTH, row * schedule.gpus + 60)
    panel.axes((0.0, schedule.makespan or 1.0), None, "minutes", "GPU")
    for gpu in range(schedule.gpus):
        panel.text(panel.left - 6, panel.top + row * (gpu + 0.5) + 4, str(gpu), "end")
    for placement in schedule.placements:
        style = f"phase s{names.index(placement.benchmark) % SERIES + 1}"
        for gpu in placement.on_gpus:
            panel.bar((placement.start, placement.end), panel.top + row * gpu + 1, row - 2, style)
    for number, name in enumerate(names, 1):
        panel.name(number, name)
    title = "Who has which GPU when"
    return Figure("gantt", title, panel.svg(title), table)
