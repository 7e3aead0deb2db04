"""Preflight checks on this machine and other hosts, and the choice of a system."""

import contextlib
import copy
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.common.run.configuration import reject_mismatches
from encore import catalogue, environment, paths
from encore.cli import doctor
from encore.configuration import Configuration, config_class, resolve
from encore.containers import engines
from encore.errors import EncoreError
from encore.machine import health, host_actions, host_requirements, node_checks, preflight
from encore.machine.host_requirements import Need
from encore.machine.node import Node
from encore.machine.preflight import Check
from encore.run import gate as gates
from encore.run import planning
from encore.slurm import cluster, queue
from tests.command_line import run_encore
from tests.machine.machines import gpus_of, machine, write_program
from tests.results.result_logs import write_files
from tests.trainings import resolved

RESNET = catalogue.choose("resnet")
ON_CPU = "use --system cpu, which runs the same code on the toy data set"
SLOWEST = "the slowest sets the pace; choose with CUDA_VISIBLE_DEVICES"


def configured(system: str, gpus: int, *settings: str) -> Configuration:
    return resolved("resnet", system, "v0.7", gpus, *settings, nodes=1)


@pytest.mark.parametrize(
    ("system", "ranks", "here", "expected"),
    [
        ("dgxa100", 8, machine(*["A100"] * 9), Check("OK", "GPUs", "8 of 9 x A100")),
        ("dgxa100", 8, machine(), Check("FAIL", "GPUs", "8 GPUs requested, none found on box", ON_CPU)),
        ("dgxa100", 8, machine(*["A100"] * 7), Check("FAIL", "GPUs", "8 GPUs requested, 7 found", "request at most 7")),
        ("dgxa100", 2, machine("V100", "A100"), Check("WARN", "GPUs", "the GPUs differ: A100, V100", SLOWEST)),
        ("cpu", 3, machine(cores=2), Check("WARN", "cores", "3 ranks share 2 cores", "request at most 2 to go faster")),
        ("cpu", 2, machine("A100", cores=2), Check("OK", "cores", "2 ranks on 2 cores")),
    ],
)
def test_devices(system: str, ranks: int, here: Node, expected: Check) -> None:
    assert preflight.check_devices(configured(system, ranks), here) == [expected]
    refusal = pytest.raises(EncoreError, match=expected.found)
    with refusal if expected.level == "FAIL" else contextlib.nullcontext():
        preflight.refuse_failed([expected])


def test_results_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert preflight.check_results(tmp_path / "new" / "folder").level == "OK"
    other, problem = "choose a different folder: --results DIR", f"{tmp_path / 'file'} is not a folder"
    assert preflight.check_results(tmp_path / "file" / "x") == Check("FAIL", "results folder", problem, other)
    monkeypatch.setattr(preflight, "RESULTS_GIB", 1e9)
    full = preflight.check_results(tmp_path)
    hint = "free some space, or choose a folder on a different disk: --results DIR"
    assert full == Check("FAIL", "disk", full.found, hint) and full.found.endswith("free for results, 1e+09 needed")
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: False)
    assert [preflight.check_results(tmp_path, resumes) for resumes in (False, True)] == [
        Check("FAIL", "results folder", f"{tmp_path} is not writable", hint) for hint in (other, "resume as its owner")
    ]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", ["the configuration was submitted on NVIDIA A100-SXM4-40GB, this is NVIDIA H200"]),
        ("NVIDIA A100-SXM4-80GB", []),
    ],
)
def test_another_accelerator_gets_a_warning(name: str, found: list[str]) -> None:
    checks = preflight.check_accelerator(configured("dgxa100", 8), machine(name))
    assert [(check.level, check.found) for check in checks] == [("WARN", text) for text in found]


@pytest.mark.parametrize(("soft", "mib", "levels"), [(768, 1024, ["OK", "OK"]), (767, 1023, ["WARN", "WARN"])])
def test_limits_and_shared_memory(soft: int, mib: int, levels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda which: (soft, soft))
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: SimpleNamespace(total=mib * 2**20))
    config, limit = configured("dgxa100", 8), f"limit {soft}" + (", 768 may be needed" if soft < 768 else "")
    checks = [preflight.check_limits(config), preflight.check_shared_memory(config)]
    assert [(check.level, check.found) for check in checks] == [
        *zip(levels, (limit, f"/dev/shm has {mib} MiB"), strict=True)
    ]


