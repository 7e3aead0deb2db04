"""ResNet in PyTorch and TensorFlow computes the same as in MXNet; no rank reads data before the clock starts."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.trainings import InFramework, write_small_config

FRAMEWORKS = ("pytorch", "tensorflow")
Results = dict[str, np.ndarray]
# Largest difference per kind of result. MXNet's multi_sum_sq adds the squares of 2.4 million weights one by one in
# fp32; its LARS rates follow from it. A ReLU on the other side of 0 after rounding shows in a small gradient, hardly
# in all gradients together. Both read the same crops in the same order.
LIMITS = {"logits": 1e-4, "loss ": 1e-5, "gradient ": 0.1, "rates": 0.0, "sgd": 1e-5, "lars": 1e-4, "first images": 0.0}
# The deeper the network, the more a rounding error grows in the backward pass; MXNet is as far from float64.
ALL_GRADIENTS = {("pytorch", 18): 1e-3, ("pytorch", 50): 1e-2, ("tensorflow", 18): 1e-3, ("tensorflow", 50): 2e-2}

# Weights after the steps of NVIDIA's rules (v0.7, common/fit.py: SGDwFASTLARS and mx.optimizer.SGD) in float64
NORMS = {
    "sgd stem.conv.weight": 336.26669606,
    "sgd stage1.block1.norm1.gamma": 29.49087086,
    "sgd dense.weight": 247.97050372,
    "sgd dense.bias": 11.41207729,
    "lars stem.conv.weight": 11.66056941,
    "lars stage1.block1.norm1.gamma": 29.92510789,
    "lars stage4.block2.conv2.weight": 33.07821306,
    "lars dense.weight": 0.73370474,
    "lars dense.bias": 11.22936302,
}


def compute(framework: str, request: pytest.FixtureRequest, file: Path) -> Results:
    run = request.getfixturevalue(f"in_{framework}")
    run("parity.py", framework, str(file), str(request.getfixturevalue("few_digits")))
    with np.load(file) as arrays:
        return {name: arrays[name] for name in arrays.files}


@pytest.fixture(scope="module")
def mxnet_results(
    in_mxnet: InFramework, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    return compute("mxnet", request, tmp_path_factory.mktemp("parity") / "results.npz")


def relative_norm(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_parity_with_mxnet(
    framework: str, mxnet_results: Results, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    # Weights, logits, loss, gradients, rates, both optimizers and 15 losses on the same batches
    results = compute(framework, request, tmp_path / "results.npz")
    assert sorted(results) == sorted(mxnet_results)
    for kind, limit in LIMITS.items():
        differences = {
            name: relative_norm(results[name], mxnet_results[name]) for name in results if name.startswith(kind)
        }
        assert differences and max(differences.values()) <= limit, differences
    for depth in (18, 50):
        names = sorted(name for name in results if f"gradient {depth}" in name)
        ours, theirs = (np.concatenate([arrays[name].ravel() for name in names]) for arrays in (results, mxnet_results))
        assert relative_norm(ours, theirs) < ALL_GRADIENTS[framework, depth]
    norms = {name: float(np.linalg.norm(results[name])) for name in NORMS}
    assert norms == pytest.approx(NORMS, rel=1e-5)
    ours, theirs = results["losses"], mxnet_results["losses"]
    differences_by_step = np.abs(ours - theirs) / theirs
    assert differences_by_step[:8].max() < 1e-3 and differences_by_step.max() < 0.1
    assert ours[-5:].mean() == pytest.approx(theirs[-5:].mean(), rel=0.03)


@pytest.mark.parametrize("framework", ["mxnet", *(pytest.param(name, marks=pytest.mark.long) for name in FRAMEWORKS)])
def test_no_rank_reads_data_before_the_clock_starts(
    framework: str, digits: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Rank 0 takes a second to log run_start, for which the other rank waits before it reads the index
    run = request.getfixturevalue(f"in_{framework}")
    name = "resnet" if framework == "mxnet" else f"resnet-{framework}"
    config = write_small_config(tmp_path / "config.json", name, 2, ["warm_up_steps=0"])
    run("clock.py", framework, str(config), str(digits), str(tmp_path), ranks=2)
    log = (tmp_path / "result.txt").read_text(encoding="utf-8")
    (started,) = re.findall(r'"time_ms": (\d+), "event_type": "INTERVAL_START", "key": "run_start"', log)
    for rank in (0, 1):
        seconds, file = (tmp_path / f"rank_{rank}").read_text(encoding="ascii").split()
        assert file == "train.idx"
        assert float(seconds) >= int(started) / 1000
