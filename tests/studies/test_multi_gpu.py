"""The measuring program for real: layers and weights, equal parameters by every way, a study killed and resumed."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from encore.lab.studies import measuring
from tests.conftest import Encore
from tests.studies.test_study import OWN
from tests.trainings import in_background, wait_until

COUNTS = {
    # name, image, classes: convolutions, fully connected, weights. The study prints 60K, 60M, 4M, 24M and 55M.
    "lenet:224:1000": (2, 2, 70_753_070),
    "lenet:28:10": (2, 2, 432_080),
    "alexnet:224:1000": (5, 3, 50_844_008),
    "googlenet:224:1000": (57, 1, 6_998_552),
    "inception-v3:299:1000": (94, 1, 23_817_352),
    "resnet-110:28:1000": (112, 1, 1_795_131),
    "resnet-110:28:10": (112, 1, 1_730_781),
}


def test_layers_weights_and_output_shapes(in_mxnet: Callable[..., str]) -> None:
    """3 x 3 convolutions of ResNet are 109, with 3 on short cuts; with the fully connected layer that is 110."""
    found = json.loads(in_mxnet("study_networks.py", *COUNTS).splitlines()[-1])
    for wanted, expected in COUNTS.items():
        network = found[wanted]
        assert (network["convolutions"], network["fully_connected"], network["weights"]) == expected
        assert network["output"] == [2, int(wanted.rpartition(":")[2])]
    # 8 layers of AlexNet have a weight and a bias each.
    assert found["alexnet:224:1000"]["arrays"] == 16
    # As symbols/alexnet.py of MXNet 0.12 to 1.3.1: what is pooled is normalized.
    stage = ["Convolution", "Activation", "LRN", "Pooling"]
    assert found["alexnet:224:1000"]["operators"][:9] == [*stage, *stage, "Convolution"]


def write(folder: Path, network: str, way: str, ranks: int, batch: int) -> Path:
    """A point's configuration, without what is drawn at random in a step."""
    path = folder / f"{network}-{way}-{ranks}.json"
    config = {
        "network": network, "image": 64, "classes": 10, "way": way, "ranks": ranks, "batch_size": batch,
        "precision": "fp32", "device": "cpu", "records": "", "blocks": 1, "block_seconds": 0.1, "learning_rate": 0.01,
        "momentum": 0.9, "dropout": 0.0, "largest_batch": False, "memory_limit_mib": 2048, "seed": 1,
    }  # fmt: skip
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def test_every_way_trains_the_same(in_mxnet: Callable[..., str], tmp_path: Path) -> None:
    """Networks without batch norm, whose statistics belong to a device: a joint batch would be another training."""
    names = ("lenet", "googlenet")
    alone = [write(tmp_path, name, "local", 1, 8) for name in names]
    stored = [write(tmp_path, name, way, 2, 4) for name in names for way in ("local", "device")]
    ringed = [write(tmp_path, name, "horovod", 2, 4) for name in names]
    outputs = in_mxnet("study_step.py", *map(str, [*alone, *stored])).splitlines()
    in_mxnet("study_step.py", *map(str, ringed), ranks=2)
    assert [json.loads(line)["copies_differ_by"] for line in outputs if line.startswith("{")] == [0.0] * 6
    for name in names:
        with np.load(tmp_path / f"{name}-local-1.npz") as joint:
            for way in ("local", "device", "horovod"):
                with np.load(tmp_path / f"{name}-{way}-2.npz") as shared:
                    assert shared.files == joint.files
                    for array in joint.files:
                        np.testing.assert_allclose(shared[array], joint[array], rtol=2e-4, atol=2e-6)


@pytest.fixture(scope="module")
def resumed(
    mxnet_python: Path, encore: Encore, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, int]]:
    """A study that was killed while it measured its second point or a later one, then resumed; what was done before."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "own.toml").write_text(
        OWN.replace('["lenet"]', '["googlenet"]').replace("image = 28", "image = 64"), encoding="utf-8"
    )
    process = in_background("study", "run", str(folder / "own.toml"), "--results", str(folder / "results"))
    wait_until(lambda: len(list(folder.rglob("measurement.json"))) >= 1, "a point is done")
    wait_until(lambda: len(list(folder.rglob("output.txt"))) >= 2, "the next point has begun")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = {path.parent.name: path.stat().st_mtime_ns for path in folder.rglob("measurement.json")}
    (path,) = (folder / "results").glob("*-study-own")
    done = encore("study", "run", "--resume", str(path), "--json")
    assert done.returncode == 0, done.stderr
    (path / "printed.json").write_text(done.stdout, encoding="utf-8")
    return path, before


def test_after_a_kill_nothing_is_measured_twice(resumed: tuple[Path, dict[str, int]]) -> None:
    path, before = resumed
    folder = measuring.open_folder(path)
    assert {folder.state(point) for point in folder.points()} == {"done"}
    # The one that the kill left running ends by itself, and is waited for.
    (first, *_) = sorted(before, key=lambda key: before[key])
    assert (path / first / "measurement.json").stat().st_mtime_ns == before[first]
    printed = json.loads((path / "printed.json").read_text("utf-8"))
    assert [each["state"] for each in printed["points"]] == ["done"] * 4
    passes = [each for point in folder.points() for each in folder.measurements(point)]
    assert len(passes) == 4 * 2
    # Nobody was there to record it for the one that the kill left running.
    watched = [each for each in passes if "others_cores" in each]
    assert len(watched) >= len(passes) - 1 and all(0 <= each["others_cores"] <= each["cores"] for each in watched)
    assert (path / "report" / "report.html").is_file()


def test_stages_add_up_to_the_step(resumed: tuple[Path, dict[str, int]]) -> None:
    folder = measuring.open_folder(resumed[0])
    for point in folder.points():
        stages = folder.measurements(point)[0]["stages"]
        for fp_bp, wu, step in zip(stages["fp_bp"], stages["wu"], stages["step"], strict=True):
            assert abs(fp_bp + wu - step) <= 0.05 * step


def test_memory_is_read_before_and_in_training(resumed: tuple[Path, dict[str, int]]) -> None:
    folder = measuring.open_folder(resumed[0])
    for point in folder.points():
        memory = folder.measurements(point)[0]["memory_mib"]
        processes = int(point.axes["ranks"]) if point.axes["way"] == "horovod" else 1
        assert len(memory["training"]) == processes
        for empty, before, training in zip(memory["empty"], memory["before_training"], memory["training"], strict=True):
            assert empty < before < training
