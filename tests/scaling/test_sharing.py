"""Sharing a machine: optimal against brute force, steady state against every way to part it, the command line."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import linprog
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.lab.scaling.curves import Option, load_curves, options
from encore.lab.scaling.sharing import Job, Schedule, most_runs, one_by_one, rounds_one_by_one, schedule_table, shortest
from encore.run import run_folder
from tests.results.result_logs import resnet_v07

STUDY = "microway-dgx1-scaling"


def drawn_jobs(seed: int, count: int, gpus: int) -> list[Job]:
    """Return jobs that gain from more GPUs as much as chance will have it."""
    chance = np.random.default_rng(seed)
    sizes = [size for size in (1, 2, 3, 4, 8) if size <= gpus]

    def drawn(minutes: float) -> tuple[Option, ...]:
        return tuple(Option(gpus=size, minutes=round(minutes / size ** chance.uniform(0.1, 1), 2)) for size in sizes)

    return [Job(benchmark=f"job{number}", options=drawn(chance.uniform(5, 60))) for number in range(count)]


def brute_force(jobs: list[Job], gpus: int) -> float:
    """Return the least makespan over all orders and all choices, each run as early as its GPUs allow."""
    best = float("inf")
    for order in itertools.permutations(jobs):
        for chosen in itertools.product(*(job.options for job in order)):
            free = [0.0] * gpus
            for option in chosen:
                free.sort()
                start = free[option.gpus - 1]
                free[: option.gpus] = [start + option.minutes] * option.gpus
            best = min(best, max(free))
    return best


def check(schedule: Schedule, jobs: list[Job]) -> None:
    """Every run is there once, with its own GPUs for itself all the time."""
    wanted = sorted(job.benchmark for job in jobs for _ in range(job.count))
    assert sorted(each.benchmark for each in schedule.placements) == wanted
    for each in schedule.placements:
        assert len(set(each.on_gpus) & set(range(schedule.gpus))) == len(each.on_gpus) == each.option.gpus
    for one, other in itertools.combinations(schedule.placements, 2):
        if set(one.on_gpus) & set(other.on_gpus):
            assert one.end <= other.start + 1e-9 or other.end <= one.start + 1e-9


@pytest.mark.parametrize(("seed", "count", "gpus"), [*((s, 4, 4) for s in range(6)), (6, 4, 8), (7, 3, 8)])
def test_schedule_is_as_short_as_any(seed: int, count: int, gpus: int) -> None:
    jobs = drawn_jobs(seed, count, gpus)
    schedule = shortest(jobs, gpus)
    check(schedule, jobs)
    assert (schedule.is_shortest, schedule.makespan) == (True, pytest.approx(brute_force(jobs, gpus)))


def test_runs_of_one_benchmark_are_no_different_from_as_many_benchmarks() -> None:
    one = drawn_jobs(3, 1, 4)[0]
    jobs = [Job(benchmark="a", options=one.options, count=4)]
    repeated = shortest(jobs, 4)
    check(repeated, jobs)
    assert repeated.makespan == pytest.approx(brute_force([one] * 4, 4))


def test_a_search_that_is_cut_short_says_so_and_is_no_worse_than_one_by_one() -> None:
    jobs = drawn_jobs(5, 12, 8)
    schedule = shortest(jobs, 8, states=80)
    check(schedule, jobs)
    assert not schedule.is_shortest and schedule.bound <= schedule.makespan <= one_by_one(jobs)


def partings(sizes: tuple[int, ...], gpus: int) -> Iterator[tuple[int, ...]]:
    for counts in itertools.product(*(range(gpus // size + 1) for size in sizes)):
        if sum(n * size for n, size in zip(counts, sizes, strict=True)) <= gpus:
            yield counts


def most_rounds(jobs: list[Job], gpus: int) -> float:
    sizes = (1, 2, 3, 4, 8)[: 5 if gpus >= 8 else 4]
    ways = list(partings(sizes, gpus))
    uses = [(job, option) for job in jobs for option in job.options]
    rows = [
        [job.count, *(-1440 / o.minutes if owner is job else 0.0 for owner, o in uses), *([0.0] * len(ways))]
        for job in jobs
    ]
    rows += [
        [0.0, *(float(o.gpus == size) for _, o in uses), *(-float(way[place]) for way in ways)]
        for place, size in enumerate(sizes)
    ]
    rows.append([0.0] * (1 + len(uses)) + [1.0] * len(ways))
    goal = [-1.0] + [0.0] * (len(uses) + len(ways))
    return float(-linprog(goal, A_ub=rows, b_ub=[0.0] * (len(rows) - 1) + [1.0]).fun)


@pytest.mark.parametrize(("seed", "count", "gpus"), [(0, 3, 4), (1, 4, 7), (2, 5, 8), (3, 2, 5)])
def test_steady_state_is_the_best_of_all_partings(seed: int, count: int, gpus: int) -> None:
    jobs = drawn_jobs(seed, count, gpus)
    steady = most_runs(jobs, gpus)
    assert steady.rounds_per_day == pytest.approx(most_rounds(jobs, gpus))
    assert sum(phase.share for phase in steady.phases) <= 1 + 1e-9
    for phase in steady.phases:
        assert sum(number * size for number, size in phase.slots) <= gpus
    for job in jobs:
        runs = sum(share.runs_per_day for share in steady.shares if share.benchmark == job.benchmark)
        assert runs == pytest.approx(steady.rounds_per_day * job.count)


def test_what_scales_badly_shares() -> None:
    """The study's lesson: NCF on single GPUs, side by side; image classification on the whole machine."""
    curves = load_curves([STUDY])
    assert curves["ncf"][1] == pytest.approx(0.135384615 * 13)
    jobs = [Job(benchmark=name, options=options(name, curves[name], 8)) for name in ("resnet", "ncf")]
    steady = most_runs(jobs, 8)
    assert {share.benchmark: share.option.gpus for share in steady.shares} == {"resnet": 8, "ncf": 1}
    assert steady.rounds_per_day > rounds_one_by_one(jobs)
    eight = shortest([Job(benchmark="ncf", options=jobs[1].options, count=8)], 8)
    assert {each.option.gpus for each in eight.placements} == {1}


