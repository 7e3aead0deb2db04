"""ResNet in TensorFlow: the network, parity with MXNet, exact evaluation, and real runs on one and two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Encore, losses
from tests.trainings import InFramework, result, settings, train

NAME = "resnet-tensorflow"


def test_network(in_tensorflow: InFramework) -> None:
    found = result(in_tensorflow("tensorflow_network.py"))
    # torchvision's documentation gives the same counts for its ResNets.
    assert found["parameters"] == {
        "18": 11689512,
        "34": 21797672,
        "50": 25557032,
        "101": 44549160,
        "152": 60192808,
    }
    assert found["loss error"] < 1e-6
    assert found["same seed"] == 0.0
    assert found["other seed"] > 0.1
    assert found["scaled loss"] < 1e-5
    assert 0 < found["bf16"] < 0.05
    assert found["XLA"] < 1e-4
    assert found["losses with NaN are finite"] == [False, False]
    assert found["changed by a warm-up"] == [[], 1], "nothing, and steps of other rates are not traced again"
    assert found["accumulated"] == pytest.approx([0.0, 0.0, 0.0], abs=1e-5)
    # The overflow of a step shows in what it reports, which is read two steps later.
    assert found["overflow"] == [3, "the loss is not finite at step 1: found nan"]
    assert found["sums"] == [None, None, [2.0, 0.0], [4.0, 0.0], [6.0, 2.0]]
    assert found["visible"] == ["5", "3"], "a rank that sees one GPU only has that one"
    assert found["compiles"] == [False, True, False, True, True, False]
    assert len(found["zeroed"]) == 8
    assert all(name.endswith("norm2.gamma") for name in found["zeroed"])


def test_evaluation_counts_each_image_once_whatever_the_ranks(in_tensorflow: InFramework, digits: Path) -> None:
    one = result(in_tensorflow("tensorflow_evaluation.py", str(digits), "64"))
    assert one["total"] == 297
    # 149 images are a batch more than the other rank's 148.
    two = result(in_tensorflow("tensorflow_evaluation.py", str(digits), "37", ranks=2))
    assert two["error of statistics"] < 1e-6
    assert two["passes"] == pytest.approx([one["passes"][0]] * 2, abs=1 / 297)


def test_impossible_settings_are_refused(encore: Encore) -> None:
    for setting, expected in (
        ("precision=fp16", "set precision=fp32 or precision=bf16"),
        ("precision=tf32", "set precision=fp32 or precision=bf16"),
        ("layout=NCHW", "one of NHWC"),
        ("gradient_groups=-1", "gradient_groups must be at least 0"),
    ):
        done = encore("run", NAME, "1", "--system", "cpu", "--set", setting, "--dry-run")
        assert done.returncode == 2, setting
        assert expected in done.stderr, setting


def test_system_of_another_framework_is_not_a_submitted_configuration(encore: Encore) -> None:
    shown = json.loads(encore("show", NAME, "--system", "dgxa100", "--json").stdout)
    assert shown["submitted"] is False
    assert shown["deviations"] == [{"key": "framework", "text": "tensorflow instead of mxnet"}]


def test_every_option_of_the_step_trains(encore: Encore, digits: Path, tmp_path: Path) -> None:
    """LARS, bf16, a scaled loss, two passes a step, fp16 on the wire in groups: two ranks, one epoch."""
    changed = {
        "accumulation_steps": "2",
        "optimizer": "lars",
        "learning_rate": "4.0",
        "precision": "bf16",
        "loss_scale": "128",
        "gradient_compression": "fp16",
        "gradient_groups": "3",
        "epochs": "1",
        "warmup_epochs": "0.5",
    }
    curve = losses(train(encore, NAME, digits, tmp_path, *settings(changed), ranks=2) / "metrics.jsonl")
    assert len(curve) == 24
    assert curve[-1] < 0.8 * curve[0]
