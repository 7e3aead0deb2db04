"""``encore plan``: how to share a machine among benchmarks, from measured curves."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from encore.cli import options
from encore.cli.layout import console, put, say, text, write_json
from encore.errors import EncoreError
from encore.lab.scaling.curves import DEFAULT, Curve, load_curves
from encore.lab.scaling.curves import options as options_of
from encore.lab.scaling.plots import gantt
from encore.lab.scaling.proposals import schedule_table, sentences, steady_table
from encore.lab.scaling.sharing import Job, Schedule, one_by_one, shortest
from encore.lab.scaling.steady import SteadyState, most_runs, rounds_one_by_one
from encore.names import unknown
from encore.results.report.report import Report, write_files
from encore.results.rules import canonical
from encore.run.planning import check_gpus


def plan(
    gpus: Annotated[int, typer.Argument(help="GPUs of the machine.")],
    benchmarks: Annotated[list[str], typer.Argument(metavar="BENCHMARK...", help="Such as resnet or ncf=50.")],
    curves: Annotated[
        list[str] | None,
        typer.Option("--curves", metavar="SOURCE", help="Where minutes come from; may be given again."),
    ] = None,
    extrapolate: Annotated[
        bool, typer.Option("--extrapolate", help="Outside of what was measured, ask the cost model.")
    ] = False,
    output: options.OptionalOutput = None,
    as_json: options.Json = False,
) -> None:
    """Propose how to share a machine among benchmarks: all done soonest, and the most runs a day.

    BENCHMARK may be followed by =N: to be run N times. Minutes come from measured curves: a study, a part of the
    names of published results, a CSV file (benchmark,gpus,minutes), or a folder of your own runs or sweeps.

    Examples:

      encore plan 16 resnet ssd ncf

      encore plan 16 resnet=5 ssd=5 --curves v0.7/NVIDIA/dgxa100 -o sharing

      encore plan 8 resnet --curves results/20261120T101500Z-sweep-resnet --extrapolate
    """
    check_gpus(gpus)
    sources = curves or [DEFAULT]
    jobs = _jobs(benchmarks, gpus, sources, load_curves(sources), extrapolate)
    schedule, steady = shortest(jobs, gpus), most_runs(jobs, gpus)
    if as_json:
        write_json(_as_json(jobs, sources, schedule, steady))
    else:
        _print(jobs, sources, schedule, steady)
    if output is not None:
        _write(schedule, steady, output)


def _jobs(wanted: list[str], gpus: int, sources: list[str], curves: dict[str, Curve], extrapolate: bool) -> list[Job]:
    counts: dict[str, int] = {}
    for word in wanted:
        name, equals, number = word.partition("=")
        if equals and not (number.isdigit() and 1 <= int(number) <= 1000):
            raise EncoreError(f"{word}: {number!r} is no number of runs", expected="1 to 1000", hint=f"{name}=5")
        benchmark = canonical(name) or name
        if benchmark not in curves and canonical(name):
            raise EncoreError(
                f"no curve of {name} in {', '.join(sources)}",
                expected=f"one of {', '.join(sorted(curves)) or 'none: no run there reached its target'}",
                hint="name another source: --curves",
            )
        if benchmark not in curves:
            raise unknown("benchmark", name, curves)
        counts[benchmark] = counts.get(benchmark, 0) + int(number or 1)
    return [
        Job(benchmark=name, options=options_of(curves[name], gpus, extrapolate), count=count)
        for name, count in counts.items()
    ]


def _print(jobs: list[Job], sources: list[str], schedule: Schedule, steady: SteadyState) -> None:
    screen = console()
    put((schedule_table(schedule), steady_table(steady)), as_json=False)
    for line in sentences(jobs, schedule, steady):
        say(screen, text(line))
    say(screen, text(f"curves: {', '.join(sources)}", "dim"))


def _as_json(jobs: list[Job], sources: list[str], schedule: Schedule, steady: SteadyState) -> dict[str, object]:
    return {
        "gpus": schedule.gpus,
        "curves": sources,
        "benchmarks": [asdict(job) for job in jobs],
        "shortest": {
            "minutes": schedule.makespan,
            "lower_bound": schedule.bound,
            "is_shortest": schedule.is_shortest,
            "one_after_the_other": one_by_one(jobs),
            "runs": [asdict(each) for each in schedule.placements],
        },
        "most_runs": {**asdict(steady), "rounds_one_after_the_other": rounds_one_by_one(jobs)},
    }


def _write(schedule: Schedule, steady: SteadyState, folder: Path) -> None:
    table = schedule_table(schedule)
    report = Report(tables=(table, steady_table(steady)), figures=(gantt(schedule, table),))
    files = write_files(report, folder)
    say(console(), text(f"{files[0]} and {len(files) - 1} files next to it"))
