"""A schedule and a steady state as tables and sentences.

from encore.lab.scaling.proposals import schedule_table
print(schedule_table(shortest(jobs, gpus=8)).as_markdown())
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from encore.lab.scaling.curves import Option
from encore.lab.scaling.sharing import Job, Placement, Schedule, one_by_one
from encore.lab.scaling.steady import SteadyState, rounds_one_by_one
from encore.results.table import Table


def _source(option: Option) -> str:
    if option.low is None or option.high is None:
        return option.how
    return f"{option.how}, {option.low:.3g} to {option.high:.3g}"


def schedule_table(schedule: Schedule) -> Table:
    """Return the runs by start; those of one benchmark that start together on as many GPUs share a row."""
    together: dict[tuple[str, Option, float], list[Placement]] = {}
    for each in sorted(schedule.placements, key=lambda each: (each.start, each.on_gpus)):
        together.setdefault((each.benchmark, each.option, each.start), []).append(each)
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
    """Return how each benchmark is run where the machine works day after day."""
    return Table(
        title="Most runs a day",
        columns=("benchmark", "GPUs of a run", "at a time", "runs a day", "GPU-hours a run", "minutes are"),
        formats={"at a time": ".2f", "runs a day": ".2f", "GPU-hours a run": ".3f"},
        rows=tuple(
            (
                each.benchmark,
                each.option.gpus,
                each.busy,
                each.runs_per_day,
                each.option.work / 60,
                _source(each.option),
            )
            for each in steady.shares
        ),
        note="Runs at a time are averaged over the day. The machine is parted as "
        + "; ".join(
            f"{phase.share:.1%} of the day {' and '.join(f'{n} x {size}' for n, size in phase.slots)} GPUs"
            for phase in steady.phases
        )
        + ".",
    )


def sentences(jobs: Sequence[Job], schedule: Schedule, steady: SteadyState) -> Iterator[str]:
    """Say what is gained over one run after the other, and how sure the proposal is."""
    alone = one_by_one(jobs)
    proof = (
        "no schedule of these choices is shorter"
        if schedule.is_shortest
        else f"the search was cut short: no schedule is shorter than {schedule.bound:.2f} minutes"
    )
    yield (
        f"all done after {schedule.makespan:.2f} minutes ({proof}); "
        f"one after the other, each on what is fastest for it: {alone:.2f}"
    )
    rounds = rounds_one_by_one(jobs)
    yield (
        f"rounds of all a day: {steady.rounds_per_day:.2f}; one after the other: {rounds:.2f}, "
        f"{steady.rounds_per_day / rounds - 1:+.0%}"
    )
    how = Counter(
        option.how
        for option in [
            *(each.option for each in schedule.placements),
            *(each.option for each in steady.shares),
        ]
    )
    if how["predicted"]:
        yield "some minutes are the cost model's, outside of what was measured: measure them before you rely on them"


def _ranges(numbers: Sequence[int]) -> str:
    # ``0-3, 6``.
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in parts)
