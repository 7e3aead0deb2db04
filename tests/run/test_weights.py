"""Files of trained weights: location, checks, mounts, and the submission that they belong to."""

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from encore import catalogue, configuration, job
from encore.errors import EncoreError
from encore.machine import preflight
from encore.run import passport
from tests.conftest import Encore


def small(name: str, *settings: str) -> configuration.Configuration:
    choice = catalogue.choose(name)
    system = catalogue.find_system(choice, choice.benchmark.small_data.system, None)
    return configuration.resolve(choice, system, 1, 1, list(settings))


def submitted(name: str, *settings: str) -> configuration.Configuration:
    choice = catalogue.choose(name)
    return configuration.resolve(choice, catalogue.find_system(choice, "dgxa100", "v0.7"), 1, 8, list(settings))


@pytest.mark.parametrize("name", ["ssd", "maskrcnn"])
def test_weights_are_in_the_data_folder_or_elsewhere(name: str, tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere.pth"
    config = small(name, f"backbone={elsewhere}")
    inside, outside, none = (
        preflight.weight_files(resolved, data)
        for resolved in (small(name, "backbone=weights.pth"), config, small(name, "backbone="))
    )
    assert (inside, outside, none) == ({"backbone": data / "weights.pth"}, {"backbone": elsewhere}, {})
    mounts = [preflight.weight_mounts(files, data) for files in (inside, outside)]
    assert mounts == [(), (job.Mount(elsewhere, str(elsewhere), True),)]
    elsewhere.write_bytes(b"weights")
    record = {"file": str(elsewhere), "bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
    assert list(preflight.weights_json(outside).values()) == [record]
    for files in (outside, inside):  # the latter is missing: a checkpoint has the weights
        preflight.refuse_other_weights(files, {"backbone": record})
    elsewhere.write_bytes(b"others!")
    with pytest.raises(EncoreError, match="is not the file of backbone that the run began with"):
        preflight.refuse_other_weights(outside, {"backbone": record})
    assert [check.level for check in preflight.check_weights(config, data)] == ["OK"]


@pytest.mark.parametrize(
    ("files", "others"),
    [
        (["model.ckpt-7.index", "model.ckpt-7.data-00000-of-00001"], ["model.ckpt-70.data-00000-of-00001"]),
        (
            ["model.safetensors.index.json", "model-00001.safetensors", "model-00002.safetensors"],
            ["model.bin"],
        ),
    ],
    ids=["TensorFlow", "safetensors"],
)
def test_files_of_an_index_are_mounted_with_it(files: list[str], others: list[str], tmp_path: Path) -> None:
    for name in (*files, *others):
        (tmp_path / name).touch()
    mounts = preflight.weight_mounts({"weights": tmp_path / files[0]}, tmp_path / "data")
    assert [mount.source.name for mount in mounts] == files


KEYS = {"bert": "checkpoint", "ssd": "backbone", "maskrcnn": "backbone", "minigo": "initial_weights"}


@pytest.mark.parametrize(("name", "key"), KEYS.items())
def test_submitted_systems_start_from_the_weights_of_the_submission(name: str, key: str, tmp_path: Path) -> None:
    choice = catalogue.choose(name)
    for system in catalogue.systems(choice):
        resolved = configuration.resolve(choice, system, system.nodes, system.gpus_per_node, [])
        assert (list(resolved.needed_weights) == [key]) == (system.kind == "submitted"), system.file
        assert bool(preflight.weight_files(resolved, tmp_path)) == (system.kind == "submitted")
    # The path may change in a submission, but not random weights or a CPU
    assert submitted(name).is_submitted and submitted(name, f"{key}={tmp_path / 'own.pkl'}").is_submitted
    random = submitted(name, f"{key}=")
    assert random.why_not_submitted == f"{key} = empty (--set)" and preflight.check_weights(random, tmp_path) == []
    changes = [f"{pin}=auto" for pin in ("attention", "kernels", "optimizer_kernel") if pin in random.values]
    changes += ["compile=false"] * (random.values.get("compile") is not None and random.get("compile") is True)
    assert submitted(name, "device=cpu", "precision=fp32", *changes).needed_weights == {}


def test_weights_of_minigo_depend_on_the_round() -> None:
    choice = catalogue.choose("minigo")
    weights = {
        system.round: configuration.resolve(choice, system, system.nodes, system.gpus_per_node, []).get(
            "initial_weights"
        )
        for system in catalogue.systems(choice)
        if system.kind == "submitted"
    }
    assert weights == {"v0.6": "model.ckpt-9383.index", "v0.7": "model.ckpt-5672.index"}


@pytest.mark.parametrize("name", ["bert", "ssd", "maskrcnn"])
def test_missing_or_other_weights_fail_the_preflight(name: str, tmp_path: Path) -> None:
    resolved = submitted(name)
    ((key, weights),) = resolved.needed_weights.items()
    (missing,) = preflight.check_weights(resolved, tmp_path)
    text = f"{tmp_path / weights.file} does not exist (expected: {weights.title})"
    assert (missing.level, missing.name, missing.found, weights.source in missing.hint) == ("FAIL", key, text, True)
    for file in (weights.file, *weights.also):
        (tmp_path / file).write_bytes(b"other weights")
    (other,) = preflight.check_weights(resolved, tmp_path)
    ((algorithm, digests),) = weights.checksums.items()
    digest = hashlib.new(algorithm, b"other weights").hexdigest()
    assert other.level == "FAIL" and all(text in other.found for text in (digest, *digests))
    # Converted files have no published checksum, such as NVIDIA's model.ckpt-28252.pt
    (tmp_path / "converted.npy").write_bytes(b"")
    (converted,) = preflight.check_weights(submitted(name, f"{key}=converted.npy"), tmp_path)
    assert converted.level == "WARN" and "no checksum of a .npy file" in converted.found


def test_checksum_may_be_the_start_of_a_digest(tmp_path: Path) -> None:
    path, start = tmp_path / "net.pth", hashlib.sha256(b"weights").hexdigest()[:8]
    path.write_bytes(b"weights")
    checksums = {"sha256": ("00000000", start)}
    weights = catalogue.Weights(title="a network", file="net.pth", source="nowhere", checksums=checksums)
    assert preflight.refuse_wrong("backbone", path, weights) == ""
    path.write_bytes(b"Weights")
    with pytest.raises(EncoreError, match="has the SHA256 "):
        preflight.refuse_wrong("backbone", path, weights)


def test_dry_run_reports_missing_weights(encore: Encore, tmp_path: Path) -> None:
    plan = encore("run", "maskrcnn", "8", "--system", "dgxa100", "--data", str(tmp_path), "--dry-run")
    output = " ".join((plan.stdout + plan.stderr).split())
    refused = "the run would be refused with exit code 2: .*backbone; a dry run exits with 0"
    pattern = rf"FAIL backbone: {tmp_path / 'R-50.pkl'} does not exist.*/MSRA/R-50.pkl.*{refused}"
    assert re.search(pattern, output), output


@pytest.mark.parametrize(
    ("data", "is_submitted"),
    [
        ({"name": "wikipedia"}, True),
        ({"name": "own data"}, False),
        ({"name": "wikipedia", "unearned": "splits.val.count 9 for 10,000"}, False),
    ],
)
def test_submission_needs_its_data(data: dict[str, Any], is_submitted: bool) -> None:
    submission = passport.submission_of(submitted("bert"), data)
    assert submission["submitted"] == is_submitted
    assert submission["text"].endswith("on other data than wikipedia") != is_submitted
