"""The cost model of scaling, overlap of the all-reduce, sharing a machine between runs, and projection from one GPU."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from encore.errors import EncoreError
from encore.lab.scaling import cost_model, projection, validation
from encore.lab.scaling.cost_model import Links, allreduce_seconds
from encore.lab.scaling.curves import Option, load_curves, options
from encore.lab.scaling.scheduling import (
    Job,
    Schedule,
    gantt,
    most_runs,
    schedule_table,
    sequential_minutes,
    shortest,
)
from encore.lab.studies.topology import allreduce_table
from encore.machine.node import Gpu
from encore.results.published.published import System
from encore.run import planning, programs
from tests import json_schemas
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


# A ring of n sends 2 (n - 1) / n of 100 MB; between two nodes each of the four GPUs sends a fourth of the gradient.
@pytest.mark.parametrize(("gpus", "seconds"), [(1, 0.0), (2, 0.1), (4, 0.15), (8, 0.4), (16, 0.525)])
def test_all_reduce_takes_its_bytes_over_the_links(gpus: int, seconds: float) -> None:
    assert allreduce_seconds(1e8, gpus, Links(intra_node_rate=1e9, inter_node_rate=1e8, gpus=4)) == pytest.approx(
        seconds
    )


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


# -- projection of a submitted system from one GPU -------------------------------------------------------

RECORD = ("bench", "resnet-pytorch", "--system", "h200", "--project")
TOY = {"title": "a toy", "is_part": False, "unit": "samples", "measured": {"synthetic": {"median": 40.0}}}


def projected(*words: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(output_of(*words, "--json"))
    json_schemas.validate("projection", result)
    return result


def submitted(benchmark: str, system: str) -> projection.SubmittedSystem:
    return projection.open_system(planning.Request(name=benchmark, gpus=1, system=system))


def a_gpu(name: str, gib: float) -> Gpu:
    return Gpu(index=0, name=name, memory_gib=gib, driver="580", compute_capability=None)


@pytest.mark.slow
def test_recorded_speed_of_an_h200_next_to_the_record(recorded: Callable[[str, object], None]) -> None:
    # benchmarks/resnet/measured.toml
    result = projected(*RECORD, "--measured", "7493/s")
    recorded("projection.json", {**result, "printed": output_of(*RECORD, "--measured", "7493/s").splitlines()})
    needed = projected(*RECORD, "--measured", f"{result['needed_samples_per_second']}/s")
    # Seconds per step of 400 samples
    seconds = projected(*RECORD, "--measured", str(400 / 7493))
    assert (needed["ratio"], seconds["minutes"]) == pytest.approx((1, result["minutes"]))


def test_ranks_that_share_samples() -> None:
    words = ("bench", "llama2-70b-lora", "--system", "h200", "--project", "--measured", "3")
    result, eos = projected(*words), submitted("llama2-70b-lora", "eos").share.activation_bytes
    # 80 layers, 2 samples, 4,096 tokens per rank, keys and values of 1,024 in 2 bytes, gathered twice, scattered once
    gathered, reduced = 80 * 2 * 4096 * 2 * 1024 * 2 * 3, 80 * 4 * 4 * 8192 * 8192 * 2 * 2 * 3 / 4
    assert (result["activation_bytes"], eos) == (gathered, reduced)
    assert (result["parallelism"], result["samples_per_gpu"]) == ({"context_parallelism": 2}, 1)
    assert "context 2" in output_of(*words)


NO_RECORD = "a CPU measurement is not a projection of a GPU record: 40.0 samples/s of a toy"


# The system, its batch, and the device, speed and note of the projection. A CPU is measured and not projected.
@pytest.mark.parametrize(
    ("gpus", "request_", "result"),
    [
        ((), (None, ()), (None, None, NO_RECORD)),
        ((a_gpu("NVIDIA H200", 140.4),), ("h200", ("batch_size=400",)), ("NVIDIA H200", 40, "")),
    ],
)
def test_device_of_this_machine_is_measured(
    gpus: tuple[Gpu, ...], request_: tuple[object, ...], result: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Mock(return_value={**TOY, "device": "gpu" if gpus else "cpu"})
    monkeypatch.setattr(programs, "measure", measure)
    monkeypatch.setattr("encore.machine.node.gpus", lambda: gpus)
    values = projected(*RECORD)
    assert (values["device"] if gpus else None, values["samples_per_second"], values["note"]) == result
    assert (measure.call_args.args[0].system, measure.call_args.args[0].settings) == request_
    assert ("is not a projection of a GPU record" in output_of(*RECORD)) == (not gpus)


def test_layers_of_a_language_model_count_by_their_flops() -> None:
    small, note = a_gpu("NVIDIA L4", 24.0), "measured on NVIDIA L4, submitted on NVIDIA H100-SXM5-80GB"
    llama, resnet = submitted("llama31-8b", "hpf_n8"), submitted("resnet-pytorch", "h200")
    measured = {"real": {"median": 1.0, "flops_per_second": 421.6e12}}
    part = {**TOY, "unit": "tokens", "device": "gpu", "measured": measured}
    assert llama.read_bench(part, [small]) == projection.Measured(1.0, "NVIDIA L4", note)
    with pytest.raises(EncoreError, match="the speed of gnmt is in tokens/s"):
        submitted("gnmt", "dgxa100").read_bench(part, [small])
    assert llama.settings_for([small], ["compile=true"]) == ("compile=true", "batch_size=1")
    # The bench divides the samples that four ranks share
    assert submitted("llama2-70b-lora", "eos").settings_for([small], []) == ("batch_size=4",)
    assert resnet.settings_for([small], ["batch_size=64"]) == ("batch_size=64",)
    with pytest.raises(EncoreError, match="less memory than NVIDIA H200-SXM5-141GB: a batch of 400 may not fit"):
        resnet.settings_for([small], [])


def test_a_submission_without_published_result() -> None:
    system = submitted("resnet", "h200").configuration.system
    with pytest.raises(EncoreError, match=r"no published result of resnet for v4\.0/NVIDIA/none"):
        projection.published_result(system.model_copy(update={"submission": "none"}), "resnet")


@pytest.mark.parametrize(
    ("benchmark", "system", "result"),
    [
        ("resnet", "dgx2_n32", "v0.5/nvidia/dgx2h_multi_ngc18.11_mxnet"),
        ("ssd", "dgx2_n30", "v0.6/NVIDIA/dgx2h_n30_ngc19.05_pytorch"),  # trains on half of the GPUs described
        ("resnet-pytorch", "dgxh100", "v4.0/NVIDIA/eos_ngc24.04_mxnet"),
    ],
)
def test_published_result_of_a_system(benchmark: str, system: str, result: str) -> None:
    round_ = result.partition("/")[0] if benchmark != "resnet-pytorch" else None
    request = planning.Request(name=benchmark, gpus=1, system=system, round=round_)
    assert projection.open_system(request).cell.name == result


def test_links_of_a_system_description() -> None:
    hardware = System(described=True, accelerator="NVIDIA A100-SXM4-80GB", network="Storage: 2x IB, Compute: 4x IB HDR")
    (links, sources), unknown = (
        projection.links_of(replace(hardware, network=text), 8) for text in (hardware.network, None)
    )
    assert links == Links(intra_node_rate=300e9, inter_node_rate=12.5e9)
    assert "ConnectX-6" in sources["network"] and "assumed, one per GPU" in unknown[1]["network"]
    assert projection.links_of(replace(hardware, accelerator="tpu-v3"), 8) is None
    # 51 MB, 7/8 of them twice over 300 GB/s
    seconds = [projection.communication_seconds("resnet", 8, 1, between) for between in (None, links)]
    assert seconds == pytest.approx([0, 25_557_032 * 2 * 1.75 / 300e9])


@pytest.mark.parametrize(
    ("accelerator", "gigabytes"),
    [
        ("NVIDIA Blackwell Ultra GPU (GB300)", 900),
        ("NVIDIA Hopper GPU (GH200)", 450),
        ("NVIDIA H200-NVL-141GB", 63),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 63),
        ("NVIDIA A100-PCIe-80GB", 31.5),
        ("AMD Instinct MI325X 256GB HBM3e", 448),
    ],
)
def test_bandwidth_within_a_node(accelerator: str, gigabytes: float) -> None:
    assert projection.links_of(System(described=True, accelerator=accelerator), 8)[0].intra_node_rate == gigabytes * 1e9
