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
    assert found["fused by documentation"] == [False, False]
    assert found["fused in fp32"] == [False, False]
    assert found["reported upstream"].endswith(
        "has no BatchNorm with act_type and BatchNormAddRelu: batch-norm, sum and ReLU run as separate, slower kernels"
    )
    assert found["reported on NGC"] == found["reported on a CPU"] == ""
    # As resnet-v1b-fl.py calls them; Gluon's own arguments stay out.
    common = ["axis", "beta", "data", "eps", "fix_gamma", "gamma", "momentum", "moving_mean", "moving_var", "name"]
    assert found["arguments of a fused block"] == [sorted([*common, "act_type"]), sorted([*common, "addend"])]


def test_a_step_stays_in_the_range_of_fp16_shows_nan_and_forgets_its_warm_up(in_mxnet: InFramework) -> None:
    found = result(in_mxnet("mxnet_step.py"))
    assert 0 < found["largest gradient"] < 65504, "the end of fp16"
    assert found["loss before"] == pytest.approx(6.9, abs=1.0)
    assert found["loss is finite with NaN in the first convolution"] is False
    for optimizer in ("sgd", "lars"):
        assert found[f"losses after warm-up {optimizer}"] == found[f"losses {optimizer}"]
        assert found[f"losses resumed {optimizer}"] == found[f"losses {optimizer}"][2:]
        assert found[f"steps of the warm-up {optimizer}"] == 3
    assert found["GPU of local rank 3 of 4 visible"] == 3
    assert found["GPU of local rank 3 of 1 visible"] == 0


def test_optimizers_follow_the_submitted_rules(in_mxnet: InFramework) -> None:
    errors = result(in_mxnet("optimizer.py"))
    assert errors["sgd fp32"] < 1e-5
    assert errors["lars fp32"] < 1e-5
    # The last update of fp16 weights is rounded from their fp32 masters: half a unit in 2 ** 11.
    assert errors["sgd fp16"] < 5e-4
    assert errors["lars fp16"] < 5e-4


def test_evaluation_counts_each_image_once_whatever_the_ranks(in_mxnet: InFramework, digits: Path) -> None:
    one = result(in_mxnet("evaluation.py", str(digits), "1"))
    assert one["total"] == 297
    # 149 images are a batch more than the other rank's 148.
    two = result(in_mxnet("evaluation.py", str(digits), "37", ranks=2))
    assert two["passes"] == [one["passes"][0]] * 2
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
