"""Preflight, GPUs as nvidia-smi reports them, and the choice of a system for a machine."""

from __future__ import annotations

import json
import math
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.common.run.configuration import refuse_misfits
from encore import catalogue, paths
from encore.configuration import Configuration, config_class, resolve
from encore.errors import EncoreError
from encore.machine import node, preflight
from encore.machine.node import Gpu, Node
from encore.run import planning

RESNET = catalogue.choose("resnet")
SAMPLES = paths.ROOT / "tests" / "samples" / "gpus"


def machine(*gpus: str, cores: int = 64) -> Node:
    cards = tuple(
        Gpu(index=index, name=name, memory_gib=80.0, driver="550.54", compute_capability="9.0")
        for index, name in enumerate(gpus)
    )
    return Node(
        hostname="box",
        operating_system="Linux",
        kernel="6.1",
        cpu="CPU",
        sockets=2,
        cores=cores,
        memory_gib=512.0,
        gpus=cards,
    )


def configured(system: str, gpus: int) -> Configuration:
    return resolve(RESNET, catalogue.find_system(RESNET, system, "v0.7"), 1, gpus, [])


def levels(checks: list[preflight.Check]) -> list[str]:
    return [check.level for check in checks]


def test_gpus_that_are_there() -> None:
    assert levels(preflight.check_devices(configured("dgxa100", 8), machine(*["A100"] * 8))) == ["OK"]


@pytest.mark.parametrize(
    ("gpus", "message"),
    [([], "none found"), (["A100"] * 4, "8 GPUs wanted, 4 found")],
)
def test_gpus_that_are_not_there(gpus: list[str], message: str) -> None:
    (check,) = preflight.check_devices(configured("dgxa100", 8), machine(*gpus))
    assert check.level == "FAIL"
    assert message in check.found
    assert check.remedy
    with pytest.raises(EncoreError):
        preflight.refuse_failed([check])


def test_mixed_gpus_are_warned_of() -> None:
    (check,) = preflight.check_devices(configured("dgxa100", 2), machine("A100", "V100"))
    assert (check.level, "V100" in check.found) == ("WARN", True)


def test_more_ranks_than_cores_are_warned_of() -> None:
    assert levels(preflight.check_devices(configured("cpu", 8), machine(cores=2))) == ["WARN"]
    assert levels(preflight.check_devices(configured("cpu", 2), machine(cores=2))) == ["OK"]


def test_results_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight.check_results(tmp_path / "new" / "folder").level == "OK"
    file = tmp_path / "file"
    file.touch()
    assert preflight.check_results(file).level == "FAIL"
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: False)
    assert "not writable" in preflight.check_results(tmp_path).found


def test_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "RESULTS_GIB", 1e9)
    check = preflight.check_results(tmp_path)
    assert (check.level, "free" in check.found) == ("FAIL", True)


def test_unsubmitted_count_is_said() -> None:
    check = preflight.check_submission(configured("dgxa100", 4), None)
    assert check.level == "WARN"
    assert "not a submitted configuration" in check.found
    assert preflight.check_submission(configured("dgxa100", 8), None).level == "OK"
    assert "CPU run" in preflight.check_submission(configured("cpu", 2), None).found


@pytest.mark.parametrize(
    ("gpus", "count", "system"),
    [
        ([], 2, "cpu"),
        (["NVIDIA A100-SXM4-40GB"] * 8, 8, "dgxa100"),
        (["NVIDIA A100-SXM4-40GB"] * 8, 4, "dgxa100"),
        (["Tesla V100-SXM2-16GB"] * 8, 8, "dgx1"),
        (["Tesla V100-SXM3-32GB"] * 16, 16, "dgx2"),
    ],
)
def test_system_for_a_machine(gpus: list[str], count: int, system: str) -> None:
    assert planning.choose_system(RESNET, count, machine(*gpus), None, None).system == system


@pytest.mark.parametrize(
    ("benchmark", "sample", "memory_gib", "count", "system"),
    [
        ("resnet", "h100", None, 1, "h100-80gb"),
        ("resnet", "h100", None, 8, "dgxh100"),
        ("resnet", "h200", None, 1, "h200-141gb"),
        ("resnet", "h200", None, 8, "h200"),
        ("resnet", "a100", None, 1, "a100-40gb"),
        ("resnet", "a100", 80.0, 1, "a100-80gb"),
        ("resnet", "a100", 80.0, 8, "dgxa100"),
        ("resnet", "v100", None, 1, "v100-16gb"),
        ("resnet", "v100", 32.0, 1, "v100-32gb"),
        ("resnet", "v100", None, 8, "dgx1"),
        ("resnet", "rtx3090", None, 1, "v100-16gb"),
        ("resnet", "b200", None, 1, "h200-141gb"),
        ("resnet-pytorch", "h100", None, 1, "h100-80gb"),
        ("ncf", "h100", None, 1, "gpu"),
        ("ncf", "v100", None, 8, "dgx1"),
        ("dlrm", "h200", None, 1, "h200-141gb"),
        ("dlrm", "h100", None, 8, "dgxa100"),
    ],
)
def test_system_for_a_machine_by_its_memory_and_number(
    benchmark: str, sample: str, memory_gib: float | None, count: int, system: str
) -> None:
    gpus = node.parse_nvidia_smi((SAMPLES / f"{sample}.csv").read_text("utf-8"))
    if memory_gib is not None:
        gpus = tuple(replace(gpu, memory_gib=memory_gib) for gpu in gpus)
    found = planning.choose_system(catalogue.choose(benchmark), count, replace(machine(), gpus=gpus), None, None)
    assert found.system == system
    assert preflight.memory_gib(found.accelerator) <= gpus[0].memory_gib * planning.ROUNDING