@pytest.mark.parametrize(
    ("benchmark", "sample", "memory_gib", "count", "nodes", "system"),
    [
        ("resnet", "", None, 2, 1, "cpu"),
        ("resnet", "h100", None, 1, 1, "h100-80gb"),
        ("resnet", "h100", None, 8, 1, "dgxh100"),
        ("resnet", "h200", None, 1, 1, "h200-141gb"),
        ("resnet", "h200", None, 8, 1, "h200"),
        ("resnet", "a100", None, 1, 1, "a100-40gb"),
        ("resnet", "a100", None, 4, 1, "dgxa100"),
        ("resnet", "a100", 80.0, 1, 1, "a100-80gb"),
        ("resnet", "a100", 80.0, 8, 1, "dgxa100"),
        ("resnet", "v100", None, 1, 1, "v100-16gb"),
        ("resnet", "v100", 32.0, 1, 1, "v100-32gb"),
        ("resnet", "v100", None, 8, 1, "dgx1"),
        ("resnet", "v100", 32.0, 16, 1, "dgx2"),
        ("resnet", "rtx3090", None, 1, 1, "v100-16gb"),
        ("resnet", "b200", None, 1, 1, "h200-141gb"),
        ("resnet-pytorch", "h100", None, 1, 1, "h100-80gb"),
        ("ncf", "h100", None, 1, 1, "gpu"),
        ("ncf", "v100", None, 8, 1, "dgx1"),
        ("dlrm", "h200", None, 1, 1, "h200-141gb"),
        ("dlrm", "h100", None, 8, 1, "dgxa100"),
        ("resnet", "a100", None, 16, 2, "dgxa100_n2"),
        ("resnet", "h100", None, 64, 8, "dgxh100_n8"),
        ("ssd", "h100", None, 512, 64, "dgxa100_n64"),
    ],
)
def test_system_is_chosen_for_the_gpus(
    benchmark: str, sample: str, memory_gib: float | None, count: int, nodes: int, system: str
) -> None:
    gpus = tuple(replace(gpu, memory_gib=memory_gib or gpu.memory_gib) for gpu in gpus_of(sample)) if sample else ()
    here = replace(machine(), gpus=gpus)
    assert planning.choose_system(catalogue.choose(benchmark), count, here, None, None, nodes).system == system


MISFITS = [
    ("bert", {"sequence_length": 128}, 2, "positions=64", "expected at most positions=64; hint: set positions=128"),
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
    (
        "gpt-oss-20b",
        {"vocabulary": 1024, "tokens": {"train": 9999, "test": 999}},
        2,
        "expert_parallelism=4",
        "2 ranks; expected a multiple of expert_parallelism=4",
    ),
    (
        "llama2-70b-lora",
        {"sequence_length": 128, "vocabulary": 1024},
        2,
        "",
        "samples of 128 tokens; expected sequence_length=256; hint: set sequence_length=128",
    ),
    (
        "llama31-8b",
        {"vocabulary": 1024, "tokens": {"train": 9999, "test": 99}},
        2,
        "",
        "99 tokens in the test part; expected more than 128; hint: set a shorter sequence_length",
    ),
    ("minigo", {"board_size": 9}, 2, "", "games on 9 x 9; expected 5 x 5"),
    ("resnet", {}, 2, "num_classes=9", "2 classes; expected num_classes=9; hint: set num_classes=2"),
    ("resnet-pytorch", {}, 2, "num_classes=9", "2 classes; expected num_classes=9; hint: set num_classes=2"),
    ("resnet-tensorflow", {}, 2, "num_classes=9", "2 classes; expected num_classes=9; hint: set num_classes=2"),
    ("ssd", {}, 2, "bn_group=3", "bn_group=3 with 2 ranks; expected a divisor of 2; hint: set bn_group=1"),
    ("transformer", {}, 1000, "batch_size=64", "999 pairs, fewer than the 1,000 of a step"),
]


