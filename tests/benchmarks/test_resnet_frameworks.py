"""ResNet in PyTorch and in TensorFlow by the same tests: parity with MXNet, and real runs on one and two ranks."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Encore, evaluations, logged, losses, only_run
from tests.trainings import SEED, InFramework, Started, assert_none_left, result

EPOCH = 24
"""Steps that go over the small data set once."""
FRAMEWORKS = ("pytorch", "tensorflow")
GRADIENTS_OF_50 = {"pytorch": 1e-2, "tensorflow": 2e-2}
"""The deeper the network, the more a rounding grows on its way back; MXNet's are as far from float64."""


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    """Each framework in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def mxnets(in_mxnet: InFramework, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What MXNet computes of the common task."""
    file = tmp_path_factory.mktemp("parity") / "mxnet.npz"
    in_mxnet("parity_mxnet.py", str(file), str(digits))
    return file


def test_parity_with_mxnet(framework: str, mxnets: Path, digits: Path, request: pytest.FixtureRequest) -> None:
    """Weights, logits, loss, gradients, rates, both optimizers and 50 losses on the same batches."""
    inside: InFramework = request.getfixturevalue(f"in_{framework}")
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
    # MXNet's multi_sum_sq adds the squares of 2.4 million weights one by one in fp32, from which its rates follow.
    assert found["lars"] < 1e-4
    assert found["rule sgd"] < 1e-5, "NVIDIA's update rule, worked out in NumPy"
    assert found["rule lars"] < 1e-5
    assert found["first images"] == 0.0, "both read the same crops in the same order"
    assert max(found["losses by step"][:8]) < 1e-3
    assert max(found["losses by step"]) < 0.1
    mine, theirs = found["last losses"]
    assert mine == pytest.approx(theirs, rel=0.03)


# -- whole runs: one reaches the target, and the others are held against its first epochs -----------------


@dataclass(frozen=True)
class Reached:
    """A run on two ranks that reached its target: its folder and what --json printed."""

    folder: Path
    printed: dict[str, Any]

    @property
    def metrics(self) -> Path:
        """Its metrics stream."""
        return self.folder / "experiment_0" / "metrics.jsonl"


@pytest.fixture(scope="module")
def reached(framework: str, encore: Encore, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Reached:
    """Trains until the target is reached."""
    results = tmp_path_factory.mktemp("reached")
    where = ("--data", str(digits), "--results", str(results))
    done = encore("run", f"resnet-{framework}", "2", *SEED, *where, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return Reached(only_run(results), json.loads(done.stdout))


def test_run_on_two_ranks_reaches_the_target(framework: str, reached: Reached) -> None:
    (experiment,) = reached.printed["experiments"]
    assert experiment["status"] == "reached"
    assert experiment["qualities"]["accuracy"] >= experiment["targets"]["accuracy"] == 0.95
    assert experiment["minutes"] > 0
    compliance = experiment["compliance"]
    errors = [finding for finding in compliance["findings"] if finding["severity"] == "error"]
    assert {finding["kind"] for finding in errors} == {"small_data"}
    assert compliance["passed_but_for_data"]
    system = json.loads((reached.folder / "system.json").read_text(encoding="utf-8"))
    assert system["other_software_stack"][f"{framework}_version"].startswith("2.")
    keys = [event["key"] for event in logged(reached.folder / "result_0.txt")]
    for key in ("init_start", "init_stop", "run_start", "run_stop", "seed", "global_batch_size"):
        assert keys.count(key) == 1, key


def stopped_at(framework: str, digits: Path, results: Path, step: int) -> list[float]:
    """The losses of a run on one rank that is stopped behind this step."""
    started = Started.run(digits, results, name=f"resnet-{framework}", ranks=1)
    folder = started.wait_for_step(step)
    started.process.send_signal(signal.SIGTERM)
    code, output = started.end()
    assert code == 130, output
    return losses(folder / "metrics.jsonl")


def test_same_seed_same_curve_and_two_ranks_agree(
    framework: str, reached: Reached, digits: Path, tmp_path: Path
) -> None:
    one = stopped_at(framework, digits, tmp_path / "one", 2 * EPOCH)
    again = stopped_at(framework, digits, tmp_path / "again", 8)
    assert again == one[: len(again)]
    two = losses(reached.metrics)
    # Two ranks draw other images into a step and normalize over half of the batch.
    last = slice(2 * EPOCH - 12, 2 * EPOCH)
    assert sum(two[last]) == pytest.approx(sum(one[last]), rel=0.25)
    assert two[0] == pytest.approx(one[0], rel=0.1)


def test_signal_writes_a_checkpoint_resume_is_exact_and_a_rank_that_dies_is_named(
    framework: str, reached: Reached, digits: Path, tmp_path: Path
) -> None:
    started = Started.run(digits, tmp_path, name=f"resnet-{framework}")
    folder = started.wait_for_step(EPOCH + 6)
    ranks = started.ranks(folder)
    started.process.send_signal(signal.SIGTERM)
    code, output = started.end()
    assert code == 130, output
    assert "a checkpoint was written" in output
    assert_none_left(ranks)

    resumed = Started.again(folder.parent)
    resumed.wait_for_step(2 * EPOCH + 4)
    ranks = resumed.ranks(folder)
    os.kill(ranks[1].pid, signal.SIGKILL)
    code, output = resumed.end()
    assert code == 1, output
    assert "rank 1 was killed by SIGKILL" in output
    assert_none_left(ranks)

    curve, unbroken = losses(folder / "metrics.jsonl"), losses(reached.metrics)
    assert len(curve) > 2 * EPOCH
    assert curve == unbroken[: len(curve)]
    found = evaluations(folder / "metrics.jsonl")
    assert len(found) == 2
    assert found == evaluations(reached.metrics)[:2]
