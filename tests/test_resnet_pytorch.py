"""ResNet in PyTorch: the network, parity with MXNet, exact evaluation, and real runs on one and two ranks."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, Encore, losses, only_run, records
from tests.test_run import Started, assert_none_left

Inside = Callable[..., str]
NAME = "resnet-pytorch"


def result(output: str) -> Any:
    """The JSON in the last line of a program's output."""
    return json.loads(output.splitlines()[-1])


def train(encore: Encore, digits: Path, results: Path, *arguments: str, ranks: int = 1) -> Path:
    """A run that cannot reach its target; its experiment's folder."""
    done = encore(
        "run", NAME, str(ranks), "--seed", "7", "--data", str(digits), "--results", str(results), *TINY, *arguments
    )  # fmt: skip
    assert done.returncode == 3, done.stdout + done.stderr
    return only_run(results) / "experiment_0"


# -- the network and its step ---------------------------------------------------------------------------


def test_network(in_pytorch: Inside) -> None:
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
    assert found["warm-up keeps"] is True


def test_parity_with_mxnet(in_mxnet: Inside, in_pytorch: Inside, digits: Path, tmp_path: Path) -> None:
    """Weights, logits, loss, gradients, rates, both optimizers and 50 losses on the same batches."""
    other = tmp_path / "mxnet.npz"
    in_mxnet("parity_mxnet.py", str(other), str(digits))
    found = result(in_pytorch("parity_pytorch.py", str(other), str(digits)))
    assert found["same names"]
    assert found["exported"] == 0.0, "weights come back as they went in"
    assert found["logits"] < 1e-4
    assert found["loss"] < 1e-5
    # ResNet-50's gradients are as far from float64 in either framework.
    assert found["gradients 18"] < 1e-3
    assert found["gradients 50"] < 1e-2
    assert found["gradient 18"] < 0.1
    assert found["gradient 50"] < 0.1
    assert found["rates"] == 0.0
    assert found["sgd"] < 1e-5
    assert found["lars"] < 1e-5
    assert found["first images"] == 0.0, "both read the same crops in the same order"
    assert max(found["losses by step"][:8]) < 1e-3
    assert max(found["losses by step"]) < 0.1
    mine, mxnets = found["last losses"]
    assert mine == pytest.approx(mxnets, rel=0.03)


def test_evaluation_counts_each_image_once_whatever_the_ranks(in_pytorch: Inside, digits: Path) -> None:
    one = result(in_pytorch("pytorch_evaluation.py", str(digits), "64"))
    assert one["total"] == 297
    assert one["error of statistics"] == 0.0
    for ranks, batch in ((2, 40), (3, 7)):
        found = result(in_pytorch("pytorch_evaluation.py", str(digits), str(batch), ranks=ranks))
        assert found["error of statistics"] < 1e-6
        assert found["passes"] == pytest.approx([one["passes"][0]] * 2, abs=1 / 297), (ranks, batch)


def test_impossible_settings_are_refused(encore: Encore) -> None:
    for setting, expected in (
        ("precision=fp16", "set precision=fp32 or bf16"),
        ("precision=tf32", "set precision=fp32 or bf16"),
        ("cuda_graph=true", "cuda_graph needs device=gpu"),
        ("bucket_mb=0", "bucket_mb must be at least 1"),
        ("compile=fast", "default"),
    ):
        done = encore("run", NAME, "1", "--system", "cpu", "--set", setting, "--dry-run")
        assert done.returncode == 2, setting
        assert expected in done.stderr, setting


# -- runs -----------------------------------------------------------------------------------------------


def test_run_on_two_ranks_reaches_the_target(encore: Encore, digits: Path, tmp_path: Path) -> None:
    done = encore(
        "run", NAME, "2", "--seed", "1", "--data", str(digits), "--results", str(tmp_path), "--json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (experiment,) = json.loads(done.stdout)["experiments"]
    assert experiment["status"] == "reached"
    assert experiment["quality"] >= experiment["target"] == 0.95
    assert 0 < experiment["minutes"] < 4
    compliance = experiment["compliance"]
    errors = [finding for finding in compliance["findings"] if finding["severity"] == "error"]
    assert {finding["kind"] for finding in errors} == {"small_data"}
    assert compliance["passed_but_for_data"]
    system = json.loads((only_run(tmp_path) / "system.json").read_text(encoding="utf-8"))
    assert system["other_software_stack"]["pytorch_version"].startswith("2.")
    lines = (only_run(tmp_path) / "result_0.txt").read_text(encoding="utf-8").splitlines()
    keys = [json.loads(line.removeprefix(":::MLLOG "))["key"] for line in lines]
    for key in ("init_start", "init_stop", "run_start", "run_stop", "seed", "global_batch_size"):
        assert keys.count(key) == 1, key


def test_same_seed_same_curve_and_two_ranks_agree(encore: Encore, digits: Path, tmp_path: Path) -> None:
    curves = {}
    for name, ranks in (("one", 1), ("again", 1), ("two", 2)):
        curves[name] = losses(train(encore, digits, tmp_path / name, ranks=ranks) / "metrics.jsonl")
    assert curves["one"] == curves["again"]
    # Two ranks draw other images into a step and normalize over half of the batch.
    last = slice(-12, None)
    one, two = (sum(curves[name][last]) / 12 for name in ("one", "two"))
    assert two == pytest.approx(one, rel=0.25)
    assert curves["two"][0] == pytest.approx(curves["one"][0], rel=0.1)


def test_signal_writes_a_checkpoint_and_resume_is_exact(encore: Encore, digits: Path, tmp_path: Path) -> None:
    unbroken = train(encore, digits, tmp_path / "unbroken", ranks=2)
    started = Started(digits, tmp_path / "broken", *TINY, name=NAME)
    folder = started.wait_for_step(30)
    ranks = started.ranks(folder)
    started.process.send_signal(signal.SIGTERM)
    code, output, seconds = started.end()
    assert code == 130, output
    assert seconds < 10
    assert "a checkpoint was written" in output
    assert_none_left(ranks)
    done = encore("run", "--resume", str(folder.parent))
    assert done.returncode == 3, done.stdout + done.stderr
    metrics = folder / "metrics.jsonl", unbroken / "metrics.jsonl"
    assert losses(metrics[0]) == losses(metrics[1])
    qualities = [[record["quality"] for record in records(path, "eval")] for path in metrics]
    assert qualities[0] == qualities[1]


def test_rank_that_dies_ends_the_run_and_is_named(digits: Path, tmp_path: Path) -> None:
    started = Started(digits, tmp_path, name=NAME)
    folder = started.wait_for_step(5)
    ranks = started.ranks(folder)
    os.kill(ranks[1].pid, signal.SIGKILL)
    code, output, seconds = started.end()
    assert code == 1, output
    assert "rank 1 was killed by SIGKILL" in output
    assert seconds < 20
    assert_none_left(ranks)


def test_every_option_of_the_step_trains(encore: Encore, digits: Path, tmp_path: Path) -> None:
    """torch.compile over two ranks, bf16, LARS, a scaled loss, fp16 on the wire, small buckets."""
    settings = {
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
    changes = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    curve = losses(train(encore, digits, tmp_path, *changes, ranks=2) / "metrics.jsonl")
    assert len(curve) == 24
    assert curve[-1] < 0.8 * curve[0]