@pytest.mark.parametrize(("name", "facts", "ranks", "setting", "message"), MISFITS)
def test_preflight_and_ranks_reject_a_data_set_that_does_not_fit(
    tmp_path: Path, name: str, facts: dict[str, object], ranks: int, setting: str, message: str
) -> None:
    choice = catalogue.choose(name)
    content = {"schema": 1, "benchmark": choice.benchmark.name, "name": "own", "id": "1", "classes": ["a", "b"]}
    passport = {**content, "how": {}, "splits": {"train": {"count": 999, "files": []}}, "facts": facts}
    write_files(tmp_path, {"dataset.json": passport})
    settings = [setting] if setting else []
    configuration = resolved(name, choice.benchmark.small_data.system, None, ranks, *settings, nodes=1)
    check, _ = preflight.check_data_set(configuration, tmp_path, machine())
    assert check.level == "FAIL" and message in f"{check.found}; hint: {check.hint}"
    if name != "dlrm":  # its ranks check their memory first and place the tables
        with pytest.raises(Problem) as error:
            reject_mismatches(config_class(choice.folder)(**configuration.plain()), tmp_path, ranks)
        problem = f"{error.value.found.partition(': ')[2]}; expected {error.value.expected}"
        assert error.value.hint == check.hint and problem in check.found


@pytest.mark.parametrize(("settings", "classes", "origin"), [([], 2, "data set"), (["num_classes=9"], 9, "--set")])
def test_number_of_classes_is_that_of_the_data_set(settings: list[str], classes: int, origin: str) -> None:
    system = catalogue.find_system(RESNET, "dgxa100", "v0.7")
    configuration = resolve(RESNET, system, 1, 8, settings, {"classes": ["a", "b"]})
    value = configuration.values["num_classes"]
    assert (value.value, value.origin, [each.key for each in configuration.deviations]) == (
        classes, origin, ["num_classes"],
    )  # fmt: skip


def test_dlrm_tables_must_fit_in_gpu_memory() -> None:
    configuration, manifest = (
        resolved("dlrm", "dgxa100", None, 8),
        {"facts": {"table_sizes": [10**8] * 8}},
    )  # 51 GB each
    assert not configuration.mismatches(manifest, 80 * 2**30) and not configuration.mismatches(manifest, math.inf)
    ((_, expected, hint),) = configuration.mismatches(manifest, 40 * 2**30)
    assert expected.startswith("at most 38.7 GB") and "--index-limit" in hint


MISSING = {
    ("same", "LICENSE", "another digest"): "LICENSE is missing or differs",
    ("same", "no-such-file", "a digest"): "no-such-file is missing or differs",
    ("shared", "no-such-folder/.mark", ""): "the results folder no-such-folder is not shared with the first host",
    ("executable", "LICENSE", ""): "no LICENSE",
    ("readable", "no-such-file", ""): "no-such-file cannot be read",
    ("program", "no-such-program", ""): "no-such-program is not on PATH",
    ("interface", "z9", ""): "no network interface z9",
    ("gpus", "99", ""): "0 GPUs, 99 needed",
    ("image", "false", "resnet"): "false: no reason given",
    ("image", "no-such-engine", "resnet"): "no-such-engine: [Errno 2] No such file or directory: 'no-such-engine'",
}


def checks_of_node(*needs: Need) -> list[Check]:
    # In a process of its own, as srun and ssh start it
    command = [sys.executable, "-m", "encore.machine.host_actions", "check", host_requirements.question(needs)]
    process = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=True)
    return host_requirements.failed_checks("node", "n2", json.loads(process.stdout)["problems"], needs)


def test_this_host_fulfils_all_kinds_of_needs(tmp_path: Path) -> None:
    with host_requirements.shared_marker(tmp_path / "new" / "results") as mark:
        needs = [
            host_requirements.same_file(paths.BENCHMARKS, ""), host_requirements.same_file(paths.ROOT / "LICENSE", ""),
            Need("shared", str(mark), ""), Need("executable", sys.executable, ""),
            Need("readable", str(paths.ROOT), ""), Need("program", "sh", ""), Need("interface", "lo", ""),
            Need("gpus", "0", ""), Need("image", "true", "", "an image"),
        ]  # fmt: skip
        assert {need.kind for need in needs} == set(host_actions.PROBES) and checks_of_node(*needs) == []
    assert list(mark.parent.iterdir()) == []


