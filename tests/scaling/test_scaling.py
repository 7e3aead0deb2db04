"""The cost model of scaling, overlap of the all-reduce, and sharing a machine between runs."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from encore.errors import EncoreError
from encore.lab.scaling import cost_model, validation
from encore.lab.scaling.curves import Option, load_curves, options
from encore.lab.scaling.overlap import Links, allreduce_seconds, allreduce_table
from encore.lab.scaling.scheduling import (
    Job,
    Schedule,
    gantt,
    most_runs,
    schedule_table,
    sequential_minutes,
    shortest,
)
from tests.command_line import output_of
from tests.results.result_logs import START_MS, resnet_v07, write_files

POINTS = (
    cost_model.Point(gpus=8, samples_per_gpu=208, time=0.148),
    cost_model.Point(gpus=16, nodes=2, samples_per_gpu=104, time=0.09),
    cost_model.Point(gpus=64, nodes=8, samples_per_gpu=26, time=0.05),
)


def approximate(prediction: cost_model.Prediction) -> object:
    return pytest.approx((prediction.value, prediction.low, prediction.high), rel=1e-4)


# Terms on 24 GPUs of 3 nodes: samples, 1, hops, and how often a GPU sends the gradient, hierarchical: inside a node and
# between nodes. By hand from the formulas of Patarasuk and Yuan (ring), Thakur et al. (tree), and a ring of 8 followed
# by a tree of 3 (hierarchical). The predictions on 256 GPUs of 32 nodes were recorded.
@pytest.mark.parametrize(
    ("algorithm", "terms", "prediction"),
    [
        ("ring", (5, 1, 46, 23 / 12), (0.04142641, 0.03377003, 0.11138959)),
        ("tree", (5, 1, 10, 23 / 12), (0.03936748, 0.03303155, 0.04663460)),
        ("hierarchical", (5, 1, 18, 7 / 4, 1 / 6), (0.03935932, 0.03302421, 0.04662554)),
        (None, (5, 1, 18, 7 / 4, 1 / 6), (0.03935932, 0.03302421, 0.04662554)),
    ],
)
def test_step_is_the_sum_of_its_terms(
    algorithm: cost_model.Algorithm | None, terms: tuple[float, ...], prediction: tuple[float, ...]
) -> None:
    model = cost_model.fit_steps(POINTS, algorithm)
    parts = model.parts(cost_model.Point(gpus=24, nodes=3, samples_per_gpu=5)).items()
    assert [part / model.parameters[name] for name, part in parts] == pytest.approx(terms)
    assert prediction == approximate(model.predict(cost_model.Point(gpus=256, nodes=32, samples_per_gpu=6.5)))


@pytest.mark.parametrize(
    ("batches", "parameters", "prediction"),
    [
        # 50 epochs with a critical batch of 40,000 samples, which needs 90 epochs at 32,000
        ((1_000, 4_000, 16_000, 64_000), (50.0421735, 0.00124532014), (89.8924179, 79.9896356, 101.046257)),
        ((1_000,), (46.1402, 0.0051096), (209.649, 50.878, 1787.29)),  # the priors decide
    ],
)
def test_epochs_follow_the_critical_batch(
    batches: tuple[int, ...], parameters: tuple[float, ...], prediction: tuple[float, ...]
) -> None:
    fit = cost_model.fit_epochs([(batch, 50 * (1 + batch / 40_000)) for batch in batches])
    assert fit.parameters == pytest.approx(parameters, rel=1e-3)
    assert prediction == approximate(fit.predict((1.0, 32_000)))


def test_relative_errors_of_a_product_add_in_quadrature() -> None:
    result = cost_model.product([cost_model.Prediction(2, 1, 8), cost_model.Prediction(3, 2, 4)], 10)
    down, up = math.hypot(math.log(2), math.log(1.5)), math.hypot(math.log(4), math.log(4 / 3))
    assert (60, 60 * math.exp(-down), 60 * math.exp(up)) == approximate(result)
    assert [result.holds(value) for value in (result.low, result.high, result.low * 0.999)] == [True, True, False]


@pytest.mark.parametrize(
    ("minutes", "message"),
    [
        ({8: 1.0}, "at least two numbers of GPUs"),
        ({1: 1.0, 2: math.nan}, "a positive time"),
        ({1: 0.0, 2: 1.0}, "a positive time"),
    ],
)
def test_points_that_cannot_be_fitted_are_rejected(minutes: dict[int, float], message: str) -> None:
    with pytest.raises(EncoreError, match=message):
        cost_model.fit_strong_scaling(minutes)


# docs/scaling.md has the predictions of published results and the overlap of each benchmark
def test_unknown_benchmark_has_no_predictions() -> None:
    with pytest.raises(EncoreError, match="did you mean 'resnet'"):
        validation.checks("resnt")


SLOW = Links(intra_node_rate=1e9, inter_node_rate=1e8, gpus=4)


# A ring of n sends 2 (n - 1) / n of 100 MB; between two nodes each of the four GPUs sends a fourth of the gradient.
@pytest.mark.parametrize(("gpus", "seconds"), [(1, 0.0), (2, 0.1), (4, 0.15), (8, 0.4), (16, 0.525)])
def test_all_reduce_takes_its_bytes_over_the_links(gpus: int, seconds: float) -> None:
    assert allreduce_seconds(1e8, gpus, SLOW) == pytest.approx(seconds)


def test_all_reduce_of_bert_at_the_measured_bandwidth() -> None:
    # 336,232,258 parameters in fp16
    assert [allreduce_table(ranks, 1e9).rows[0][2] for ranks in (2, 8)] == pytest.approx([672.464516, 1176.812903])


def random_jobs(seed: int, count: int, gpus: int) -> list[Job]:
    # Jobs with random minutes on one GPU and random speed-ups
    rng = np.random.default_rng(seed)
    sizes = [size for size in (1, 2, 3, 4, 8) if size <= gpus]

    def random_options(minutes: float) -> tuple[Option, ...]:
        return tuple(Option(gpus=size, minutes=round(minutes / size ** rng.uniform(0.1, 1), 2)) for size in sizes)

    return [Job(benchmark=f"job{number}", options=random_options(rng.uniform(5, 60))) for number in range(count)]


def assert_valid(schedule: Schedule, jobs: list[Job]) -> None:
    # Every run is scheduled, on GPUs that no other run uses at the same time
    expected = sorted(job.benchmark for job in jobs for _ in range(job.count))
    assert sorted(run.benchmark for run in schedule.placements) == expected
    assert all(len(set(run.on_gpus) & {*range(schedule.gpus)}) == run.option.gpus for run in schedule.placements)
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
    assert (schedule.bound, sequential_minutes(jobs)) == pytest.approx((52.09875, 123.19))
    assert not schedule.is_shortest and schedule.bound <= schedule.makespan <= 64.38 + 1e-9


def test_steady_state_splits_the_day_between_two_partitions() -> None:
    # Fraction x as 2 x 3 + 1 x 2 GPUs, the rest as 4 x 2 GPUs: 96 x rounds of a, 72 x + 288 (1 - x) of b
    jobs = [Job("a", (Option(gpus=3, minutes=30.0),)), Job("b", (Option(gpus=2, minutes=10.0),), count=2)]
    steady, rounds = most_runs(jobs, 8), pytest.approx(96 * 12 / 13)
    shares = {phase.slots: phase.share for phase in steady.phases}
    assert shares == pytest.approx({((1, 2), (2, 3)): 12 / 13, ((4, 2),): 1 / 13})
    runs = [(share.benchmark, share.runs_per_day) for share in steady.shares]
    assert (steady.gpus, steady.rounds_per_day, runs) == (
        8,
        rounds,
        [("a", rounds), ("b", pytest.approx(192 * 12 / 13))],
    )


# Recorded from a linear program over all partitions of the machine.
@pytest.mark.parametrize(
    ("seed", "count", "gpus", "rounds"),
    [(0, 3, 4, 39.69676085), (1, 4, 7, 73.14418402), (2, 5, 8, 102.35450911), (3, 2, 5, 186.86737607)],
)
def test_steady_state_has_the_most_rounds(seed: int, count: int, gpus: int, rounds: float) -> None:
    assert most_runs(random_jobs(seed, count, gpus), gpus).rounds_per_day == pytest.approx(rounds)


# -- curves ---------------------------------------------------------------------------------------------


def test_curve_of_a_tree_of_runs(tmp_path: Path) -> None:
    for ranks, minutes in ((1, 80), (2, 45)):
        passport = {"benchmark": "resnet", "round": "v0.7", "nodes": 1, "ranks_per_node": ranks}
        texts = {f"result_{n}.txt": resnet_v07(minutes, start_ms=START_MS + 10**8 * n) for n in (0, 1)}
        write_files(tmp_path / f"1x{ranks}" / "run", {**texts, "run.json": passport})
    assert load_curves([str(tmp_path)])["resnet"] == pytest.approx({1: 80.0, 2: 45.0}, rel=0.01)


def test_options_are_measured_interpolated_or_predicted() -> None:
    # A count with more GPUs and no fewer minutes is left out
    choices = [(option.gpus, option.minutes, option.how) for option in options("a", {1: 80.0, 4: 20.0}, 8)]
    assert choices == [(1, 80.0, "measured"), (2, pytest.approx(40.0), "interpolated"), (4, 20.0, "measured")]
    largest = options("a", {4: 20.0, 8: 11.0}, 32, extrapolate=True)[-1]
    assert largest.low < largest.minutes < min(largest.high, 11.0)
    fewer = [option.gpus for option in options("a", {1: 10.0, 2: 10.0, 4: 9.0}, 4)]
    assert (largest.gpus, largest.how, fewer) == (32, "predicted", [1, 4])


def test_schedule_table_has_the_numbers_of_the_gpus(recorded: Callable[[str, object], None]) -> None:
    schedule = shortest([Job(benchmark="a", options=(Option(gpus=3, minutes=2.0),), count=3)], 7)
    table = schedule_table(schedule)
    recorded("gantt.svg", "\n".join([gantt(schedule, table).svg, *(f"<!-- {row} -->" for row in table.rows)]))


# -- the command ----------------------------------------------------------------------------------------


def test_plan_of_measured_curves(tmp_path: Path) -> None:
    write_files(tmp_path, {"mine.csv": "benchmark,gpus,minutes\nresnet,1,8\nresnet,2,5\nssd,1,4\n"})
    plan = json.loads(output_of("plan", 2, "resnet", "ssd", "--curves", tmp_path / "mine.csv", "--json"))
    schedule = [plan["shortest"][name] for name in ("minutes", "is_shortest", "one_after_the_other")]
    assert (schedule, plan["most_runs"]["rounds_per_day"]) == ([8.0, True, 9.0], pytest.approx(2 * 1440 / 12))
