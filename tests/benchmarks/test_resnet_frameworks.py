"""ResNet in PyTorch and in TensorFlow by the same tests: parity with MXNet, and real runs on one and two ranks."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, Encore, losses, only_run, records
from tests.run.test_run import Started, assert_none_left

Inside = Callable[..., str]
FRAMEWORKS = ("pytorch", "tensorflow")
GRADIENTS_OF_50 = {"pytorch": 1e-2, "tensorflow": 2e-2}
"""The deeper the network, the more a rounding grows on its way back; MXNet's are as far from float64."""


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    """Each framework in turn."""
    return str(request.param)


def result(output: str) -> Any:
    """The JSON in the last line of a program's output that has any."""
    lines = [line.split("<stdout>:")[-1] for line in output.splitlines()]
    return json.loads([line for line in lines if line.startswith("{")][-1])


def train(encore: Encore, framework: str, digits: Path, results: Path, *arguments: str, ranks: int = 1) -> Path:
    """A run that cannot reach its target; its experiment's folder."""
    where = ("--seed", "7", "--data", str(digits), "--results", str(results))
    done = encore("run", f"resnet-{framework}", str(ranks), *where, *TINY, *arguments)
    assert done.returncode == 3, done.stdout + done.stderr
    return only_run(results) / "experiment_0"


@pytest.fixture(scope="module")
def mxnets(in_mxnet: Inside, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What MXNet computes of the common task."""
    file = tmp_path_factory.mktemp("parity") / "mxnet.npz"
    in_mxnet("parity_mxnet.py", str(file), str(digits))
    return file


def test_parity_with_mxnet(framework: str, mxnets: Path, digits: Path, request: pytest.FixtureRequest) -> None:
    """Weights, logits, loss, gradients, rates, both optimizers and 50 losses on the same batches."""
    inside: Inside = request.getfixturevalue(f"in_{framework}")
    found = result(inside(f"parity_{framework}.py", str(mxnets), str(digits)))
    assert found["same names"]
    assert found["exported"] == 0.0, "weights come back as they went in"
    assert found["logits"] < 1e-4
    assert found["loss"] < 1e-5
    assert found["gradients 18"] < 1e-3
    assert found["gradients 50"] < GRADIENTS_OF_50[framework]
    assert found["gradient 18"] < 0.1
    assert found["gradient 50"] < 0.1
    assert found["rates"] == 0.0
    assert found["sgd"] < 1e-5
    assert found["lars"] < 1e-5
    assert found["first images"] == 0.0, "both read the same crops in the same order"
    assert max(found["losses by step"][:8]) < 1e-3
    assert max(found["losses by step"]) < 0.1
    mine, theirs = found["last losses"]
    assert mine == pytest.approx(theirs, rel=0.03)


def test_run_on_two_ranks_reaches_the_target(encore: Encore, framework: str, digits: Path, tmp_path: Path) -> None:
    where = ("--data", str(digits), "--results", str(tmp_path))
    done = encore("run", f"resnet-{framework}", "2", "--seed", "1", *where, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (experiment,) = json.loads(done.stdout)["experiments"]
    assert experiment["status"] == "reached"
    assert experiment["qualities"]["accuracy"] >= experiment["targets"]["accuracy"] == 0.95
    assert experiment["minutes"] > 0
    compliance = experiment["compliance"]
    errors = [finding for finding in compliance["findings"] if finding["severity"] == "error"]
    assert {finding["kind"] for finding in errors} == {"small_data"}
    assert compliance["passed_but_for_data"]
    system = json.loads((only_run(tmp_path) / "system.json").read_text(encoding="utf-8"))
    assert system["other_software_stack"][f"{framework}_version"].startswith("2.")
    lines = (only_run(tmp_path) / "result_0.txt").read_text(encoding="utf-8").splitlines()
    keys = [json.loads(line.removeprefix(":::MLLOG "))["key"] for line in lines]
    for key in ("init_start", "init_stop", "run_start", "run_stop", "seed", "global_batch_size"):
        assert keys.count(key) == 1, key


def test_same_seed_same_curve_and_two_ranks_agree(encore: Encore, framework: str, digits: Path, tmp_path: Path) -> None:
    curves = {}
    for name, ranks in (("one", 1), ("again", 1), ("two", 2)):
        curves[name] = losses(train(encore, framework, digits, tmp_path / name, ranks=ranks) / "metrics.jsonl")
    assert curves["one"] == curves["again"]
    # Two ranks draw other images into a step and normalize over half of the batch.
    last = slice(-12, None)
    one, two = (sum(curves[name][last]) / 12 for name in ("one", "two"))
    assert two == pytest.approx(one, rel=0.25)
    assert curves["two"][0] == pytest.approx(curves["one"][0], rel=0.1)


def test_signal_writes_a_checkpoint_and_resume_is_exact(
    encore: Encore, framework: str, digits: Path, tmp_path: Path
) -> None:
    unbroken = train(encore, framework, digits, tmp_path / "unbroken", ranks=2)
    started = Started(digits, tmp_path / "broken", *TINY, name=f"resnet-{framework}")
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


def test_rank_that_dies_ends_the_run_and_is_named(framework: str, digits: Path, tmp_path: Path) -> None:
    started = Started(digits, tmp_path, name=f"resnet-{framework}")
    folder = started.wait_for_step(5)
    ranks = started.ranks(folder)
    os.kill(ranks[1].pid, signal.SIGKILL)
    code, output, seconds = started.end()
    assert code == 1, output
    assert "rank 1 was killed by SIGKILL" in output
    assert seconds < 20
    assert_none_left(ranks)