def test_unfulfilled_needs_of_a_host_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_actions, "GPU_FILES", ((str(tmp_path), "*"),))
    assert host_actions.check([("gpus", "0", ""), *MISSING])["problems"] == [*enumerate(MISSING.values(), 1)]
    file = write_files(tmp_path, {"dataset.json": "{}"}) / "dataset.json"
    need = host_requirements.same_file(file, "copy it")
    file.write_text("{ }", encoding="utf-8")
    assert checks_of_node(Need("gpus", "0", ""), need, Need("executable", "LICENSE", "")) == [
        Check("FAIL", "node n2", f"{file} is missing or differs; no LICENSE", "copy it")
    ]
    with pytest.raises(EncoreError, match="cannot be written"), host_requirements.shared_marker(file):
        pass


def test_doctor_fails_if_nothing_can_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "describe", Mock(side_effect=EncoreError("no Python", hint="install it")))
    monkeypatch.setattr(engines, "programs", lambda name: [])
    monkeypatch.setattr(paths, "default_data", lambda name: tmp_path / name)
    owner = paths.ROOT.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    output = run_encore("doctor", width=80)
    lines = output.output.splitlines()
    assert (output.exit_code, lines[-1].partition(":")[0]) == (2, "FAIL runtime")
    (missing,) = [line for line in lines if "not prepared" in line]
    assert all(name in missing for name in catalogue.benchmarks()) and f"is owned by user {owner}" in output.output
    assert all("; hint: " in line for line in lines if line.startswith("FAIL"))


def test_doctor_warns_of_environments_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "cache_folder", lambda: tmp_path)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "g++" else which(name))
    monkeypatch.setattr(environment, "_find_interpreter", min)
    mxnet, pytorch, tensorflow = doctor._environments()
    version = min(catalogue.framework("pytorch").python)
    text = f"not built yet; the first run builds it and downloads Python {version} with uv"
    assert (mxnet.level, pytorch.found, tensorflow.level) == ("WARN", text, "WARN")


GPU = {
    "name": "NVIDIA H100 80GB HBM3", "driver": "550.54", "vbios": "96.00", "compute_capability": "9.0",
    "ecc_corrected": 0, "ecc_uncorrected": 0, "remapped": [0, 0, 0, 0], "sm_mhz_max": 1980, "power_limit": 700.0,
    "power_limit_default": 700.0, "temperature": 30, "throttle": 1, "pcie_width": 16, "pcie_width_max": 16,
    "pcie_generation_max": 5, "nvlinks": 18,
}  # fmt: skip
# Load, disk and clock are at their limits
FACTS: dict[str, Any] = {
    "kernel": "6.8", "cpu": "Xeon", "sockets": 2, "cores": 96, "memory_gib": 2000.0, "busy": 0.25, "numa_nodes": 2,
    "governors": ["performance"], "shared_memory_mib": 1000, "pci_gpus": 2, "gpus": [GPU, {**GPU}], "xids": [],
    "interface": "eth0", "megabits": 100_000, "ports": {"mlx5_0:1": 400.0}, "cpu_rate": 5e10, "memory_rate": 2e11,
    "disks": {"/results": {"free_gib": 1.0, "mounted": "nfs4", "write_rate": 1e9, "read_rate": 2e9}},
    "clock_offset": 1.0,
    "framework": {
        "device": "cuda",
        "collectives": [
            {"kind": "all-reduce", "bytes": 1 << 20, "rate": 1e11},
            {"kind": "all-reduce", "bytes": 1 << 28, "rate": 4e11},
            {"kind": "all-to-all", "bytes": 1 << 28, "rate": 3e11},
        ],
        "pairs": [[None, 3e11], [3e11, None]],
        "peaks": [{"flops_per_second": 6e14, "bytes_per_second": 2.8e12} for _ in range(2)],
    },
    "links": [["X", "NV18"], ["NV18", "X"]], "floor": 1.9e11, "nvlink_rate": 20.6,
}  # fmt: skip