def test_another_accelerator_is_warned_of() -> None:
    (check,) = preflight.check_accelerator(configured("dgxa100", 8), machine(*["NVIDIA H200"] * 8))
    assert (check.level, "A100" in check.found, "H200" in check.found) == ("WARN", True, True)
    assert not preflight.check_accelerator(configured("dgxa100", 8), machine("NVIDIA A100-SXM4-80GB"))


def test_gpus_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        "#!/bin/sh\n"
        'test "$1" = --query-gpu=index,name,memory.total,driver_version,compute_cap || exit 9\n'
        "echo '0, NVIDIA H100 80GB HBM3, 81559, 550.54.15, 9.0'\n"
        "echo '1, Tesla V100-SXM2-16GB, [N/A], 418.87, [Not Supported]'\n",
        encoding="utf-8",
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(node, "_gpus_by_nvml", tuple)
    first, second = node.gpus()
    assert first == Gpu(
        index=0, name="NVIDIA H100 80GB HBM3", memory_gib=79.6, driver="550.54.15", compute_capability="9.0"
    )
    assert (second.compute_capability, second.memory_gib) == (None, 0.0)


def test_no_gpu_library_is_no_error() -> None:
    assert isinstance(node.this_node().gpus, tuple)


MISFITS = [
    ("bert", {"sequence_length": 128}, 2, "positions=64", "expected at most positions=64; do this: set positions=128"),
    ("bert", {"sequence_length": 16}, 2, "batch_size=500", "999 samples, fewer than the 1,000 of a step"),
    (
        "bert-squad",
        {"sequence_length": 40},
        1,
        "sequence_length=32",
        "of 40 tokens; expected sequence_length=32",
    ),
    ("bert-squad", {"sequence_length": 40}, 2, "batch_size=500", "999 windows, fewer than the 1,000 of a step"),
    (
        "dlrm",
        {"table_sizes": [10**10, 5]},
        2,
        "",
        "the embedding tables need 640.0 GB on a rank",
    ),
    ("gnmt", {}, 2, "batch_size=500", "999 pairs, fewer than the 1,000 of a step"),
    ("minigo", {"board_size": 9}, 2, "", "games on 9 x 9; expected 5 x 5"),
    ("resnet", {}, 2, "num_classes=9", "2 classes; expected num_classes=9; do this: set num_classes=2"),
    ("resnet-pytorch", {}, 2, "num_classes=9", "2 classes; expected num_classes=9; do this: set num_classes=2"),
    ("resnet-tensorflow", {}, 2, "num_classes=9", "2 classes; expected num_classes=9; do this: set num_classes=2"),
    ("ssd", {}, 2, "bn_group=3", "bn_group=3 with 2 ranks; expected a divisor of 2; do this: set bn_group=1"),
    ("transformer", {}, 1000, "batch_size=64", "999 pairs, fewer than the 1,000 of a step"),
]


@pytest.mark.parametrize(("name", "facts", "ranks", "setting", "words"), MISFITS)
def test_preflight_refuses_what_the_ranks_would(
    tmp_path: Path, name: str, facts: dict[str, object], ranks: int, setting: str, words: str
) -> None:
    choice = catalogue.choose(name)
    splits = {"train": {"count": 999, "files": []}}
    benchmark = choice.benchmark.name
    content = {"schema": 1, "benchmark": benchmark, "name": "own", "id": "1", "classes": ["a", "b"], "how": {}}
    passport = json.dumps({**content, "splits": splits, "facts": facts})
    (tmp_path / "dataset.json").write_text(passport, encoding="utf-8")
    system = catalogue.find_system(choice, choice.benchmark.small_data.system, None)
    asked = resolve(choice, system, 1, ranks, [setting] if setting else [])
    here = replace(machine(), gpus=())
    check, _ = preflight.check_data_set(asked, tmp_path, here)
    assert check.level == "FAIL"
    assert words in f"{check.found}; do this: {check.remedy}"
    if name != "dlrm":  # whose ranks ask for their memory first, and place the tables
        with pytest.raises(Problem) as refused:
            refuse_misfits(config_class(choice.folder)(**asked.plain()), tmp_path, ranks)
        problem = refused.value
        assert problem.remedy == check.remedy
        assert f"{problem.found.partition(': ')[2]}; expected {problem.expected}" in check.found


def test_tables_of_dlrm_are_held_against_the_memory_of_a_gpu() -> None:
    choice = catalogue.choose("dlrm")
    asked = resolve(choice, catalogue.find_system(choice, "dgxa100", None), 1, 8, [])
    manifest = {"facts": {"table_sizes": [10**8] * 8}}  # 51.2 GB each
    assert not asked.misfits(manifest, 80 * 2**30)
    assert not asked.misfits(manifest, math.inf)
    ((_, expected, remedy),) = asked.misfits(manifest, 40 * 2**30)
    assert expected.startswith("at most 38.7 GB")
    assert "--index-limit" in remedy
