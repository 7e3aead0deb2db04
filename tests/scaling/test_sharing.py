"""Sharing a machine: shortest schedules and steady states with recorded optima, curves, and `encore plan`."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from encore.cli.app import app
from encore.errors import EncoreError
from encore.lab.scaling.curves import Option, load_curves, options
from encore.lab.scaling.sharing import Job, Schedule, most_runs, one_by_one, rounds_one_by_one, schedule_table, shortest
from encore.run import run_folder
from tests.results.result_logs import resnet_v07


def random_jobs(seed: int, count: int, gpus: int) -> list[Job]:
    """Return jobs with random minutes on one GPU and random speed-ups."""
    rng = np.random.default_rng(seed)
    sizes = [size for size in (1, 2, 3, 4, 8) if size <= gpus]

    def random_options(minutes: float) -> tuple[Option, ...]:
        return tuple(Option(gpus=size, minutes=round(minutes / size ** rng.uniform(0.1, 1), 2)) for size in sizes)

    return [Job(benchmark=f"job{number}", options=random_options(rng.uniform(5, 60))) for number in range(count)]


def assert_valid(schedule: Schedule, jobs: list[Job]) -> None:
    """Check that every run is scheduled, on GPUs that no other run uses at the same time."""
    expected = sorted(job.benchmark for job in jobs for _ in range(job.count))
    assert sorted(run.benchmark for run in schedule.placements) == expected
    for run in schedule.placements:
        assert len(set(run.on_gpus) & set(range(schedule.gpus))) == len(run.on_gpus) == run.option.gpus
    for run, other in itertools.combinations(schedule.placements, 2):
        assert not set(run.on_gpus) & set(other.on_gpus) or run.end <= other.start + 1e-9 or other.end <= run.start


# Recorded from a brute force over all orders and all options, each run as early as possible.
@pytest.mark.parametrize(
    ("seed", "count", "gpus", "makespan"),
    [
        (0, 4, 4, 49.65), (1, 4, 4, 45.43), (2, 4, 4, 45.07), (3, 4, 4, 35.86), (4, 4, 4, 42.79), (5, 4, 4, 49.28),
        (6, 4, 8, 32.32), (7, 3, 8, 11.02),
    ],
)  # fmt: skip
def test_schedule_is_as_short_as_by_brute_force(seed: int, count: int, gpus: int, makespan: float) -> None:
    jobs = random_jobs(seed, count, gpus)
    schedule = shortest(jobs, gpus)
    assert_valid(schedule, jobs)
    assert (schedule.is_shortest, schedule.makespan, schedule.bound) == (True, *[pytest.approx(makespan)] * 2)


def test_search_with_a_limit_reports_a_lower_bound() -> None:
    jobs = random_jobs(5, 12, 8)
    schedule = shortest(jobs, 8, states=80)
    assert_valid(schedule, jobs)
    assert (schedule.is_shortest, schedule.bound, one_by_one(jobs)) == (False, *map(pytest.approx, (52.09875, 123.19)))
    assert schedule.bound <= schedule.makespan <= 64.38 + 1e-9


@pytest.mark.parametrize(
    ("count", "makespan", "bound", "is_shortest"),
    [(4, 20.0, 20.0, True), (100, 500.0, 500.0, True), (101, 510.0, 505.0, False)],  # up to 100 runs are searched
)
def test_runs_of_one_benchmark_run_side_by_side(count: int, makespan: float, bound: float, is_shortest: bool) -> None:
    jobs = [Job(benchmark="a", options=(Option(gpus=1, minutes=10.0), Option(gpus=2, minutes=6.0)), count=count)]
    schedule = shortest(jobs, 2, states=8)
    assert_valid(schedule, jobs)
    assert (schedule.makespan, schedule.bound, schedule.is_shortest) == (makespan, bound, is_shortest)


def test_steady_state_splits_the_day_between_two_partitions() -> None:
    # Fraction x as 2 x 3 + 1 x 2 GPUs, the rest as 4 x 2 GPUs: 96 x rounds of a, 72 x + 288 (1 - x) of b
    jobs = [Job("a", (Option(gpus=3, minutes=30.0),)), Job("b", (Option(gpus=2, minutes=10.0),), count=2)]
    steady = most_runs(jobs, 8)
    assert (steady.gpus, steady.rounds_per_day) == (8, pytest.approx(96 * 12 / 13))
    phases = {phase.slots: pytest.approx(phase.share) for phase in steady.phases}
    assert phases == {((1, 2), (2, 3)): 12 / 13, ((4, 2),): 1 / 13}
    runs = {share.benchmark: pytest.approx(share.runs_per_day) for share in steady.shares}
    assert runs == {"a": 96 * 12 / 13, "b": 2 * 96 * 12 / 13}


# Recorded from a linear program over all partitions of the machine.
@pytest.mark.parametrize(
    ("seed", "count", "gpus", "rounds"),
    [(0, 3, 4, 39.69676085), (1, 4, 7, 73.14418402), (2, 5, 8, 102.35450911), (3, 2, 5, 186.86737607)],
)
def test_steady_state_has_the_most_rounds(seed: int, count: int, gpus: int, rounds: float) -> None:
    assert most_runs(random_jobs(seed, count, gpus), gpus).rounds_per_day == pytest.approx(rounds)


def test_benchmark_that_scales_badly_shares_the_machine() -> None:
    curves = load_curves(["microway-dgx1-scaling"])
    assert curves["ncf"][1] == pytest.approx(0.135384615 * 13)
    jobs = [Job(benchmark=name, options=options(name, curves[name], 8)) for name in ("resnet", "ncf")]
    steady = most_runs(jobs, 8)
    assert {share.benchmark: share.option.gpus for share in steady.shares} == {"resnet": 8, "ncf": 1}
    assert steady.rounds_per_day > rounds_one_by_one(jobs)


# -- curves ---------------------------------------------------------------------------------------------


def test_curve_of_a_tree_of_runs(tmp_path: Path) -> None:
    for ranks, minutes in ((1, 80), (2, 45)):
        passport = {"benchmark": "resnet", "round": "v0.7", "nodes": 1, "ranks_per_node": ranks}
        run = run_folder.create(tmp_path / f"1x{ranks}", "resnet-mxnet-cpu", lambda path, p=passport: p, {}, {}, [0, 1])
        for experiment in run.experiments():
            start = 1_592_669_288_183 + 10**8 * experiment.number
            experiment.log.write_text(resnet_v07(minutes, start_ms=start), encoding="utf-8")
            experiment.publish_log()
    assert load_curves([str(tmp_path)])["resnet"] == pytest.approx({1: 80.0, 2: 45.0}, rel=0.01)


def test_options_are_measured_interpolated_or_predicted() -> None:
    # A count with more GPUs and no fewer minutes is left out
    choices = [(option.gpus, option.minutes, option.how) for option in options("a", {1: 80.0, 4: 20.0}, 8)]
    assert choices == [(1, 80.0, "measured"), (2, pytest.approx(40.0), "interpolated"), (4, 20.0, "measured")]
    *_, largest = options("a", {4: 20.0, 8: 11.0}, 32, extrapolate=True)
    assert (largest.gpus, largest.how) == (32, "predicted")
    assert (largest.low or 0) < largest.minutes < min(largest.high or 0, 11.0)
    assert [option.gpus for option in options("a", {1: 10.0, 2: 10.0, 4: 9.0}, 4)] == [1, 4]


def test_schedule_table_has_the_numbers_of_the_gpus() -> None:
    jobs = [Job(benchmark="a", options=(Option(gpus=3, minutes=2.0),), count=3)]
    rows = schedule_table(shortest(jobs, 7)).rows
    assert [row[:7] for row in rows] == [("a", 2, 3, "0-5", 0.0, 2.0, 2.0), ("a", 1, 3, "0-2", 2.0, 4.0, 2.0)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("benchmark,gpus\nresnet,1\n", "has no column minutes"),
        ("benchmark,gpus,minutes\nresnet,1,0\n", "line 2: resnet,1,0"),
        ("benchmark,gpus,minutes\nresnet,0,1\n", "line 2: resnet,0,1"),
        ("benchmark,gpus,minutes\nresnet,one,5\n", "line 2: resnet,one,5"),
        ("benchmark,gpus,minutes\nresnet,1,nan\n", "positive minutes"),
        ("", "has no column benchmark, gpus, minutes"),
    ],
)
def test_invalid_curve_file_is_rejected(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "curves.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(EncoreError, match=message):
        load_curves([str(path)])


# -- the command ----------------------------------------------------------------------------------------


def test_plan_prints_both_proposals(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", "16", "resnet", "ssd", "ncf=3", "-o", str(tmp_path / "plan")])
    assert result.exit_code == 0, result.output
    parts = ("Shortest total time", "Most runs a day", "interpolated", "no schedule of these choices")
    assert [part for part in parts if part not in result.stdout] == []
    assert "Who has which GPU when" in (tmp_path / "plan" / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "plan" / "gantt.svg").stat().st_size > 1000
    path = tmp_path / "mine.csv"
    path.write_text("benchmark,gpus,minutes\nresnet,1,8\nresnet,2,5\nssd,1,4\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["plan", "2", "resnet", "ssd", "--curves", str(path), "--json"])
    plan = json.loads(result.stdout)
    schedule = [plan["shortest"][name] for name in ("minutes", "is_shortest", "one_after_the_other")]
    assert (schedule, plan["most_runs"]["rounds_per_day"]) == ([8.0, True, 9.0], pytest.approx(2 * 1440 / 12))


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
    result = CliRunner().invoke(app, ["plan", *words.split()])
    assert isinstance(result.exception, EncoreError) and message in str(result.exception), result.output