def node_with(*changes: tuple[str, Any]) -> dict[str, Any]:
    # Return a copy of FACTS with other values at paths such as gpus.1.ecc_uncorrected
    facts = copy.deepcopy(FACTS)
    for path, value in changes:
        *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        parent: Any = facts
        for key in keys:
            parent = parent[key]
        parent[last] = value
    return facts


def judged(*nodes: dict[str, Any] | None, **options: Any) -> dict[str, node_checks.NodeVerdict]:
    facts = {f"n{number}": node for number, node in enumerate(nodes, 1)}
    return {result.node: result for result in node_checks.check_nodes(facts, **options)}


def levels(*nodes: dict[str, Any] | None, **options: Any) -> list[str]:
    return [result.level for result in judged(*nodes, **options).values()]


# Fact, value, and the reason why a node fails, whatever the other nodes are like
BROKEN = [
    ("clock_offset", -30.0, "clock: -30.0 s from the first node's"),
    ("disks./results", {"free_gib": 5, "problem": "Read-only file system"}, "disk: /results cannot be written"),
    ("disks./results.free_gib", 0.2, "disk: /results has 0.2 GiB free"),
    ("pci_gpus", 3, "GPUs: 3 on the PCI bus, the driver answers for 2"),
    ("xids", [13, 79], "Xid: 79 in the kernel log"),
    ("framework", {"problem": "no CUDA"}, "framework: the measurement failed: no CUDA"),
    (
        "framework.pairs",
        [[None, 3e11], [1.2e11, None]],
        "from GPU 1 to GPU 0: 120 GB/s, 40% of the median of NV18 pairs",
    ),
    ("gpus.1.ecc_uncorrected", 2, "GPU 1: 2 uncorrectable memory errors"),
    ("gpus.0.remapped", [0, 1, 1, 0], "GPU 0: row remapping is pending"),
    ("gpus.0.remapped", [0, 1, 0, 1], "GPU 0: row remapping has failed"),
    ("gpus.1.throttle", 0x49, "GPU 1: clocks are throttled: hardware slowdown, heat (hardware)"),
    ("gpus.1.pcie_width", 8, "GPU 1: PCIe x8 instead of x16, 31.5 instead of 63.0 GB/s"),
]
# The same for a node that has less than the others
WEAKER = [
    ("cores", 48, "cores: 48, others have 96"),
    ("sockets", 1, "sockets: 1, others have 2"),
    ("memory_gib", 1800.0, "memory: 1800 GiB, others have 2000"),
    ("shared_memory_mib", 64, "shared memory, MiB: 64, others have 1000"),
    ("megabits", 1000, "network, Mbit/s: 1000, others have 100000"),
    ("gpus", [GPU], "number of GPUs: 1, others have 2"),
    ("gpus.1.power_limit", 500.0, "power limit, W: 500, others have 700"),
    ("gpus.1.sm_mhz_max", 1200, "largest SM clock, MHz: 1200, others have 1980"),
    ("gpus.1.nvlinks", 17, "active NVLinks: 17, others have 18"),
    ("gpus.1.pcie_generation_max", 4, "PCIe generation: 4, others have 5"),
    ("cpu_rate", 2e10, "SHA-256 on all cores: 20 GB/s, 40% of the others' median"),
    ("memory_rate", 1e11, "memory copies on all cores: 100 GB/s, 50% of the others' median"),
]
CASES = [(others, *case) for case in BROKEN for others in (0, 2)] + [
    (others, *case) for case in WEAKER for others in (1, 3)
]


@pytest.mark.parametrize(("others", "path", "value", "reason"), CASES)
def test_only_the_faulty_node_fails(others: int, path: str, value: Any, reason: str) -> None:
    nodes = [node_with((path, value)), *[FACTS] * others]
    assert any(line.startswith(reason) for line in judged(*nodes)["n1"].reasons)
    assert levels(*nodes) == ["FAIL"] + ["OK"] * others


WRITE_RATE = "disks./results.write_rate"


