"""ResNet in PyTorch and in TensorFlow computes what MXNet computes; no framework's ranks read data before the clock."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainings import InFramework, write_small_config

FRAMEWORKS = ("pytorch", "tensorflow")
Results = dict[str, np.ndarray]
# Largest differences by the kind of result. MXNet's multi_sum_sq adds the squares of 2.4 million weights one by one in
# fp32, from which its rates of LARS follow. One ReLU that rounding puts on the other side of 0 shows in a small
# gradient, hardly in all together. Both read the same crops in the same order.
LIMITS = {"logits": 1e-4, "loss ": 1e-5, "gradient ": 0.1, "rates": 0.0, "sgd": 1e-5, "lars": 1e-4, "first images": 0.0}
# The deeper the network, the more a rounding grows on its way back; MXNet's are as far from float64.
GRADIENTS_OF_50 = {"pytorch": 1e-2, "tensorflow": 2e-2}


@pytest.fixture(scope="module")
def mxnets(in_mxnet: InFramework, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return computed("mxnet", in_mxnet, digits, tmp_path_factory.mktemp("parity"))


def computed(framework: str, inside: InFramework, digits: Path, folder: Path) -> Results:
    # What a framework computes of the common task.
    inside("parity.py", framework, str(folder / "found.npz"), str(digits))
    with np.load(folder / "found.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_parity_with_mxnet(framework: str, mxnets: Results, digits: Path, tmp_path: Path, request: Any) -> None:
    # Weights, logits, loss, gradients, rates, both optimizers and the losses of an epoch and more on the same batches.
    found = computed(framework, request.getfixturevalue(f"in_{framework}"), digits, tmp_path)
    assert sorted(found) == sorted(mxnets)

    def largest(kind: str) -> float:
        # The largest difference of the arrays whose names begin so: |difference| / |MXNet's|, by norms.
        pairs = [(found[name], mxnets[name]) for name in mxnets if name.startswith(kind)]
        return max(float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0)) for a, b in pairs)

    def all_gradients(arrays: Results, depth: int) -> np.ndarray:
        return np.concatenate([arrays[name].ravel() for name in sorted(arrays) if f"gradient {depth}" in name])

    assert {kind: largest(kind) for kind in LIMITS if largest(kind) > LIMITS[kind]} == {}
    for depth, limit in ((18, 1e-3), (50, GRADIENTS_OF_50[framework])):
        mine, theirs = (all_gradients(each, depth) for each in (found, mxnets))
        assert np.linalg.norm(mine - theirs) < limit * np.linalg.norm(theirs), depth
    assert max(found["rule sgd"].max(), found["rule lars"].max()) < 1e-5, "NVIDIA's update rule, worked out in NumPy"
    by_step = np.abs(found["losses"] - mxnets["losses"]) / mxnets["losses"]
    assert by_step[:8].max() < 1e-3 and by_step.max() < 0.1
    assert found["losses"][-10:].mean() == pytest.approx(mxnets["losses"][-10:].mean(), rel=0.03)


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
