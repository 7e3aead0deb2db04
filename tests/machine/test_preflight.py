"""Preflight, GPUs as nvidia-smi reports them, and the choice of a system for a machine."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from encore import catalogue, paths
from encore.configuration import Configuration, resolve
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