@pytest.mark.parametrize(
    ("changes", "others", "level", "reasons"),
    [
        # The majority of the names decides
        ([("cpu", "another")], 2, "FAIL", None),
        ([("gpus.0.name", "another")], 2, "FAIL", None),
        ([("gpus.0.driver", "another")], 2, "FAIL", None),
        ([("kernel", "5.4")], 2, "WARN", None),
        ([("gpus.0.vbios", "1")], 2, "WARN", None),
        ([("governors", ["powersave"])], 2, "WARN", None),
        ([("cores", 128)], 2, "WARN", None),
        ([("xids", [31])], 0, "WARN", None),
        ([("gpus.0.remapped", [0, 3, 0, 0])], 0, "WARN", None),
        ([("busy", 0.5)], 0, "WARN", ["load: other programs use 50% of the cores"]),
        ([("xids", None)], 0, "WARN", ["Xid: no permission to read the kernel log"]),
        # The rates of a disk in two nodes show only that one of them is slow.
        ([(WRITE_RATE, 1e8)], 1, "WARN", ["write of /results: 100 MB/s, 10% of the others' median"]),
        ([(WRITE_RATE, 1e8)], 3, "FAIL", ["write of /results: 100 MB/s, 10% of the others' median"]),
        # A value that could not be read is not equal to a number.
        ([("sockets", None)], 1, "FAIL", None),
        ([("disks./results.mounted", "ext4")], 2, "FAIL", ["file system of /results: ext4, others have nfs4"]),
        (
            [("framework.peaks.1.flops_per_second", 4e14)],
            2,
            "FAIL",
            ["GEMMs of device 1: 400 TFLOP/s, 67% of the others' median"],
        ),
        (
            [("links", [["X", "SYS"], ["SYS", "X"]]), ("framework.pairs", [[None, 2.9e9], [3.1e9, None]])],
            0,
            "WARN",
            ["from GPU 0 to GPU 1: 2.9 GB/s, expected at least 3 for SYS"],
        ),
        # All GPUs of the only node are slow: only the data sheet shows it.
        (
            [(f"framework.peaks.{gpu}.flops_per_second", 4e14) for gpu in (0, 1)],
            0,
            "WARN",
            [
                f"GEMMs of device {gpu}: 400 TFLOP/s, 40% of the 990 of NVIDIA H100 and H200 data sheets, SXM"
                for gpu in (0, 1)
            ],
        ),
        (
            [(f"framework.peaks.{gpu}.bytes_per_second", 1e12) for gpu in (0, 1)],
            0,
            "WARN",
            [f"copies of device {gpu}: 1,000 GB/s, 30% of the 3,350 of NVIDIA H100 data sheet, SXM" for gpu in (0, 1)],
        ),
        (
            [(f"framework.peaks.{gpu}.bytes_per_second", 1e12) for gpu in (0, 1)]
            + [(f"gpus.{gpu}.name", "another") for gpu in (0, 1)],
            0,
            "OK",
            [],
        ),
        (
            [
                (
                    "framework.collectives",
                    [
                        {"kind": "all-reduce", "bytes": 1 << 28, "rate": 1e11},
                        {"kind": "all-to-all", "bytes": 1, "rate": 3e11},
                    ],
                )
            ],
            1,
            "FAIL",
            [
                "all-reduce within the node: 100 GB/s, 25% of the others' median",
                "all-reduce within the node: 100 GB/s, expected at least 190 for its links",
            ],
        ),
    ],
)
def test_verdict_of_a_node(changes: list[tuple[str, Any]], others: int, level: str, reasons: list[str] | None) -> None:
    nodes = [node_with(*changes), *[FACTS] * others]
    assert levels(*nodes) == [level] + ["OK"] * others
    assert reasons in (None, judged(*nodes)["n1"].reasons)


SLOW_LINK = node_with(("framework.pairs", [[None, 9e10], [9e10, None]]))
SLOW_LINKS = [f"from GPU {gpu} to GPU {1 - gpu}: 90 GB/s, expected at least 185 for NV18" for gpu in (0, 1)]


