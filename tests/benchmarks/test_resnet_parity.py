"""ResNet in PyTorch and in TensorFlow computes what MXNet computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainings import InFramework, result

FRAMEWORKS = ("pytorch", "tensorflow")
GRADIENTS_OF_50 = {"pytorch": 1e-2, "tensorflow": 2e-2}
"""The deeper the network, the more a rounding grows on its way back; MXNet's are as far from float64."""


@pytest.fixture(scope="module")
def mxnets(in_mxnet: InFramework, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What MXNet computes of the common task."""
    file = tmp_path_factory.mktemp("parity") / "mxnet.npz"
    in_mxnet("parity_mxnet.py", str(file), str(digits))
    return file


@pytest.mark.parametrize("framework", FRAMEWORKS)
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
