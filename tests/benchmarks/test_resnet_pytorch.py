"""ResNet in PyTorch: the network, parity with MXNet, exact evaluation, and real runs on one and two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Encore, losses
from tests.trainings import InFramework, result, settings, train

NAME = "resnet-pytorch"


def test_network(in_pytorch: InFramework) -> None:
    found = result(in_pytorch("pytorch_network.py"))
    # torchvision's documentation gives the same counts for its ResNets.
    assert found["parameters"] == {
        "18": 11689512,
        "34": 21797672,
        "50": 25557032,
        "101": 44549160,
        "152": 60192808,
    }
    assert found["strides"] == [1, 2, 1], "v1.5 has the stride in the 3x3 convolution"
    assert found["loss error"] < 1e-6
    assert found["same seed"] == 0.0
    assert found["other seed"] > 0.1
    assert found["NHWC"] < 1e-5
    assert 0 < found["bf16"] < 0.05
    assert found["changed by a warm-up"] == []
    assert found["accumulated"] == pytest.approx([0.0, 0.0], abs=1e-5)
    assert found["all-reduces"] == [1, 1], "all passes of a step send their gradients once"
    assert found["compiled graphs"] == 1, "the whole network, not block by block"
    assert found["capturable"] < 1e-6
    # The overflow of the first step is in the second one's loss, which is read two steps later.
    assert found["overflow"] == [[4, "the loss is not finite at step 2: found nan"]] * 2
    assert found["group"] == {"cpu": "{}", "cuda": "{'device_id': device(type='cuda', index=0)}"}


def test_what_the_installed_pytorch_lacks_is_reported(in_pytorch: InFramework) -> None:
    found = result(in_pytorch("pytorch_network.py"))
    assert found["cpu"] is True, "on a CPU neither compiled nor captured"
    assert found["lacks"] == [None, None]
    best, without = found["settled"]
    assert best == ["default", True, ""]
    assert without[:2] == ["none", False]
    for text in ("compile=none, which is slower: no compiler", "cuda_graph=false, which is slower: no graphs"):
        assert text in without[2]
    assert "compile=default: no compiler\n  do this: set compile=none" in without[2]


def test_activations_in_the_model_of_memory_are_those_that_pytorch_keeps(in_pytorch: InFramework) -> None:
    found = result(in_pytorch("pytorch_network.py"))["kept"]
    assert set(found) == {"18 fp32", "18 bf16", "50 fp32", "50 bf16"}
    for name, (kept, modelled) in found.items():
        assert modelled == pytest.approx(kept, rel=0.02), name


def test_evaluation_counts_each_image_once_whatever_the_ranks(in_pytorch: InFramework, digits: Path) -> None:
    one = result(in_pytorch("pytorch_evaluation.py", str(digits), "64"))
    assert one["total"] == 297
    assert one["error of statistics"] == 0.0
    # 149 images are a batch more than the other rank's 148.
    two = result(in_pytorch("pytorch_evaluation.py", str(digits), "37", ranks=2))
    assert two["error of statistics"] < 1e-6
    assert two["passes"] == pytest.approx([one["passes"][0]] * 2, abs=1 / 297)


def test_impossible_settings_are_refused(encore: Encore) -> None:
    for setting, expected in (
        ("precision=fp16", "set precision=fp32 or precision=bf16"),
        ("precision=tf32", "set precision=fp32 or precision=bf16"),
        ("cuda_graph=true", "cuda_graph needs device=gpu"),
        ("accumulation_steps=3", "must be a multiple of accumulation_steps=3"),
        ("bucket_mb=0", "bucket_mb must be at least 1"),
        ("compile=fast", "default"),
    ):
        done = encore("run", NAME, "1", "--system", "cpu", "--set", setting, "--dry-run")
        assert done.returncode == 2, setting
        assert expected in done.stderr, setting


def test_every_option_of_the_step_trains(encore: Encore, digits: Path, tmp_path: Path) -> None:
    """torch.compile over two ranks, bf16, LARS, a scaled loss, two passes a step, fp16 on the wire, small buckets."""
    changed = {
        "accumulation_steps": "2",
        "compile": "default",
        "precision": "bf16",
        "optimizer": "lars",
        "learning_rate": "4.0",
        "loss_scale": "128",
        "gradient_compression": "fp16",
        "bucket_mb": "8",
        "epochs": "1",
        "warmup_epochs": "0.5",
    }
    curve = losses(train(encore, NAME, digits, tmp_path, *settings(changed), ranks=2) / "metrics.jsonl")
    assert len(curve) == 24
    assert curve[-1] < 0.8 * curve[0]