@pytest.mark.parametrize(
    ("nodes", "levels", "reason"),
    [
        ([SLOW_LINK, SLOW_LINK], ["WARN", "WARN"], SLOW_LINKS),
        (
            [node_with(("cpu", "another")), FACTS],
            ["WARN", "WARN"],
            ["processor: the nodes differ: n1 another, n2 Xeon"],
        ),
        ([FACTS, None], ["OK", "FAIL"], ["answer: task 1: Exited with exit code 1"]),
    ],
    ids=["slow links", "names", "no answer"],
)
def test_verdict_of_two_nodes(nodes: list[dict[str, Any] | None], levels: list[str], reason: list[str]) -> None:
    verdicts = judged(*nodes, reasons={"n2": "task 1: Exited with exit code 1"})
    assert [verdict.level for verdict in verdicts.values()] == levels
    assert verdicts["n2"].reasons == reason


@pytest.mark.parametrize("count", range(1, 12))
def test_rounds_pair_each_node_with_two_others(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    rounds = [[node for pair in pairs for node in pair] for pairs in node_checks.rounds_of(names)]
    assert len(rounds) <= 3 and all(len(nodes) == len(set(nodes)) for nodes in rounds)
    assert [sum(name in nodes for nodes in rounds) for name in names] == [min(count - 1, 2)] * count


FAST, SLOW = {"all-reduce": 4.5e10, "all-to-all": 4e10}, {"all-reduce": 3e9, "all-to-all": 3e9}


@pytest.mark.parametrize(
    ("pair", "level", "reasons"),
    [
        (FAST, "OK", []),
        (
            SLOW,
            "FAIL",
            [f"{kind} between nodes: 3 GB/s between n1 and n2, line rate 50 GB/s" for kind in FAST],
        ),
        ({}, "FAIL", ["between nodes: n1 and n2 cannot communicate"]),
    ],
)
def test_pair_is_compared_with_the_line_rate(pair: dict[str, float], level: str, reasons: list[str]) -> None:
    verdicts = judged(FACTS, FACTS, pairs={("n1", "n2"): pair})
    assert (verdicts["n1"].level, verdicts["n2"].reasons) == (level, reasons)


def test_node_with_two_slow_pairs_fails_without_a_line_rate() -> None:
    node = node_with(("ports", {}), ("megabits", 0))
    pairs = {("n1", "n2"): SLOW, ("n2", "n3"): SLOW, ("n3", "n4"): FAST, ("n4", "n1"): FAST}
    assert levels(node, node, node, node, pairs=pairs) == ["OK", "FAIL", "OK", "OK"]


# -- facts of a node --------------------------------------------------------------------------------------


def test_interleaved_answers_of_srun_are_separated() -> None:
    answers = {name: {"node": name, "text": "x y\n" * 900} for name in ("n1", "n2")}
    first, second = map(health.lines_of, answers.values())
    mixed = [line for pair in zip(first, second, strict=True) for line in pair]
    assert health.parse_answers("slurmstepd: info: hello\n" + "\n".join(mixed)) == answers
    assert health.parse_answers("\n".join([*first, *second[:-1]])) == {"n1": answers["n1"]}
    assert max(map(len, first)) < 1000


def test_xids_of_the_last_day_are_read_from_the_kernel_log() -> None:
    log = (
        "[    1.2] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\nNVRM: Xid (0000:01:00): 13, x\n"
    )
    results = [health.xids(text, uptime=seconds) for text, seconds in ((log, 100.0), (log, 100_000.0), ("", 0.0))]
    assert results == [[79, 13], [13], []]


def test_clock_offset_is_measured_over_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    with health.serve_clock() as port:
        offset = health.clock_offset(f"localhost:{port}")
    monkeypatch.setattr(health, "PINGS", 1)
    assert offset == pytest.approx(0.0, abs=0.5)
    assert health.clock_offset("") is health.clock_offset(f"localhost:{port}") is None


def test_disk_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "WRITTEN", 1 << 16)
    missing = tmp_path / "not" / "there"
    assert set(health.disk(missing)) == {"free_gib", "mounted", "write_rate", "read_rate"}
    assert health.disk(Path("/proc/sys"))["mounted"] == "proc"
    monkeypatch.setattr(health.tempfile, "TemporaryFile", Mock(side_effect=OSError(28, "No space left on device")))
    assert health.disk(missing, must_exist=True)["problem"] == "it does not exist"
    assert health.disk(tmp_path)["problem"] == "No space left on device"


