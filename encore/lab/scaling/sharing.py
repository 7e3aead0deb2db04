"""How to share a machine among benchmarks so that all of them are done soonest.

    from encore.lab.scaling.sharing import Job, shortest
    jobs = [Job(benchmark="ssd", options=...), Job(benchmark="ncf", options=...)]
    print(shortest(jobs, gpus=8).makespan)

What scales badly should share: a run on fewer GPUs takes longer and costs fewer GPU-minutes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from encore.lab.scaling.curves import Option

STATES = 400_000  # states of single GPUs that the search looks at before it stops and reports that it did
_MOST_RUNS = 100  # of more runs than this no schedule is searched: the list schedule is kept
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
    bound: float  # no schedule is shorter than this many minutes
    is_shortest: bool  # whether the search went through everything

    @property
    def makespan(self) -> float:
        return max(each.end for each in self.placements)


def one_by_one(jobs: Sequence[Job]) -> float:
    """Return minutes of all runs one after the other, each on the GPUs that are fastest for it."""
    return sum(job.count * min(option.minutes for option in job.options) for job in jobs)


# Index of a job, and the option it runs by; a list of them, in order of start, is a schedule.
_Choice = tuple[int, Option]


def shortest(jobs: Sequence[Job], gpus: int, states: int = STATES) -> Schedule:
    """Return the schedule that ends first: by branch and bound, from a list schedule as the first guess.

    Every order of starts with every choice of GPUs is tried, each run starting as soon as enough GPUs are free
    and not before the one in front of it; one of these schedules is a shortest one. Branches that cannot beat
    the best found are cut by two bounds: GPU-minutes left over all GPUs, and each run's earliest end. After
    ``states`` the best found is given, with the bound that no schedule can beat.
    """
    guess = _list_schedule(jobs, gpus)
    few = sum(job.count for job in jobs) <= _MOST_RUNS
    search = _Search(jobs, gpus, _makespan(guess, gpus), states // gpus if few else 0)
    better, complete = search.run()
    best = better if better is not None else guess
    bound = _makespan(best, gpus) if complete else _lower_bound(jobs, gpus)
    return Schedule(gpus=gpus, placements=tuple(_placed(jobs, best, gpus)), bound=bound, is_shortest=complete)


class _Search:
    """Depth-first search over schedules in order of their starts."""

    def __init__(self, jobs: Sequence[Job], gpus: int, limit: float, nodes: int) -> None:
        self._jobs, self._gpus, self._limit, self._nodes = jobs, gpus, limit, nodes
        self._works = [min(option.work for option in job.options) for job in jobs]
        self._best: list[_Choice] | None = None
        self._seen: set[tuple[tuple[int, ...], tuple[float, ...]]] = set()

    def run(self) -> tuple[list[_Choice] | None, bool]:
        """Return the best schedule, None if none beats the limit; and whether everything was tried."""
        self._extend([], tuple(job.count for job in self._jobs), (0.0,) * self._gpus)
        return self._best, self._nodes > 0

    def _extend(self, chosen: list[_Choice], left: tuple[int, ...], free: tuple[float, ...]) -> None:
        if not any(left):
            if free[-1] < self._limit - _TINY:
                self._limit, self._best = free[-1], list(chosen)
            return
        if self._nodes <= 0 or (left, free) in self._seen or self._is_hopeless(left, free):
            return
        self._nodes -= 1
        self._seen.add((left, free))
        moves = [
            (free[option.gpus - 1] + option.minutes, number, option)
            for number, count in enumerate(left)
            if count
            for option in self._jobs[number].options
        ]
        for end, number, option in sorted(moves, key=lambda move: (move[0], move[2].gpus)):
            if end < self._limit - _TINY:
                rest = tuple(count - (i == number) for i, count in enumerate(left))
                self._extend([*chosen, (number, option)], rest, _occupied(free, option))

    def _is_hopeless(self, left: tuple[int, ...], free: tuple[float, ...]) -> bool:
        work = sum(free) + sum(count * work for count, work in zip(left, self._works, strict=True))
        if work / self._gpus >= self._limit - _TINY or free[-1] >= self._limit - _TINY:
            return True
        return any(
            count and min(free[o.gpus - 1] + o.minutes for o in job.options) >= self._limit - _TINY
            for count, job in zip(left, self._jobs, strict=True)
        )


def _occupied(free: tuple[float, ...], option: Option) -> tuple[float, ...]:
    """Return when each GPU is free, ascending, once ``option`` has started as early as it can.

    Later runs start no earlier, so GPUs that were free before that start count as free from it on.
    """
    start = free[option.gpus - 1]
    rest = [max(time, start) for time in free[option.gpus :]]
    return tuple(sorted(rest + [start + option.minutes] * option.gpus))


def _makespan(chosen: Sequence[_Choice], gpus: int) -> float:
    free = (0.0,) * gpus
    for _, option in chosen:
        free = _occupied(free, option)
    return free[-1]


def _lower_bound(jobs: Sequence[Job], gpus: int) -> float:
    work = sum(job.count * min(option.work for option in job.options) for job in jobs)
    return max(work / gpus, *(min(option.minutes for option in job.options) for job in jobs))


def _list_schedule(jobs: Sequence[Job], gpus: int) -> list[_Choice]:
    """Return the best of many list schedules.

    For each deadline, every run gets the fewest GPU-minutes that meet it (the choice of Turek, Wolf and Yu,
    "Approximate algorithms scheduling parallelizable tasks", SPAA 1992); the longest run starts first, or the
    widest.
    """
    deadlines = sorted({option.minutes for job in jobs for option in job.options})
    best: list[_Choice] = []
    for deadline in deadlines:
        runs: list[_Choice] = []
        for number, job in enumerate(jobs):
            meeting = [option for option in job.options if option.minutes <= deadline]
            if not meeting:
                break
            runs += [(number, min(meeting, key=lambda option: option.work))] * job.count
        else:
            for key in (_by_minutes, _by_gpus):
                ordered = sorted(runs, key=key)
                if not best or _makespan(ordered, gpus) < _makespan(best, gpus):
                    best = ordered
    return best


def _by_minutes(choice: _Choice) -> tuple[float, int]:
    return (-choice[1].minutes, -choice[1].gpus)


def _by_gpus(choice: _Choice) -> tuple[int, float]:
    return (-choice[1].gpus, -choice[1].minutes)


def _placed(jobs: Sequence[Job], chosen: Sequence[_Choice], gpus: int) -> Iterator[Placement]:
    # Yield the runs of a schedule with their times and the numbers of their GPUs.
    free = [0.0] * gpus
    for number, option in chosen:
        start = sorted(free)[option.gpus - 1]
        taken = [gpu for gpu, time in enumerate(free) if time <= start][: option.gpus]
        # The next run starts no earlier than this one, whichever GPUs it takes.
        free = [max(time, start) for time in free]
        for gpu in taken:
            free[gpu] = start + option.minutes
        yield Placement(benchmark=jobs[number].benchmark, option=option, start=start, on_gpus=tuple(taken))
