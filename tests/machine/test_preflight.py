"""Preflight checks on this machine and other hosts, and the choice of a system."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from benchmarks.common.data.problem import Problem
from benchmarks.common.run.configuration import refuse_misfits
from encore import catalogue, environment, paths
from encore.cli.app import app
from encore.configuration import Configuration, config_class, resolve
from encore.containers import engines
from encore.errors import EncoreError
from encore.machine import fitness, on_node, preflight
from encore.machine.fitness import Need
from encore.machine.node import Node
from encore.machine.preflight import Check
from encore.run import planning
from tests.machine.machines import gpus_of, machine

RESNET = catalogue.choose("resnet")
ON_CPU = "use --system cpu, which runs the same code on the toy data set"
SLOWEST = "the slowest sets the pace; choose with CUDA_VISIBLE_DEVICES"


def configured(system: str, gpus: int) -> Configuration:
    return resolve(RESNET, catalogue.find_system(RESNET, system, "v0.7"), 1, gpus, [])


@pytest.mark.parametrize(
    ("system", "ranks", "here", "expected"),
    [
        ("dgxa100", 8, machine(*["A100"] * 9), Check("OK", "GPUs", "8 of 9 x A100")),
        ("dgxa100", 8, machine(), Check("FAIL", "GPUs", "8 GPUs wanted, none found on box", ON_CPU)),
        ("dgxa100", 8, machine(*["A100"] * 7), Check("FAIL", "GPUs", "8 GPUs wanted, 7 found", "ask for at most 7")),
        ("dgxa100", 2, machine("V100", "A100"), Check("WARN", "GPUs", "the GPUs differ: A100, V100", SLOWEST)),
        ("cpu", 3, machine(cores=2), Check("WARN", "cores", "3 ranks share 2 cores", "ask for at most 2 to go faster")),
        ("cpu", 2, machine("A100", cores=2), Check("OK", "cores", "2 ranks on 2 cores")),
    ],
)
def test_devices(system: str, ranks: int, here: Node, expected: Check) -> None:
    checks = preflight.check_devices(configured(system, ranks), here)
    assert checks == [expected]
    if expected.level == "FAIL":
        with pytest.raises(EncoreError, match=expected.found):
            preflight.refuse_failed(checks)


def test_results_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def result(folder: Path, resumes: bool = False) -> str:
        check = preflight.check_results(folder, resumes)
        return f"{check.level} {check.name}: {check.found}; {check.hint}"

    (tmp_path / "file").touch()
    assert result(tmp_path / "new" / "folder").startswith("OK disk: ")
    assert result(tmp_path / "file" / "x") == (
        f"FAIL results folder: {tmp_path / 'file'} is not a folder; give another: --results DIR"
    )
    monkeypatch.setattr(preflight, "RESULTS_GIB", 1e9)
    assert result(tmp_path).endswith(
        "GiB free for results, 1e+09 needed; free some space, or give a folder on another disk: --results DIR"
    )
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: False)
    problem = f"FAIL results folder: {tmp_path} is not writable; "
    assert result(tmp_path) == f"{problem}give another: --results DIR"
    assert result(tmp_path, True) == f"{problem}resume as its owner"


@pytest.mark.parametrize(
    ("system", "gpus", "level", "text"),
    [
        ("dgxa100", 4, "WARN", "not a submitted configuration"),
        ("dgxa100", 8, "OK", "every value as submitted: "),
        ("cpu", 2, "OK", ""),
    ],
)
def test_submitted_configuration_is_recognized(system: str, gpus: int, level: str, text: str) -> None:
    check = preflight.check_submission(configured(system, gpus), None)
    assert check.level == level and text in check.found


def test_another_accelerator_gets_a_warning() -> None:
    found = "the configuration was submitted on NVIDIA A100-SXM4-40GB, this is NVIDIA H200"
    (check,) = preflight.check_accelerator(configured("dgxa100", 8), machine("NVIDIA H200"))
    assert (check.level, check.found) == ("WARN", found)
    assert not preflight.check_accelerator(configured("dgxa100", 8), machine("NVIDIA A100-SXM4-80GB"))


@pytest.mark.parametrize(("soft", "mib", "levels"), [(768, 1024, ["OK", "OK"]), (767, 1023, ["WARN", "WARN"])])
def test_limits_and_shared_memory(soft: int, mib: int, levels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda which: (soft, soft))
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: SimpleNamespace(total=mib * 2**20))
    checks = [preflight.check_limits(configured("dgxa100", 8)), preflight.check_shared_memory(configured("dgxa100", 8))]
    limit = f"limit {soft}" + (", 768 may be needed" if soft < 768 else "")
    found = [limit, f"/dev/shm has {mib} MiB"]
    assert [(check.level, check.found) for check in checks] == list(zip(levels, found, strict=True))


@pytest.mark.parametrize(
    ("benchmark", "sample", "memory_gib", "count", "system"),
    [
        ("resnet", "", None, 2, "cpu"),
        ("resnet", "h100", None, 1, "h100-80gb"),
        ("resnet", "h100", None, 8, "dgxh100"),
        ("resnet", "h200", None, 1, "h200-141gb"),
        ("resnet", "h200", None, 8, "h200"),
        ("resnet", "a100", None, 1, "a100-40gb"),
        ("resnet", "a100", None, 4, "dgxa100"),
        ("resnet", "a100", 80.0, 1, "a100-80gb"),
        ("resnet", "a100", 80.0, 8, "dgxa100"),
        ("resnet", "v100", None, 1, "v100-16gb"),
        ("resnet", "v100", 32.0, 1, "v100-32gb"),
        ("resnet", "v100", None, 8, "dgx1"),
        ("resnet", "v100", 32.0, 16, "dgx2"),
        ("resnet", "rtx3090", None, 1, "v100-16gb"),
        ("resnet", "b200", None, 1, "h200-141gb"),
        ("resnet-pytorch", "h100", None, 1, "h100-80gb"),
        ("ncf", "h100", None, 1, "gpu"),
        ("ncf", "v100", None, 8, "dgx1"),
        ("dlrm", "h200", None, 1, "h200-141gb"),
        ("dlrm", "h100", None, 8, "dgxa100"),
    ],
)
def test_system_is_chosen_for_the_gpus(
    benchmark: str, sample: str, memory_gib: float | None, count: int, system: str
) -> None:
    gpus = tuple(replace(gpu, memory_gib=memory_gib or gpu.memory_gib) for gpu in gpus_of(sample)) if sample else ()
    here = replace(machine(), gpus=gpus)
    assert planning.choose_system(catalogue.choose(benchmark), count, here, None, None).system == system


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
        "2 ranks; expected a multiple of the 4 that share the experts",
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
    (
        "llama31-8b",
        {"vocabulary": 1024, "tokens": {"train": 9999, "test": 999}},
        3,
        "tensor_parallelism=2",
        "3 ranks; expected a multiple of the 2 that share a sample",
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
    benchmark, splits = choice.benchmark, {"train": {"count": 999, "files": []}}
    content = {"schema": 1, "benchmark": benchmark.name, "name": "own", "id": "1", "classes": ["a", "b"], "how": {}}
    passport = json.dumps({**content, "splits": splits, "facts": facts})
    (tmp_path / "dataset.json").write_text(passport, encoding="utf-8")
    system = catalogue.find_system(choice, benchmark.small_data.system, None)
    configuration = resolve(choice, system, 1, ranks, [setting] if setting else [])
    check, _ = preflight.check_data_set(configuration, tmp_path, replace(machine(), gpus=()))
    assert check.level == "FAIL" and message in f"{check.found}; hint: {check.hint}"
    if name != "dlrm":  # its ranks check their memory first and place the tables
        with pytest.raises(Problem) as error:
            refuse_misfits(config_class(choice.folder)(**configuration.plain()), tmp_path, ranks)
        problem = error.value
        assert problem.hint == check.hint
        assert f"{problem.found.partition(': ')[2]}; expected {problem.expected}" in check.found


@pytest.mark.parametrize(("settings", "classes"), [([], 2), (["num_classes=9"], 9)])
def test_number_of_classes_is_that_of_the_data_set(settings: list[str], classes: int) -> None:
    system = catalogue.find_system(RESNET, "dgxa100", "v0.7")
    configuration = resolve(RESNET, system, 1, 8, settings, {"classes": ["a", "b"]})
    origin = "--set" if settings else "data set"
    assert (configuration.values["num_classes"].value, configuration.values["num_classes"].origin) == (classes, origin)
    assert [each.key for each in configuration.deviations] == ["num_classes"]


def test_dlrm_tables_must_fit_in_gpu_memory() -> None:
    choice = catalogue.choose("dlrm")
    configuration = resolve(choice, catalogue.find_system(choice, "dgxa100", None), 1, 8, [])
    manifest = {"facts": {"table_sizes": [10**8] * 8}}  # 51.2 GB each
    assert not configuration.misfits(manifest, 80 * 2**30) and not configuration.misfits(manifest, math.inf)
    ((_, expected, hint),) = configuration.misfits(manifest, 40 * 2**30)
    assert expected.startswith("at most 38.7 GB") and "--index-limit" in hint


MISSING = {
    ("same", "LICENSE", "another digest"): "LICENSE is missing or differs",
    ("same", "no-such-file", "a digest"): "no-such-file is missing or differs",
    ("shared", "no-such-folder/.mark", ""): "the results folder no-such-folder is not that of the first host",
    ("executable", "LICENSE", ""): "no LICENSE",
    ("readable", "no-such-file", ""): "no-such-file cannot be read",
    ("program", "no-such-program", ""): "no-such-program is not on PATH",
    ("interface", "z9", ""): "no network interface z9",
    ("gpus", "99", ""): "0 GPUs, 99 wanted",
    ("image", "false", "resnet"): "false: no reason given",
    ("image", "no-such-engine", "resnet"): "no-such-engine: [Errno 2] No such file or directory: 'no-such-engine'",
}


def checks_of_node(*needs: Need) -> list[Check]:
    # In a process of its own, as srun and ssh start it
    command = [sys.executable, "-m", "encore.machine.on_node", "check", fitness.question(needs)]
    process = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=True)
    return fitness.judge("node", "n2", json.loads(process.stdout)["problems"], needs)


def test_this_host_fulfils_all_kinds_of_needs(tmp_path: Path) -> None:
    with fitness.marked(tmp_path / "new" / "results") as mark:
        needs = [
            fitness.same(paths.BENCHMARKS, ""), fitness.same(paths.ROOT / "LICENSE", ""),
            Need("shared", str(mark), ""), Need("executable", sys.executable, ""),
            Need("readable", str(paths.ROOT), ""), Need("program", "sh", ""), Need("interface", "lo", ""),
            Need("gpus", "0", ""), Need("image", "true", "", "an image"),
        ]  # fmt: skip
        assert {need.kind for need in needs} == set(on_node.PROBES) and checks_of_node(*needs) == []
    assert list(mark.parent.iterdir()) == []


def test_unfulfilled_needs_of_a_host_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(on_node, "GPU_FILES", ((str(tmp_path), "*"),))
    problems = on_node.check([("gpus", "0", ""), *MISSING])["problems"]
    assert problems == [*enumerate(MISSING.values(), 1)]
    file = tmp_path / "dataset.json"
    file.write_text("{}", encoding="utf-8")
    need = fitness.same(file, "copy it")
    file.write_text("{ }", encoding="utf-8")
    assert checks_of_node(Need("gpus", "0", ""), need, Need("executable", "LICENSE", "")) == [
        Check("FAIL", "node n2", f"{file} is missing or differs; no LICENSE", "copy it")
    ]
    with pytest.raises(EncoreError, match="cannot be written"), fitness.marked(file):
        pass


def test_doctor_fails_if_nothing_can_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_environment(framework: str) -> environment.Environment:
        raise EncoreError("no Python", hint="install it")

    monkeypatch.setattr(environment, "describe", no_environment)
    monkeypatch.setattr(engines, "programs", lambda name: [])
    monkeypatch.setattr(paths, "default_data", lambda name: tmp_path / name)
    owner = paths.ROOT.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    output = CliRunner().invoke(app, ["doctor"])
    lines = output.output.splitlines()
    assert (output.exit_code, lines[-1].partition(":")[0]) == (2, "FAIL runtime")
    (missing,) = [line for line in lines if "not prepared" in line]
    assert all(name in missing for name in catalogue.benchmarks())
    assert any(f"is owned by user {owner}" in line for line in lines)
    assert all("; hint: " in line for line in lines if line.startswith("FAIL"))