def test_facts_of_this_machine_are_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(health, "SECONDS", 0.01)
    monkeypatch.setattr(health, "COPIED", 1 << 20)
    facts = json.loads(json.dumps(health.probe({"disks": [str(tmp_path)]})))
    assert {*FACTS} <= {*facts} and facts["cpu_rate"] > 0 < facts["memory_rate"]
    assert node_checks.check_nodes({"here": facts})[0].node == "here"


# -- nodes of a run ---------------------------------------------------------------------------------------


def test_failed_node_is_left_out_if_the_job_has_spare_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variables = {"XDG_CACHE_HOME": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2,n3"}
    for name, value in {**variables, queue.EXCLUDED_NODES: ""}.items():
        monkeypatch.setenv(name, value)
    facts = {"n1": FACTS, "n2": node_with(("gpus.0.ecc_uncorrected", 1)), "n3": FACTS}
    monkeypatch.setattr(queue, "expand", lambda names: tuple(names.split(",")))
    monkeypatch.setattr(gates.step, "address", lambda node: node)
    monkeypatch.setattr(gates, "_ask", lambda command, program: (facts, ""))
    messages: list[str] = []
    gates.leave_out_failed(2, cluster.Cluster(), tmp_path, messages.append)
    assert messages[-1].startswith("excluded by the gate: n2: GPU 0: 1 uncorrectable memory errors")
    assert queue.this_allocation(os.environ) == queue.Allocation(job="7", nodes=("n1", "n3"))
    assert "--exclude=n2" in gates.step.one_task_per_node(2)
    assert [node_checks.last_result(name).partition(" at ")[0] for name in ("n2", "n3", "n9")] == ["FAIL", "OK", ""]
    monkeypatch.setenv(queue.EXCLUDED_NODES, "")
    failed = r"(?s)1 of 3 nodes failed the gate: n2.*sbatch --exclude=n2"
    for nodes, message in ((None, failed), (1, "outside of a Slurm job")):
        with pytest.raises(EncoreError, match=message):
            gates.leave_out_failed(nodes, cluster.Cluster(), tmp_path, messages.append)
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "code", "message"),
    [
        ({}, 0, ""),
        ({"ENCORE_DISK": "/nonexistent/disk"}, 1, "FAIL disk: /nonexistent/disk cannot be written: it does not exist"),
        (
            {"ENCORE_CLUSTER": "{folder}/cluster.toml"},
            0,
            "the node check could not run (exit code 2): the node is not drained",
        ),
        ({"ENCORE_PROGRAM": "/nonexistent/encore", "PATH": "/usr/bin:/bin"}, 0, "could not run (exit code 127)"),
    ],
)
def test_prolog_fails_only_for_a_failed_node(
    variables: dict[str, str], code: int, message: str, tmp_path: Path
) -> None:
    write_files(tmp_path, {"cluster.toml": 'partitoin = "gpu"\n'})
    program = write_program(tmp_path / "program", f'exec {sys.executable} -m encore.cli.app "$@"\n')
    changes = {"XDG_CACHE_HOME": "{folder}", "ENCORE_PROGRAM": str(program), **variables}
    environment = {**os.environ, **{name: value.format(folder=tmp_path) for name, value in changes.items()}}
    command = [str(paths.ROOT / "slurm" / "prolog.sh")]
    process = subprocess.run(command, cwd=paths.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == code and message in process.stdout, process.stdout + process.stderr


ANSWER = "\n".join(health.lines_of({"node": "n1", "x": 1}))
SRUN = f"cat <<'E'\n{ANSWER}\nE\necho 'srun: error: n2: task 1: Exited with exit code 9' >&2; exit 9"


@pytest.mark.parametrize(
    ("program", "seconds", "expected"),
    [
        (("sleep", "600"), 0.2, ({}, "exit code -15")),
        (("no-such-program",), 60, ({}, "no-such-program: No such file or directory")),
        (("sh", "-c", SRUN), 60, ({"n1": {"node": "n1", "x": 1}}, "n2: task 1: Exited with exit code 9")),
    ],
)
def test_answers_of_a_command(
    program: tuple[str, ...], seconds: float, expected: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "NODE_SECONDS", seconds)
    assert gates._ask((), program) == expected
