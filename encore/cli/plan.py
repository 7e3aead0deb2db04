"""``encore plan``: how to share a machine among benchmarks, from measured curves."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typing_extensions import TypedDict

from encore.cli import options
from encore.cli.layout import console, put, say, text, write_json
from encore.errors import EncoreError, unknown_name
from encore.lab.scaling import curves as scaling_curves
from encore.lab.scaling import scheduling
from encore.lab.scaling.scheduling import Job
from encore.results.report.report import Report, write_files
from encore.results.rules import canonical
from encore.run.planning import check_gpus


class Shortest(TypedDict):
    """The schedule that is done soonest."""

    minutes: float
    lower_bound: float  # Lower bound of the minutes of any schedule
    is_shortest: bool  # Whether that is proven
    one_after_the_other: float  # Minutes if the runs are sequential, using all GPUs
    runs: Sequence[scheduling.Placement]


class Shared(TypedDict):
    """How to share a machine among benchmarks."""

    gpus: int
    curves: list[str]  # Where minutes come from
    benchmarks: list[Job]
    shortest: Shortest
    most_runs: dict[str, Any]  # Steady state with the maximum number of runs per day


def plan(
    gpus: Annotated[int, typer.Argument(help="GPUs of the machine.")],
    benchmarks: Annotated[list[str], typer.Argument(metavar="BENCHMARK...", help="Such as resnet or ncf=50.")],
    curves: Annotated[
        list[str] | None,
        typer.Option("--curves", metavar="SOURCE", help="Source of training times. Repeatable."),
    ] = None,
    extrapolate: Annotated[
        bool, typer.Option("--extrapolate", help="Use the cost model for GPU counts that were not measured.")
    ] = False,
    output: options.OptionalOutput = None,
    as_json: options.Json = False,
) -> None:
    """Plan how benchmarks share a machine: shortest total time, and most runs per day.

    BENCHMARK=N requests N runs. Training times come from measured curves: a study, a part of the names of published
    results, a CSV file (benchmark,gpus,minutes), or a folder of runs or sweeps.

    Examples:

      encore plan 16 resnet ssd ncf

      encore plan 16 resnet=5 ssd=5 --curves v0.7/NVIDIA/dgxa100 -o sharing

      encore plan 8 resnet --curves results/20261120T101500Z-sweep-resnet --extrapolate
    """
    check_gpus(gpus)
    sources = curves or [scaling_curves.DEFAULT]
    jobs = _jobs(benchmarks, gpus, sources, extrapolate)
    schedule, steady = scheduling.shortest(jobs, gpus), scheduling.most_runs(jobs, gpus)
    tables = (scheduling.schedule_table(schedule), scheduling.steady_table(steady))
    if as_json:
        shortest: Shortest = {
            "minutes": schedule.makespan,
            "lower_bound": schedule.bound,
            "is_shortest": schedule.is_shortest,
            "one_after_the_other": scheduling.sequential_minutes(jobs),
            "runs": schedule.placements,
        }
        summary = {**vars(steady), "rounds_one_after_the_other": scheduling.sequential_rounds(jobs)}
        write_json(
            "sharing", Shared(gpus=schedule.gpus, curves=sources, benchmarks=jobs, shortest=shortest, most_runs=summary)
        )
    else:
        put(tables, as_json=False)
        for line in scheduling.sentences(jobs, schedule, steady):
            say(console(), text(line))
        say(console(), text(f"curves: {', '.join(sources)}", "dim"))
    if output is not None:
        files = write_files(Report(tables=tables, figures=(scheduling.gantt(schedule, tables[0]),)), output)
        say(console(stderr=as_json), text(f"{files[0]} and {len(files) - 1} more files"))


def _jobs(requests: list[str], gpus: int, sources: list[str], extrapolate: bool) -> list[Job]:
    curves, counts = scaling_curves.load_curves(sources), dict[str, int]()
    for word in requests:
        name, equals, number = word.partition("=")
        if equals and not (number.isdigit() and 1 <= int(number) <= 1000):
            raise EncoreError(f"{word}: the number of runs must be 1 to 1000 (got {number!r})", hint=f"{name}=5")
        benchmark = canonical(name) or name
        if benchmark not in curves and canonical(name):
            raise EncoreError(
                f"no curve of {name} in {', '.join(sources)}",
                expected=f"one of {', '.join(sorted(curves)) or 'none: no run there reached its target'}",
                hint="choose a different source: --curves",
            )
        if benchmark not in curves:
            raise unknown_name("benchmark", name, curves)
        counts[benchmark] = counts.get(benchmark, 0) + int(number or 1)
    return [
        Job(benchmark=name, options=scaling_curves.options(name, curves[name], gpus, extrapolate), count=count)
        for name, count in counts.items()
    ]
