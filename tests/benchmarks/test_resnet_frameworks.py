"""ResNet in MXNet, PyTorch and TensorFlow: resume, ranks, options of a step, and a real server."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Encore, ToyRun, evaluations, logged, losses, only_run
from tests.trainings import Started, assert_none_left, evaluated, exported, settings

STEPS_PER_EPOCH = 24
TOY_SEED = ("--seed", "1")  # The seed of toy_run


@pytest.mark.parametrize("framework", [pytest.param("pytorch", marks=pytest.mark.long), "tensorflow"])
def test_resumed_run_has_bit_identical_losses(
    framework: str, toy_run: Callable[[str], ToyRun], digits: Path, tmp_path: Path
) -> None:
    name = f"resnet-{framework}"
    started = Started.run(digits, tmp_path, *TOY_SEED, name=name)
    # Before the first evaluation, which needs the batch statistics of every rank
    folder = started.wait_for_step(STEPS_PER_EPOCH // 2)
    ranks = started.ranks(folder)
    started.process.send_signal(signal.SIGTERM)
    assert "a checkpoint was written" in started.ended(130)
    assert_none_left(ranks)
    stopped_at = len(losses(folder / "metrics.jsonl"))
    assert stopped_at < STEPS_PER_EPOCH

    resumed = Started.again(folder.parent)
    resumed.wait_for_step(STEPS_PER_EPOCH + 1)
    resumed.process.send_signal(signal.SIGTERM)
    resumed.ended(130)
    curve, uninterrupted = (losses(metrics) for metrics in (folder / "metrics.jsonl", toy_run(name).metrics))
    steps = min(len(curve), len(uninterrupted))
    assert steps >= STEPS_PER_EPOCH
    assert curve[:steps] == uninterrupted[:steps]
    assert evaluations(folder / "metrics.jsonl")[0] == evaluations(toy_run(name).metrics)[0]


pytorch_and_tensorflow = pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])


@pytest.mark.long
@pytorch_and_tensorflow
def test_killed_rank_is_reported(framework: str, digits: Path, tmp_path: Path) -> None:
    started = Started.run(digits, tmp_path, name=f"resnet-{framework}")
    ranks = started.ranks(started.wait_for_step(2))
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert "rank 1 was killed by SIGKILL" in started.ended(1)
    assert_none_left(ranks)


@pytest.mark.long
@pytorch_and_tensorflow
def test_two_ranks_train_like_one(
    framework: str, toy_run: Callable[[str], ToyRun], digits: Path, tmp_path: Path
) -> None:
    name = f"resnet-{framework}"
    started = Started.run(digits, tmp_path, *TOY_SEED, "--env", "OMP_NUM_THREADS=1", name=name, ranks=1)
    folder = started.wait_for_step(STEPS_PER_EPOCH)
    started.process.send_signal(signal.SIGTERM)
    started.ended(130)
    one, two = losses(folder / "metrics.jsonl"), losses(toy_run(name).metrics)
    # Two ranks draw other images into a step and normalize over half of the batch
    assert two[0] == pytest.approx(one[0], rel=0.1)
    last = slice(STEPS_PER_EPOCH // 2, STEPS_PER_EPOCH)
    assert sum(two[last]) == pytest.approx(sum(one[last]), rel=0.25)


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


STEP = {"optimizer": "lars", "learning_rate": "4.0", "gradient_compression": "fp16", "epochs": "1",
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
    assert ("lars_opt_base_learning_rate" in keys, keys.count("eval_accuracy")) == (True, 1)
    curve = losses(only_run(tmp_path) / "experiment_0" / "metrics.jsonl")
    assert len(curve) == (6 if name == "resnet" else STEPS_PER_EPOCH // 2)
    assert all(0 < loss < 10 for loss in curve)
    # 6 steps are too few for a network of 50 layers
    assert name == "resnet" or curve[-1] < 0.9 * curve[0]


def test_system_of_another_framework_is_not_a_submitted_configuration(encore: Encore) -> None:
    shown = json.loads(encore("show", "resnet-tensorflow", "--system", "dgxa100", "--json").stdout)
    assert shown["submitted"] is False
    assert shown["deviations"] == [{"key": "framework", "text": "tensorflow instead of mxnet"}]
