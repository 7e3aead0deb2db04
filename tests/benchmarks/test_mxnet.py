"""The MXNet implementation in its own environment: network, optimizers, input and exact evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Encore, losses, only_run
from tests.trainings import InFramework, result


def test_network(in_mxnet: InFramework) -> None:
    found = result(in_mxnet("network.py"))
    # torchvision's documentation gives the same counts for its ResNets.
    assert found["parameters"] == {
        "18": 11689512,
        "34": 21797672,
        "50": 25557032,
        "101": 44549160,
        "152": 60192808,
    }
    assert found["strides"] == [1, 2, 1], "v1.5 has the stride in the 3x3 convolution"
    assert found["loss error"] < 1e-5
    assert found["same seed"] == 0.0
    assert found["other seed"] > 0.0


def test_fused_operators_are_found_by_asking(in_mxnet: InFramework) -> None:
    found = result(in_mxnet("network.py"))
    assert found["fused on NGC"] == [True, True]
    assert found["fused upstream"] == [False, False]
    assert found["fused in fp32"] == [False, False]


def test_optimizers_follow_the_papers(in_mxnet: InFramework) -> None:
    errors = result(in_mxnet("optimizer.py"))
    assert errors["sgd fp32"] < 1e-5
    assert errors["lars fp32"] < 1e-5
    # The last update of fp16 weights is rounded from their fp32 masters: half a unit in 2 ** 11.
    assert errors["sgd fp16"] < 5e-4
    assert errors["lars fp16"] < 5e-4


def test_evaluation_counts_each_image_once_whatever_the_ranks(in_mxnet: InFramework, digits: Path) -> None:
    one = result(in_mxnet("evaluation.py", str(digits), "1"))
    assert one["total"] == 297
    for ranks, batch in ((1, 64), (2, 40), (3, 7)):
        found = result(in_mxnet("evaluation.py", str(digits), str(batch), ranks=ranks))
        assert found["passes"] == [one["passes"][0]] * 2, (ranks, batch)
    # Pillow and DALI decode JPEG a little differently: an image or two may fall to the other side.
    assert one["passes"][0] == pytest.approx(one["by hand"], abs=2 / 297)


def test_training_input_goes_over_every_image_and_resumes(in_mxnet: InFramework, digits: Path) -> None:
    found = result(in_mxnet("training_input.py", str(digits)))
    assert found["labels of two shards over an epoch"] == found["labels of the files"]
    assert found["resumed equals unbroken"] is True
    assert found["crops differ between ranks"] is True
    assert found["shape NHWC padded"] == [8, 32, 32, 4]


def test_every_option_of_the_step_trains(encore: Encore, digits: Path, tmp_path: Path) -> None:
    """LARS, the step schedule, fused groups, fp16 on the wire, bottlenecks, offsets: two ranks, one epoch."""
    settings = {
        "optimizer": "lars",
        "learning_rate": "4.0",
        "schedule": "step",
        "decay_epochs": "[1]",
        "gradient_compression": "fp16",
        "gradient_groups": "3",
        "depth": "50",
        "label_smoothing": "0",
        "mirror": "true",
        "eval_period": "2",
        "eval_offset": "1",
        "epochs": "1",
        "warmup_epochs": "0.5",
        "batch_size": "64",
        "log_interval": "5",
    }
    changes = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    done = encore("run", "resnet", "2", "--data", str(digits), "--results", str(tmp_path), "--seed", "1", *changes)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    folder = only_run(tmp_path)
    keys = [json.loads(line[9:])["key"] for line in (folder / "result_0.txt").read_text().splitlines()]
    assert "lars_opt_base_learning_rate" in keys
    assert keys.count("eval_accuracy") == 1
    curve = losses(folder / "experiment_0" / "metrics.jsonl")
    assert len(curve) == 3
    assert all(0 < loss < 10 for loss in curve)
