"""ResNet in MXNet, PyTorch and TensorFlow: parity, input, resume, ranks, options of a step, and a real server."""

import json
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from benchmarks.common.run import timing
from tests.conftest import Encore, ToyRun, evaluations, logged, losses, only_run
from tests.trainings import (
    InFramework,
    Started,
    assert_none_left,
    evaluated,
    exported,
    result,
    settings,
    write_small_config,
)

STEPS_PER_EPOCH = 24


def stopped(started: Started) -> str:
    # Output of a run that SIGTERM ends
    started.process.send_signal(signal.SIGTERM)
    return started.ended(130)


TOY_SEED = ("--seed", "1")  # The seed of toy_run


@pytest.mark.parametrize("framework", [pytest.param("pytorch", marks=pytest.mark.long), "tensorflow"])
def test_resumed_run_has_bit_identical_losses(
    framework: str, toy_run: Callable[[str], ToyRun], digits: Path, tmp_path: Path
) -> None:
    started = Started.run(digits, tmp_path, *TOY_SEED, name=f"resnet-{framework}")
    # Before the first evaluation, which needs the batch statistics of every rank
    folder = started.wait_for_step(STEPS_PER_EPOCH // 2)
    ranks = started.ranks(folder)
    assert "a checkpoint was written" in stopped(started)
    assert_none_left(ranks)
    metrics, uninterrupted = folder / "metrics.jsonl", toy_run(f"resnet-{framework}").metrics
    assert len(losses(metrics)) < STEPS_PER_EPOCH
    resumed = Started.again(folder.parent)
    resumed.wait_for_step(STEPS_PER_EPOCH + 1)
    stopped(resumed)
    steps = min(len(losses(metrics)), len(losses(uninterrupted)))
    assert steps >= STEPS_PER_EPOCH and losses(metrics)[:steps] == losses(uninterrupted)[:steps]
    assert evaluations(metrics)[0] == evaluations(uninterrupted)[0]


@pytest.mark.long
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_two_ranks_train_like_one(
    framework: str, toy_run: Callable[[str], ToyRun], digits: Path, tmp_path: Path
) -> None:
    name = f"resnet-{framework}"
    started = Started.run(digits, tmp_path, *TOY_SEED, "--env", "OMP_NUM_THREADS=1", name=name, ranks=1)
    folder = started.wait_for_step(STEPS_PER_EPOCH)
    stopped(started)
    one, two = losses(folder / "metrics.jsonl"), losses(toy_run(name).metrics)
    # Two ranks draw other images into a step and normalize over half of the batch
    last = slice(STEPS_PER_EPOCH // 2, STEPS_PER_EPOCH)
    assert (two[0], sum(two[last])) == (pytest.approx(one[0], rel=0.1), pytest.approx(sum(one[last]), rel=0.25))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "format_name", "options"),
    [
        ("resnet-pytorch", "torch-export", ()),
        ("resnet-tensorflow", "saved-model", ()),
        ("transformer", "torch-export", ("--max-batch-size", "512")),
    ],
)
@pytest.mark.usefixtures("serving_python")
def test_server_has_the_quality_of_the_run(
    name: str,
    format_name: str,
    options: tuple[str, ...],
    toy_run: Callable[[str], ToyRun],
    encore: Encore,
    tmp_path: Path,
) -> None:
    run = toy_run(name).folder
    evaluated(encore, tmp_path / "exported", run, exported(encore, run, tmp_path / "exported", format_name), *options)


STEP = {"optimizer": "lars", "learning_rate": "4.0", "epochs": "1",
        "warmup_epochs": "0.5", "quality_target": "1.0"}  # fmt: skip
