"""Files of trained weights: found, checked, mounted, and named in the passport."""

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


def with_backbone(name: str, file: str) -> configuration.Configuration:
    choice = catalogue.choose(name)
    system = catalogue.find_system(choice, choice.benchmark.small_data.system, None)
    return configuration.resolve(choice, system, 1, 1, [f"backbone={file}"])


@pytest.mark.parametrize("name", ["ssd", "maskrcnn"])
def test_a_file_is_in_the_data_folder_or_anywhere(name: str, tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere.pth"
    inside = preflight.weight_files(with_backbone(name, "weights.pth"), data)
    outside = preflight.weight_files(with_backbone(name, str(elsewhere)), data)
    assert (inside, outside) == ({"backbone": data / "weights.pth"}, {"backbone": elsewhere})
    assert preflight.weight_files(with_backbone(name, ""), data) == {} and preflight.weight_mounts(inside, data) == ()
    assert preflight.weight_mounts(outside, data) == (job.Mount(elsewhere, str(elsewhere), True),)
    elsewhere.write_bytes(b"weights")
    (found,) = preflight.weights_json(outside).values()
    assert found == {"file": str(elsewhere), "bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
    preflight.refuse_other_weights(outside, {"backbone": found})
    preflight.refuse_other_weights(inside, {"backbone": found})  # not there: a checkpoint has it
    elsewhere.write_bytes(b"others!")
    with pytest.raises(EncoreError, match="is not the file of backbone that the run began with"):
        preflight.refuse_other_weights(outside, {"backbone": found})
    assert [each.level for each in preflight.check_weights(with_backbone(name, str(elsewhere)), data)] == ["OK"]


def test_tensorflows_files_are_mounted_together(tmp_path: Path) -> None:
    index, tensors = (tmp_path / f"model.ckpt-7.{kind}" for kind in ("index", "data-00000-of-00001"))
    for path in (index, tensors, tmp_path / "model.ckpt-70.data-00000-of-00001"):
        path.touch()
    found = preflight.weight_mounts({"checkpoint": index}, tmp_path / "data")
    assert [mount.source for mount in found] == [index, tensors]


def test_files_of_an_index_are_mounted_with_it(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    parts = [tmp_path / f"model-0000{number}.safetensors" for number in (1, 2)]
    for path in (index, *parts, tmp_path / "model.bin"):
        path.touch()
    found = preflight.weight_mounts({"base": index}, tmp_path / "data")
    assert [mount.source for mount in found] == [index, *parts]


def submitted(name: str, *settings: str) -> configuration.Configuration:
    choice = catalogue.choose(name)
    return configuration.resolve(choice, catalogue.find_system(choice, "dgxa100", "v0.7"), 1, 8, list(settings))


KEYS = {"bert": "checkpoint", "ssd": "backbone", "maskrcnn": "backbone", "minigo": "initial_weights"}


@pytest.mark.parametrize(("name", "key"), KEYS.items())
def test_submitted_systems_begin_with_the_submissions_weights(name: str, key: str, tmp_path: Path) -> None:
    choice = catalogue.choose(name)
    for system in catalogue.systems(choice):
        resolved = configuration.resolve(choice, system, system.nodes, system.gpus_per_node, [])
        assert (list(resolved.needed_weights) == [key]) == (system.kind == "submitted"), system.file
        assert bool(preflight.weight_files(resolved, tmp_path)) == (system.kind == "submitted")
    # Anywhere, it is the configuration that was submitted; from random weights, or on a CPU, another one.
    assert submitted(name).is_submitted and submitted(name, f"{key}={tmp_path / 'own.pkl'}").is_submitted
    random = submitted(name, f"{key}=")
    assert random.why_not_submitted == f"{key} = empty (--set)"
    assert preflight.check_weights(random, tmp_path) == []
    pins = [f"{pin}=auto" for pin in ("attention", "kernels", "optimizer_kernel") if pin in random.values]
    pins += ["compile=false"] if "compile" in random.values and random.get("compile") is True else []
    assert submitted(name, "device=cpu", "precision=fp32", *pins).needed_weights == {}


def test_weights_are_those_of_the_round() -> None:
    choice = catalogue.choose("minigo")
    found = {
        each.round: configuration.resolve(choice, each, each.nodes, each.gpus_per_node, []).get("initial_weights")
        for each in catalogue.systems(choice)
        if each.kind == "submitted"
    }
    assert found == {"v0.6": "model.ckpt-9383.index", "v0.7": "model.ckpt-5672.index"}


@pytest.mark.parametrize("name", ["bert", "ssd", "maskrcnn"])
def test_weights_that_were_submitted_are_refused_where_they_are_not(name: str, tmp_path: Path) -> None:
    resolved = submitted(name)
    ((key, wanted),) = resolved.needed_weights.items()
    (missing,) = preflight.check_weights(resolved, tmp_path)
    found = f"{tmp_path / wanted.file} is no file (expected: {wanted.title})"
    assert (missing.level, missing.name, missing.found, wanted.source in missing.hint) == ("FAIL", key, found, True)
    for file in (wanted.file, *wanted.also):
        (tmp_path / file).write_bytes(b"other weights")
    (other,) = preflight.check_weights(resolved, tmp_path)
    assert other.level == "FAIL"
    (algorithm,) = wanted.checksums
    assert hashlib.new(algorithm, b"other weights").hexdigest() in other.found
    assert all(digest in other.found for digest in wanted.checksums[algorithm])
    # Of a converted file, such as NVIDIA's model.ckpt-28252.pt, nobody published a checksum.
    (tmp_path / "converted.npy").write_bytes(b"")
    (converted,) = preflight.check_weights(submitted(name, f"{key}=converted.npy"), tmp_path)
    assert (converted.level, "no checksum of a .npy file" in converted.found) == ("WARN", True)


def test_a_checksum_may_be_the_beginning_of_a_digest(tmp_path: Path) -> None:
    path = tmp_path / "net.pth"
    path.write_bytes(b"weights")
    begins = hashlib.sha256(b"weights").hexdigest()[:8]
    wanted = catalogue.Weights(
        title="a network", file="net.pth", source="nowhere", checksums={"sha256": ("00000000", begins)}
    )
    assert preflight.refuse_wrong("backbone", path, wanted) == ""
    path.write_bytes(b"Weights")
    with pytest.raises(EncoreError, match="has the SHA256 "):
        preflight.refuse_wrong("backbone", path, wanted)


def test_a_dry_run_without_the_weights_would_be_refused(encore: Encore, tmp_path: Path) -> None:
    done = encore("run", "maskrcnn", "8", "--system", "dgxa100", "--data", str(tmp_path), "--dry-run")
    said = " ".join((done.stdout + done.stderr).split())
    refused = "the run would be refused with exit code 2: .*backbone; a dry run exits with 0"
    assert re.search(rf"FAIL backbone: {tmp_path / 'R-50.pkl'} is no file.*/MSRA/R-50.pkl.*{refused}", said), said


def test_a_submitted_configuration_on_other_data_is_no_submission() -> None:
    unearned = {"name": "wikipedia", "unearned": "splits.val.count 9 for 10,000"}
    data: tuple[dict[str, Any], ...] = ({"name": "wikipedia"}, {"name": "own data"}, unearned)
    found = [passport.submission_of(submitted("bert"), each) for each in data]
    assert [each["submitted"] for each in found] == [True, False, False]
    assert all(each["text"].endswith("on other data than wikipedia") for each in found[1:])
