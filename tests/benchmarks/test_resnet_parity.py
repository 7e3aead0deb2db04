"""ResNet in PyTorch and in TensorFlow computes what MXNet computes; no framework's ranks read data before the clock."""

import re
from pathlib import Path

import pytest

from tests.trainings import InFramework, result, write_small_config

FRAMEWORKS = ("pytorch", "tensorflow")
# The deeper the network, the more a rounding grows on its way back; MXNet's are as far from float64.
GRADIENTS_OF_50 = {"pytorch": 1e-2, "tensorflow": 2e-2}


@pytest.fixture(scope="module")
def mxnets(in_mxnet: InFramework, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # What MXNet computes of the common task.
    file = tmp_path_factory.mktemp("parity") / "mxnet.npz"
    in_mxnet("parity_mxnet.py", str(file), str(digits))
    return file


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_parity_with_mxnet(framework: str, mxnets: Path, digits: Path, request: pytest.FixtureRequest) -> None:
    # Weights, logits, loss, gradients, rates, both optimizers and 50 losses on the same batches.
    inside: InFramework = request.getfixturevalue(f"in_{framework}")
    found = result(inside(f"parity_{framework}.py", str(mxnets), str(digits)))
    assert found["same names"]
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


@pytest.mark.parametrize("framework", ["mxnet", *FRAMEWORKS])
def test_no_rank_reads_before_rank_0_has_started_the_clock(
    framework: str, digits: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Not even the index; rank 0 takes a second to log run_start, for which the other rank waits.
    inside: InFramework = request.getfixturevalue(f"in_{framework}")
    name = "resnet" if framework == "mxnet" else f"resnet-{framework}"
    config = write_small_config(tmp_path / "config.json", name, 2, ["warm_up_steps=0"])
    inside("clock.py", framework, str(config), str(digits), str(tmp_path), ranks=2)
    log = (tmp_path / "result.txt").read_text(encoding="utf-8")
    (started,) = re.findall(r'"time_ms": (\d+), "event_type": "INTERVAL_START", "key": "run_start"', log)
    for rank in (0, 1):
        read, file = (tmp_path / f"rank_{rank}").read_text(encoding="ascii").split()
        assert file == "train.idx"
        assert float(read) >= int(started) / 1000