# -- curves ---------------------------------------------------------------------------------------------


def test_a_tree_of_runs_is_a_curve(tmp_path: Path) -> None:
    for ranks, minutes in ((1, 80), (2, 45)):
        passport = {"benchmark": "resnet", "round": "v0.7", "nodes": 1, "ranks_per_node": ranks}
        run = run_folder.create(tmp_path / f"1x{ranks}", "resnet-mxnet-cpu", lambda path, p=passport: p, {}, {}, [0, 1])
        for experiment in run.experiments():
            start = 1_592_669_288_183 + 10**8 * experiment.number
            experiment.log.write_text(resnet_v07(minutes, start_ms=start), encoding="utf-8")
            experiment.publish_log()
    assert load_curves([str(tmp_path)])["resnet"] == pytest.approx({1: 80.0, 2: 45.0}, rel=0.01)


def test_options_are_measured_interpolated_or_where_wanted_predicted() -> None:
    """More GPUs that save no time are no option."""
    found = [(option.gpus, option.minutes, option.how) for option in options("a", {1: 80.0, 4: 20.0}, 8)]
    assert found == [(1, 80.0, "measured"), (2, pytest.approx(40.0), "interpolated"), (4, 20.0, "measured")]
    predicted = options("a", {4: 20.0, 8: 11.0}, 32, extrapolate=True)
    assert [option.gpus for option in predicted if option.how == "predicted"] == [1, 2, 16, 32]
    assert (predicted[-1].low or 0) < predicted[-1].minutes < (predicted[-1].high or 0) and predicted[-1].minutes < 11.0
    assert [option.gpus for option in options("a", {1: 10.0, 2: 12.0, 4: 9.0}, 4)] == [1, 4]


def test_a_table_names_the_gpus() -> None:
    jobs = [Job(benchmark="a", options=(Option(gpus=3, minutes=2.0),), count=3)]
    rows = schedule_table(shortest(jobs, 7)).rows
    assert [row[:5] for row in rows] == [("a", 2, 3, "0-5", 0.0), ("a", 1, 3, "0-2", 2.0)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("benchmark,gpus\nresnet,1\n", "has no column minutes"),
        ("benchmark,gpus,minutes\nresnet,1,0\n", "line 2: resnet,1,0"),
        ("benchmark,gpus,minutes\nresnet,one,5\n", "line 2: resnet,one,5"),
        ("benchmark,gpus,minutes\nresnet,1,nan\n", "positive minutes"),
        ("", "has no column benchmark, gpus, minutes"),
    ],
)
def test_a_wrong_file_is_reported(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "curves.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(EncoreError, match=message):
        load_curves([str(path)])


# -- the command ----------------------------------------------------------------------------------------


def test_plan_prints_both_proposals(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", "16", "resnet", "ssd", "ncf=3", "-o", str(tmp_path / "plan")])
    assert done.exit_code == 0, done.output
    wanted = ("Shortest total time", "Most runs a day", "interpolated", "no schedule of these choices")
    assert [part for part in wanted if part not in done.stdout] == []
    page = (tmp_path / "plan" / "report.html").read_text(encoding="utf-8")
    assert "Who has which GPU when" in page and (tmp_path / "plan" / "gantt.svg").stat().st_size > 1000
    path = tmp_path / "mine.csv"
    path.write_text("benchmark,gpus,minutes\nresnet,1,8\nresnet,2,5\nssd,1,4\n", encoding="utf-8")
    again = CliRunner().invoke(app, ["plan", "2", "resnet", "ssd", "--curves", str(path), "--json"])
    printed = json.loads(again.stdout)
    shortest = [printed["shortest"][name] for name in ("minutes", "is_shortest", "one_after_the_other")]
    assert (shortest, printed["most_runs"]["rounds_per_day"]) == ([8.0, True, 9.0], pytest.approx(2 * 1440 / 12))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("0 resnet", "0 GPUs asked for"),
        ("8 resnt", "did you mean 'resnet'?"),
        ("8 bert", "no curve of bert"),
        ("8 resnet=x", "is no number of runs"),
        ("4 resnet --curves v0.7/NVIDIA/dgxa100", "measured on 8 to 768 GPUs, and there are 4"),
        ("8 resnet --curves v0.7/NVIDIA", "one kind of accelerator"),
        ("8 resnet --curves published", "a part of their names"),
        ("8 resnet --curves ./none.csv", "there is no ./none.csv"),
    ],
)
def test_plan_refuses(words: str, message: str) -> None:
    done = CliRunner().invoke(app, ["plan", *words.split()])
    assert isinstance(done.exception, EncoreError) and message in str(done.exception), done.output
