"""Before a run: files of trained weights, head of the log, kept kernels, and the toy data set without ImageNet."""

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from encore import catalogue, configuration, job
from encore.containers import runtimes
from encore.errors import EncoreError
from encore.machine import node, preflight
from encore.run import compile_cache, planning, run_metadata
from tests.conftest import Encore
from tests.machine.machines import PACKAGES, answered, gpus_of, machine
from tests.results.result_logs import write_files
from tests.trainings import resolved


def small(name: str, *settings: str) -> configuration.Configuration:
    return resolved(name, catalogue.choose(name).benchmark.small_data.system, None, 1, *settings, nodes=1)


def submitted(name: str, *settings: str) -> configuration.Configuration:
    return resolved(name, "dgxa100", "v0.7", 8, *settings, nodes=1)


@pytest.mark.parametrize("name", ["ssd", "maskrcnn"])
def test_weights_are_in_the_data_folder_or_elsewhere(name: str, tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere.pth"
    inside, outside, none = (
        preflight.weight_files(small(name, f"backbone={file}"), data) for file in ("weights.pth", elsewhere, "")
    )
    assert (inside, outside, none) == ({"backbone": data / "weights.pth"}, {"backbone": elsewhere}, {})
    mounts = [preflight.weight_mounts(files, data) for files in (inside, outside)]
    assert mounts == [(), (job.Mount(elsewhere, str(elsewhere), True),)]
    elsewhere.write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    records = {"backbone": {"file": str(elsewhere), "bytes": 7, "sha256": digest}}
    assert preflight.weights_json(outside) == records
    for files in (outside, inside):  # the latter is missing: a checkpoint has the weights
        preflight.refuse_other_weights(files, records)
    elsewhere.write_bytes(b"others!")
    with pytest.raises(EncoreError, match="is not the file of backbone that the run started with"):
        preflight.refuse_other_weights(outside, records)
    assert [check.level for check in preflight.check_weights(small(name, f"backbone={elsewhere}"), data)] == ["OK"]


def write_index(folder: Path, *shards: str) -> Path:
    name, content = "model.safetensors.index.json", {"weight_map": {f"layer {shard}": shard for shard in shards}}
    return write_files(folder, {name: content}) / name


def safetensors(tensors: dict[str, int]) -> bytes:
    # A file with tensors of these sizes in bytes
    offsets = itertools.pairwise([0, *itertools.accumulate(tensors.values())])
    entries = {name: {"data_offsets": pair} for name, pair in zip(tensors, offsets, strict=True)}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(sum(tensors.values()))


def lora(*settings: str) -> configuration.Configuration:
    return resolved("llama2-70b-lora", "h200", "v4.1", 8, *settings, nodes=1)


SHARDS = tuple(f"model-{number}.safetensors" for number in range(5))


def test_shards_of_the_weights_are_checked_and_recorded(tmp_path: Path) -> None:
    index = write_index(tmp_path, *SHARDS)
    config, whole = lora(f"base={index}"), safetensors({"a": 4, "b": 60})
    size, incomplete = len(whole), f"{tmp_path / SHARDS[1]} is incomplete: {len(whole) - 1} of {len(whole)} bytes"
    missing = f"5 of 5 files of {index} do not exist: {', '.join(SHARDS[:3])} and 2 more"
    for contents, level, found, hint in (
        ({}, "FAIL", missing, "encore data get llama2-70b-lora DIR"),
        ({**dict.fromkeys(SHARDS, whole), SHARDS[1]: whole[:-1]}, "FAIL", incomplete, ""),
        ({SHARDS[1]: whole}, "WARN", "no checksum", ""),
    ):
        (check,) = preflight.check_weights(config, write_files(tmp_path, contents))
        assert (check.level, found in check.found, hint in check.hint) == (level, True, True), check
    # encore data get knows the commit and the hashes
    files = [
        {"name": SHARDS[0], "bytes": size, "sha256": "1" * 64},
        {"name": SHARDS[1], "bytes": 9, "sha256": "2" * 64},
    ]
    write_files(tmp_path, {"hub.json": {"revision": "3" * 40, "files": files}})
    record = preflight.weights_json({"base": index})
    shards = [{"file": name, "bytes": size, "sha256": "1" * 64 if name == SHARDS[0] else ""} for name in SHARDS]
    assert (record["base"]["shards"], record["base"]["revision"]) == (shards, "3" * 40)
    preflight.refuse_other_weights({"base": index}, record)
    (tmp_path / SHARDS[4]).unlink()
    with pytest.raises(EncoreError, match=r"model-4\.safetensors of .* has changed since the run started"):
        preflight.refuse_other_weights({"base": index}, record)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("base.safetensors", safetensors({}), "contains no weights"),
        ("base.safetensors", b"", "is not a .safetensors file"),
        ("base.safetensors", b"\xff" * 99, "is not a .safetensors file"),
        ("dataset.json", b'{"schema": 1}', "is not a .safetensors file"),
        ("base.safetensors", safetensors({"a": 4})[:12], "is not a .safetensors file"),
        ("base.safetensors.index.json", b'{"weight_map": {}}', "contains no weights: no weight_map of"),
        ("base.safetensors.index.json", b"[1]", "contains no weights: no weight_map of"),
        ("base", None, "is a folder, not a file"),
    ],
)
def test_file_without_weights_fails_the_preflight(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    write_files(tmp_path, {f"{name}/file": ""} if content is None else {name: content})
    for config in (lora(f"base={name}"), small("llama2-70b-lora", f"base={name}")):
        (check,) = preflight.check_weights(config, tmp_path)
        assert (check.level, f"{tmp_path / name} {message}" in check.found) == ("FAIL", True), check.found


@pytest.mark.parametrize(
    "files",
    [
        ["model.ckpt-7.index", "model.ckpt-7.data-00000-of-00001"],
        ["model.safetensors.index.json", "model-00001.safetensors", "model-00002.safetensors"],
    ],
    ids=["TensorFlow", "safetensors"],
)
def test_files_of_an_index_are_mounted_with_it(files: list[str], tmp_path: Path) -> None:
    others = ("model.ckpt-7.index", "model.ckpt-70.data-00000-of-00001", "x.bin", "x.safetensors")
    write_files(write_index(tmp_path, *files[1:]).parent, dict.fromkeys((*files[1:], *others), ""))
    mounts = preflight.weight_mounts({"weights": tmp_path / files[0]}, tmp_path / "data")
    assert [mount.source.name for mount in mounts] == files


KEYS = {"bert": "checkpoint", "ssd": "backbone", "maskrcnn": "backbone", "minigo": "initial_weights"}


@pytest.mark.parametrize(("name", "key"), KEYS.items())
def test_submitted_and_derived_systems_start_from_the_weights_of_the_submission(
    name: str, key: str, tmp_path: Path
) -> None:
    choice = catalogue.choose(name)
    for system in catalogue.systems(choice):
        config = configuration.resolve(choice, system, system.nodes, system.gpus_per_node, [])
        has_weights = (list(config.needed_weights) == [key], bool(preflight.weight_files(config, tmp_path)))
        assert has_weights == (system.kind in ("submitted", "derived"),) * 2, system.file
    # The path may change in a submission, but not random weights or a CPU
    random = submitted(name, f"{key}=")
    assert submitted(name).is_submitted and submitted(name, f"{key}={tmp_path / 'own.pkl'}").is_submitted
    assert random.why_not_submitted == f"{key} = empty (--set)" and preflight.check_weights(random, tmp_path) == []
    changes = [f"{pin}=auto" for pin in ("attention", "kernels", "optimizer_kernel") if pin in random.values]
    changes += ["compile=false"] * (random.values.get("compile") is not None and random.get("compile") is True)
    assert submitted(name, "device=cpu", "precision=fp32", *changes).needed_weights == {}


@pytest.mark.parametrize("name", ["bert", "ssd", "maskrcnn"])
def test_missing_or_other_weights_fail_the_preflight(name: str, tmp_path: Path) -> None:
    ((key, weights),) = submitted(name).needed_weights.items()

    def check(*settings: str) -> str:
        (result,) = preflight.check_weights(submitted(name, *settings), tmp_path)
        return f"{result.level} {result.name}: {result.found}; {result.hint}"

    missing = f"FAIL {key}: {tmp_path / weights.file} does not exist (expected: {weights.title}); "
    assert re.match(f"{re.escape(missing)}.*{re.escape(weights.source)}", check())
    write_files(
        tmp_path, dict.fromkeys((weights.file, *weights.also, "converted.npy"), "other weights") | {"0.npy": ""}
    )
    ((algorithm, digests),) = weights.checksums.items()
    texts = ("FAIL", hashlib.new(algorithm, b"other weights").hexdigest(), *digests)
    assert [text for text in texts if text not in check()] == []
    # Converted files have no published checksum, such as NVIDIA's model.ckpt-28252.pt
    assert re.match(f"WARN {key}: .*no checksum of a .npy file", check(f"{key}=converted.npy"))
    assert check(f"{key}=0.npy").startswith(f"FAIL {key}: {tmp_path / '0.npy'} contains no weights; ")


def test_checksum_may_be_the_start_of_a_digest(tmp_path: Path) -> None:
    path, digest = tmp_path / "net.pth", hashlib.sha256(b"weights").hexdigest()
    checksums = {"sha256": ("00000000", digest[:8])}
    weights = catalogue.Weights(title="a network", file="net.pth", source="nowhere", checksums=checksums)
    for content in (b"weights", b"Weights"):
        path.write_bytes(content)
        check = preflight.check_published_weights("backbone", path, weights)
        assert (check.level, "has the SHA256 " in check.found) == (
            ("OK", False) if content == b"weights" else ("FAIL", True)
        )


@pytest.mark.parametrize(
    ("data", "is_submitted"),
    [
        ({"name": "wikipedia"}, True),
        ({"name": "own data"}, False),
        ({"name": "wikipedia", "unearned": "splits.val.count 9 for 10,000"}, False),
    ],
)
def test_submission_needs_its_data(data: dict[str, Any], is_submitted: bool) -> None:
    submission = run_metadata.submission_of(submitted("bert"), data)
    has_other_data = submission["text"].endswith("on other data than wikipedia")
    assert (submission["submitted"], has_other_data) == (is_submitted, not is_submitted)


# System, round, and GPUs of the machine: the CPU system uses none
HEADS = [("dgxa100", "v0.7", 8), ("dgxa100", "v0.7", 0), ("cpu", "v0.7", 1), ("dgx1", "v0.6", 8), ("dgx1", "v0.5", 8)]


def test_head_of_the_log_and_system_description(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    log, descriptions = tmp_path / "result.txt", []
    facts = {"cpu": "Xeon", "cores": 96, "sockets": 2, "memory_gib": 503.5, "operating_system": "Debian"}
    for system, round_name, gpus in HEADS:
        here, config = (
            dataclasses.replace(machine(*["A100"] * gpus), **facts),
            resolved("resnet", system, round_name, 8),
        )
        run_metadata.write_log_header(log, config, here, cache_cleared=gpus > 0)
        description = run_metadata.system_description(config, here, {"dali_version": "1.2"})
        descriptions.append({name: value for name, value in description.items() if value})
    text = re.sub(r'\d{10}\.\d+|"time_ms": \d+|"file": "[^"]*", "lineno": \d+', "X", log.read_text(encoding="utf-8"))
    recorded("heads.txt", text)
    recorded("systems.json", descriptions)


COMPILED = ("resnet-pytorch", "device=gpu", "compile=default")
KEY = (small(*COMPILED), {"name": "encore-resnet-pytorch:25.12", "id": "sha256:1"}, None, ["NVIDIA H200, 580"])


def test_compiled_kernels_are_given_to_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, key = tmp_path / compile_cache.FILE, compile_cache.key_of(*KEY)
    compile_cache.store(key, tmp_path)  # nothing was compiled
    assert not compile_cache.load(key, tmp_path)
    first.write_bytes(b"kernels")
    compile_cache.store(key, tmp_path)
    assert not first.exists() and not compile_cache.load("", tmp_path)
    assert compile_cache.load(key, tmp_path) and first.read_bytes() == b"kernels"


def test_key_depends_on_all_that_changes_the_kernels() -> None:
    config, image, python, gpus = KEY
    assert "seed" in config.plain()  # differs between the experiments of a run
    keys = [
        compile_cache.key_of(*KEY),
        compile_cache.key_of(config, image, python, gpus * 8),
        compile_cache.key_of(small(*COMPILED, "batch_size=7"), image, python, gpus),
        compile_cache.key_of(config, {**image, "id": "sha256:2"}, python, gpus),
        compile_cache.key_of(config, None, Path("/opt/python"), gpus),
        compile_cache.key_of(config, image, python, ["NVIDIA H100, 580"]),
        compile_cache.key_of(small(*COMPILED[:2], "compile=none"), image, python, gpus),
    ]
    assert (keys[0], keys[-1], len(set(keys))) == (keys[1], "", 6)


CHOICE = catalogue.choose("resnet-pytorch")
WITHOUT = "no imagenet here: trains the toy data set, digits,"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[node.Gpu, ...]:
    # A machine with eight H100 and an empty data folder
    machine = dataclasses.replace(node.this_node(), gpus=gpus_of("h100"))
    monkeypatch.setattr(node, "this_node", lambda: machine)
    monkeypatch.setattr(planning.paths, "default_data", lambda name: tmp_path / "data" / name)
    return machine.gpus


def plan(**fields: object) -> planning.Plan:
    return planning.make_plan(planning.Request(**{"name": CHOICE.name, "gpus": 2, **fields}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("seed", "invalid"), [(0, -1), (2**31 - 3, 2**31)])
def test_experiments_have_consecutive_seeds_of_31_bits(
    seed: int, invalid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan(system="cpu", seed=seed, runs=3).seeds == (seed, seed + 1, seed + 2)
    monkeypatch.setattr(planning.secrets, "randbits", lambda bits: 2**bits - 1)
    assert plan(system="cpu", runs=3).seeds == (2, 3, 4)
    with pytest.raises(EncoreError, match="0 to 2147483647"):
        plan(system="cpu", seed=invalid)


@pytest.mark.parametrize("name", sorted(catalogue.choices()))
def test_first_command_passes_preflight_without_data(
    name: str, encore: Encore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(planning.paths, "default_data", lambda name: tmp_path / "data" / name)
    done = encore("run", name, "2", "--dry-run", "--results", str(tmp_path), code=0)
    assert "FAIL" not in done.stdout, done.stdout


@pytest.mark.parametrize("name", ["resnet", "bert", "dlrm"])
def test_server_gets_a_system_of_one_node(name: str, gpus: tuple[node.Gpu, ...], tmp_path: Path) -> None:
    # Larger systems have the same GPUs
    assert plan(name=name, gpus=len(gpus), data=tmp_path).configuration.system.nodes == 1


def test_gpus_train_the_toy_data_set_in_a_python_with_cuda(
    gpus: tuple[node.Gpu, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = answered(gpus=len(gpus), packages=PACKAGES).python_info
    monkeypatch.setattr(runtimes, "_ask_python", lambda python, choice, extra: facts)
    toy = planning.query_python(plan(python=Path("/apps/bin/python")))
    config, levels = toy.configuration, {check.name: check.level for check in planning.checks(toy)}
    assert config.plain() == {**plan(system="cpu").configuration.plain(), "device": "gpu"}
    properties = (config.system.system, toy.makes_small_data, config.is_submitted, toy.toy_data_set)
    assert properties == ("gpu", True, False, f"{WITHOUT} on the GPUs (/apps/bin/python)")
    assert "FAIL" not in levels.values() and levels["toy data set"] == "WARN"
    assert "never a reproduction" in run_metadata.submission_of(config, {"name": "digits"})["text"]


@pytest.mark.parametrize(
    ("fields", "reason", "hint"),
    [
        ({}, "the host runtime's pytorch is built for CPUs", "make build-resnet-pytorch"),
        ({"gpus": 16}, "16 GPUs requested, 8 found", "request at most 8"),
        ({"python": Path("/no/python")}, "no Python /no/python", "--python"),
    ],
)
def test_cpu_trains_the_toy_data_set_without_usable_gpus(
    gpus: tuple[node.Gpu, ...], fields: dict[str, object], reason: str, hint: str
) -> None:
    toy = plan(**fields)
    assert toy.configuration.system.system == "cpu"
    assert re.search(f"^{WITHOUT} on the CPU .*{reason}.*{hint}", toy.toy_data_set), toy.toy_data_set


def test_toy_data_set_does_not_replace_a_requested_one(
    gpus: tuple[node.Gpu, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for requested in (plan(system="dgxa100"), plan(data=tmp_path)):
        assert requested.configuration.system.kind != "small" and requested.toy_data_set == ""
    folder, here = tmp_path / "data" / "resnet", node.this_node()
    manifest = {"schema": 1, "benchmark": "resnet", "id": "x", "classes": [], "splits": {}}
    for name, content, is_toy in (
        ("parts/0", {}, False),
        ("dataset.json", {**manifest, "name": "imagenet"}, False),
        ("dataset.json", {**manifest, "name": "digits"}, True),
    ):
        write_files(folder, {name: content})
        assert planning.means_toy_data_set(CHOICE, here) is is_toy
    monkeypatch.setattr(node, "this_node", lambda: dataclasses.replace(here, gpus=()))
    assert plan().toy_data_set == ""