# In fp32: a CPU without instructions for bf16 takes 40 times as long for it; tests/in_framework has steps in bf16.
SCALED = {**STEP, "accumulation_steps": "2", "loss_scale": "128", "image_size": "16", "eval_resize": "16"}
OPTIONS = {
    "resnet": {
        **STEP, "schedule": "step", "decay_epochs": "[1]", "gradient_groups": "3", "depth": "50",
        "label_smoothing": "0", "mirror": "true", "eval_period": "2", "eval_offset": "1", "batch_size": "64",
        "log_interval": "1",
    },
    "resnet-pytorch": {**SCALED, "compile": "default", "bucket_mb": "8"},
    "resnet-tensorflow": {**SCALED, "gradient_groups": "3"},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.usefixtures("mxnet_python", "pytorch_python", "tensorflow_python")
def test_every_option_of_the_step_trains(encore: Encore, few_digits: Path, tmp_path: Path, name: str) -> None:
    folders = ("--data", str(few_digits), "--results", str(tmp_path), "--seed", "7")
    encore("run", name, "2", *folders, *settings(OPTIONS[name]), code=3)
    keys = [event["key"] for event in logged(only_run(tmp_path) / "result_0.txt")]
    curve = losses(only_run(tmp_path) / "experiment_0" / "metrics.jsonl")
    assert ("lars_opt_base_learning_rate" in keys, keys.count("eval_accuracy")) == (True, 1)
    # 6 steps are too few for a network of 50 layers
    assert len(curve) == (6 if name == "resnet" else STEPS_PER_EPOCH // 2) and all(0 < loss < 10 for loss in curve)
    assert name == "resnet" or curve[-1] < 0.9 * curve[0]


def test_system_of_another_framework_is_not_a_submitted_configuration(encore: Encore) -> None:
    shown = json.loads(encore("show", "resnet-tensorflow", "--system", "dgxa100", "--json").stdout)
    assert shown["deviations"] == [{"key": "framework", "text": "tensorflow instead of mxnet"}]


@pytest.mark.parametrize("framework", ["mxnet", "pytorch", "tensorflow"])
def test_batches_are_copied_as_the_device_needs_them(
    framework: str, request: pytest.FixtureRequest, digits: Path
) -> None:
    measured = result(request.getfixturevalue(f"in_{framework}")("input_batches.py", framework, str(digits)))
    shapes = {"NHWC 4": [8, 32, 32, 4], "NHWC 3": [8, 32, 32, 3], "NCHW 4": [8, 4, 32, 32], "NCHW 3": [8, 3, 32, 32]}
    types = {"fp16": "float16", "fp32": "float32"}
    names = [name.split() for name in measured["batches"]]
    assert list(measured["batches"].values()) == [
        {"type": types[precision], "shape": shapes[f"{layout} {channels}"], "images": True, "labels": True}
        for precision, layout, channels, _ in names
    ]
    # DALI is asked for a batch after the last one is copied; nothing waits for all work of the GPU
    calls = ["run", "convert", "step", "copied"] * 3 if framework == "tensorflow" else []
    assert (len(names), measured["drains"], measured["calls"][:11]) == (8, 0, calls[:11])


def test_only_the_fetch_time_of_an_idle_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, is_idle = SimpleNamespace(now=1.0), threading.Event()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    wait, always_idle = timing.InputWait(is_idle.wait), timing.InputWait()  # every step has ended when it returns

    def fetch(seconds_until_idle: float, seconds_after: float) -> None:
        clock.now += seconds_until_idle
        if seconds_until_idle:
            is_idle.set()
            wait._watch.join()  # type: ignore[union-attr]
        clock.now += seconds_after

    for waits, *seconds in ((wait, 0.0, 2.0), (wait, 3.0, 0.5), (always_idle, 0.0, 0.25)):
        waits.fetch(partial(fetch, *seconds))
    # The device is busy during all of the first, and idle for the last half second of the second
    assert (wait.take(), wait.take(), wait.total, always_idle.take(), always_idle.total) == (0.5, 0.0, 0.5, 0.25, 0.25)


def test_error_of_a_queued_step_stops_the_training() -> None:
    # The thread that waits for the device may be the first to get it
    wait = timing.InputWait(mock.Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        wait.fetch(lambda: None)
        wait.take()


FRAMEWORKS = ("pytorch", "tensorflow")
# Largest difference per kind of result. MXNet's multi_sum_sq adds the squares of 2.4 million weights one by one in
# fp32; its LARS rates follow from it. A ReLU on the other side of 0 after rounding shows in a small gradient, hardly
# in all gradients together. Both read the same crops in the same order.
LIMITS = {"logits": 1e-4, "loss ": 1e-5, "gradient ": 0.1, "rates": 0.0, "sgd": 1e-5, "lars": 1e-4, "first images": 0.0}
# The deeper the network, the more a rounding error grows in the backward pass; MXNet is as far from float64.
ALL_GRADIENTS = {("pytorch", 18): 1e-3, ("pytorch", 50): 1e-2, ("tensorflow", 18): 1e-3, ("tensorflow", 50): 2e-2}

# Weights after the steps of NVIDIA's rules (v0.7, common/fit.py: SGDwFASTLARS and mx.optimizer.SGD) in float64
NORMS = {
    "sgd stem.conv.weight": 336.26669606,
    "sgd stage1.block1.norm1.gamma": 29.49087086,
    "sgd dense.weight": 247.97050372,
    "sgd dense.bias": 11.41207729,
    "lars stem.conv.weight": 11.66056941,
    "lars stage1.block1.norm1.gamma": 29.92510789,
    "lars stage4.block2.conv2.weight": 33.07821306,
    "lars dense.weight": 0.73370474,
    "lars dense.bias": 11.22936302,
}


def compute(framework: str, request: pytest.FixtureRequest, file: Path) -> dict[str, np.ndarray]:
    run = request.getfixturevalue(f"in_{framework}")
    run("parity.py", framework, str(file), str(request.getfixturevalue("few_digits")))
    with np.load(file) as arrays:
        return {name: arrays[name] for name in arrays.files}


@pytest.fixture(scope="module")
def mxnet_results(
    in_mxnet: InFramework, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, np.ndarray]:
    return compute("mxnet", request, tmp_path_factory.mktemp("parity") / "results.npz")


def relative_norm(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_parity_with_mxnet(
    framework: str, mxnet_results: dict[str, np.ndarray], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    # Weights, logits, loss, gradients, rates, both optimizers and 15 losses on the same batches
    results = compute(framework, request, tmp_path / "results.npz")
    assert sorted(results) == sorted(mxnet_results)
    differences = {name: relative_norm(results[name], mxnet_results[name]) for name in results}
    for kind, limit in LIMITS.items():
        of_kind = {name: difference for name, difference in differences.items() if name.startswith(kind)}
        assert of_kind and max(of_kind.values()) <= limit, of_kind
    for depth in (18, 50):
        names = sorted(name for name in results if f"gradient {depth}" in name)
        ours, theirs = (np.concatenate([arrays[name].ravel() for name in names]) for arrays in (results, mxnet_results))
        assert relative_norm(ours, theirs) < ALL_GRADIENTS[framework, depth]
    assert {name: float(np.linalg.norm(results[name])) for name in NORMS} == pytest.approx(NORMS, rel=1e-5)
    ours, theirs = results["losses"], mxnet_results["losses"]
    differences_by_step = np.abs(ours - theirs) / theirs
    assert differences_by_step[:8].max() < 1e-3 and differences_by_step.max() < 0.1
    assert ours[-5:].mean() == pytest.approx(theirs[-5:].mean(), rel=0.03)


@pytest.mark.parametrize("framework", ["mxnet", *(pytest.param(name, marks=pytest.mark.long) for name in FRAMEWORKS)])
def test_no_rank_reads_data_before_the_clock_starts(
    framework: str, digits: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Rank 0 takes a second to log run_start, for which the other rank waits before it reads the index
    run = request.getfixturevalue(f"in_{framework}")
    name = "resnet" if framework == "mxnet" else f"resnet-{framework}"
    config = write_small_config(tmp_path / "config.json", name, 2, ["warm_up_steps=0"])
    run("clock.py", framework, str(config), str(digits), str(tmp_path), ranks=2)
    log = (tmp_path / "result.txt").read_text(encoding="utf-8")
    (started,) = re.findall(r'"time_ms": (\d+), "event_type": "INTERVAL_START", "key": "run_start"', log)
    for rank in (0, 1):
        seconds, file = (tmp_path / f"rank_{rank}").read_text(encoding="ascii").split()
        assert file == "train.idx" and float(seconds) >= int(started) / 1000
