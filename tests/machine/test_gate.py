"""Verdicts of the gate, from facts as plain data; what a node says of itself, on this one."""

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from encore import paths
from encore.errors import EncoreError
from encore.machine import health, links, verdict
from encore.machine.verdict import judge
from encore.run import gate as gates
from encore.slurm import queue
from encore.slurm.cluster import Cluster

GPU = {
    "name": "NVIDIA H100 80GB HBM3", "driver": "550.54", "vbios": "96.00", "compute_capability": "9.0",
    "ecc_corrected": 0, "ecc_uncorrected": 0, "remapped": [0, 0, 0, 0], "sm_mhz_max": 1980, "power_limit": 700.0,
    "power_limit_default": 700.0, "temperature": 30, "throttle": 1, "pcie_width": 16, "pcie_width_max": 16,
    "pcie_generation_max": 5, "nvlinks": 18,
}  # fmt: skip
SPEEDS = {
    "device": "cuda",
    "collectives": [
        {"kind": "all-reduce", "bytes": 1 << 20, "rate": 1e11},
        {"kind": "all-reduce", "bytes": 1 << 28, "rate": 4e11},
        {"kind": "all-to-all", "bytes": 1 << 28, "rate": 3e11},
    ],
    "pairs": [[None, 3e11], [3e11, None]],
    "peaks": [{"flops_per_second": 6e14, "bytes_per_second": 2.8e12}] * 2,
}
FACTS: dict[str, Any] = {
    "kernel": "6.8", "cpu": "Xeon", "sockets": 2, "cores": 96, "memory_gib": 2000.0, "busy": 0.01, "numa_nodes": 2,
    "governors": ["performance"], "shared_memory_mib": 1000, "pci_gpus": 2, "gpus": [GPU, GPU], "xids": [],
    "interface": "eth0", "megabits": 100_000, "ports": {"mlx5_0:1": 400.0}, "cpu_rate": 5e10, "memory_rate": 2e11,
    "disks": {"/results": {"free_gib": 900.0, "mounted": "nfs4", "write_rate": 1e9, "read_rate": 2e9}},
    "clock_offset": 0.0001,
    "framework": SPEEDS, "links": [["X", "NV18"], ["NV18", "X"]], "floor": 1.9e11,
    "nvlink_rate": 20.6,
}  # fmt: skip


def node_with(path: str, value: Any) -> dict[str, Any]:
    """Facts with one of them, such as gpus.1.ecc_uncorrected, changed."""
    facts = copy.deepcopy(FACTS)
    facts["gpus"], facts["framework"]["peaks"] = [dict(GPU), dict(GPU)], [dict(each) for each in SPEEDS["peaks"]]  # type: ignore[call-overload]
    *steps, last = path.split(".")
    place: Any = facts
    for step in steps:
        place = place[int(step) if isinstance(place, list) else step]
    place[int(last) if isinstance(place, list) else last] = value
    return facts


def judged(*facts: dict[str, Any] | None, **more: Any) -> dict[str, verdict.Verdict]:
    return {each.node: each for each in judge({f"n{number}": each for number, each in enumerate(facts, 1)}, **more)}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_nodes_that_are_alike_and_well_pass(count: int) -> None:
    found = judged(*[FACTS] * count)
    assert {each.level for each in found.values()} == {"OK"}
    assert found["n1"].checks[0].found == "96 cores, 2 x NVIDIA H100 80GB HBM3; no problem found"


HARMS = [
    ("clock_offset", -30.0, "clock: -30.0 s from the first node's"),
    ("disks./results", {"free_gib": 5, "problem": "Read-only file system"}, "disk: /results cannot be written"),
    ("disks./results.free_gib", 0.2, "disk: /results has 0.2 GiB free"),
    ("pci_gpus", 3, "GPUs: 3 on the PCI bus, the driver answers for 2"),
    ("xids", [13, 79], "Xid: 79 in the kernel's log"),
    ("framework", {"problem": "no CUDA"}, "framework: the measurement failed: no CUDA"),
    (
        "framework.pairs",
        [[None, 3e11], [1.2e11, None]],
        "from GPU 1 to GPU 0: 120 GB/s, 40% of the median of NV18 pairs",
    ),
    ("gpus.1.ecc_uncorrected", 2, "GPU 1: 2 uncorrectable memory errors"),
    ("gpus.0.remapped", [0, 1, 1, 0], "GPU 0: rows wait to be remapped"),
    ("gpus.0.remapped", [0, 1, 0, 1], "GPU 0: row remapping has failed"),
    ("gpus.1.throttle", 0x49, "GPU 1: its clocks are lowered: hardware slowdown, heat (hardware)"),
    ("gpus.1.pcie_width", 8, "GPU 1: PCIe x8 instead of x16, 31.5 instead of 63.0 GB/s"),
]


@pytest.mark.parametrize(("path", "value", "reason"), HARMS)
def test_what_is_wrong_with_a_node_by_itself_fails_it_alone(path: str, value: Any, reason: str) -> None:
    assert any(each.startswith(reason) for each in judged(node_with(path, value))["n1"].reasons)
    found = judged(FACTS, node_with(path, value), FACTS)
    assert [found[name].level for name in ("n1", "n2", "n3")] == ["OK", "FAIL", "OK"]


ODD = [
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
    ("disks./results.write_rate", 1e8, "write of /results: 100 MB/s, 10% of the others' median"),
]


def test_a_folder_on_another_file_system_than_that_of_others_fails() -> None:
    found = judged(node_with("disks./results.mounted", "ext4"), FACTS, FACTS)
    assert found["n1"].reasons == ["file system of /results: ext4, others have nfs4"]
    assert judged(node_with("sockets", None), FACTS)["n1"].level == "FAIL", "what is not known is no number"


def test_links_that_are_all_slow_alike_warn() -> None:
    slow = node_with("framework.pairs", [[None, 9e10], [9e10, None]])
    found = judged(slow, slow)["n1"]
    assert found.level == "WARN" and "from GPU 0 to GPU 1: 90 GB/s, NV18 allows 185 at least" in found.reasons
    assert (links.pair_floor("SYS", None), links.pair_floor("NV18", None)) == (3e9, None)


@pytest.mark.parametrize("others", [1, 3])
@pytest.mark.parametrize(("path", "value", "reason"), ODD)
def test_a_node_that_has_less_than_the_others_fails(path: str, value: Any, reason: str, others: int) -> None:
    found = judged(node_with(path, value), *[FACTS] * others)
    assert reason in found["n1"].reasons
    assert {found[name].level for name in found if name != "n1"} == {"OK"}


@pytest.mark.parametrize("path", ["cpu", "gpus.0.name", "gpus.0.driver"])
def test_of_names_most_are_right_and_of_two_neither(path: str) -> None:
    odd = node_with(path, "another")
    assert [each.level for each in judged(odd, FACTS, FACTS).values()] == ["FAIL", "OK", "OK"]
    if path == "cpu":
        found = judged(odd, FACTS)
        assert found["n2"].reasons == ["processor: the nodes differ: n1 another, n2 Xeon"]
        assert {each.level for each in found.values()} == {"WARN"}


def test_a_part_that_differs_with_little_effect_warns() -> None:
    for path, value in (("kernel", "5.4"), ("gpus.0.vbios", "1"), ("governors", ["powersave"]), ("cores", 128)):
        assert judged(node_with(path, value), FACTS, FACTS)["n1"].level == "WARN", path
    assert judged(node_with("busy", 0.5))["n1"].reasons == ["load: other programs take 50% of the cores"]
    assert judged(node_with("xids", [31]))["n1"].level == "WARN"
    assert judged(node_with("xids", None))["n1"].reasons == ["Xid: this user may not read the kernel's log"]
    assert judged(node_with("gpus.0.remapped", [0, 3, 0, 0]))["n1"].level == "WARN"


def test_a_slow_device_is_named_among_all_devices() -> None:
    slow = node_with("framework.peaks.1.flops_per_second", 4e14)
    found = judged(FACTS, slow, FACTS)
    assert found["n2"].reasons == ["GEMMs of device 1: 400 TFLOP/s, 67% of the others' median"]
    assert found["n1"].level == found["n3"].level == "OK"


def test_a_device_is_compared_with_its_data_sheet() -> None:
    for path, value, words in (
        ("flops_per_second", 4e14, "GEMMs of device 1: 400 TFLOP/s, 40% of the 990 of NVIDIA H100"),
        ("bytes_per_second", 1e12, "copies of device 1: 1,000 GB/s, 30% of the 3,350 of NVIDIA H100"),
    ):
        slow = node_with(f"framework.peaks.1.{path}", value)
        slow["framework"]["peaks"][0] = slow["framework"]["peaks"][1]
        found = judged(slow)["n1"]
        assert (found.level, len(found.reasons)) == ("WARN", 2) and found.reasons[1].startswith(words), found.reasons
    slow["gpus"] = [{**GPU, "name": "another"}] * 2
    assert judged(slow)["n1"].level == "OK"


def test_collectives_are_compared_with_links_and_with_other_nodes() -> None:
    rows = [{"kind": "all-reduce", "bytes": 1 << 28, "rate": 1e11}, {"kind": "all-to-all", "bytes": 1, "rate": 3e11}]
    found = judged(node_with("framework.collectives", rows), FACTS)
    assert found["n1"].reasons == [
        "all-reduce within the node: 100 GB/s, 25% of the others' median",
        "all-reduce within the node: 100 GB/s, its links allow 190 at least",
    ]
    assert found["n2"].level == "OK"


def test_rounds_pair_each_node_with_two_others_once_a_round() -> None:
    for count in range(2, 12):
        names = [f"n{number}" for number in range(count)]
        rounds = verdict.rounds_of(names)
        assert all(len({node for pair in each for node in pair}) == 2 * len(each) for each in rounds)
        seen = [node for each in rounds for pair in each for node in pair]
        assert {seen.count(name) for name in names} == {1 if count == 2 else 2}
        assert len(rounds) <= 3
    assert verdict.rounds_of(["n1"]) == []


def test_between_nodes_the_line_and_the_other_pairs_decide() -> None:
    fast, slow = {"all-reduce": 4.5e10, "all-to-all": 4e10}, {"all-reduce": 3e9, "all-to-all": 3e9}
    assert {each.level for each in judged(FACTS, FACTS, pairs={("n1", "n2"): fast}).values()} == {"OK"}
    found = judged(FACTS, FACTS, pairs={("n1", "n2"): slow})
    assert found["n1"].reasons[0] == "all-reduce between nodes: 3 GB/s between n1 and n2, the line carries 50"
    # Without a known rate of the line, the node both of whose pairs are slow is the slow one.
    lost = {**FACTS, "ports": {}, "megabits": 0}
    pairs = {("n1", "n2"): slow, ("n2", "n3"): slow, ("n3", "n4"): fast, ("n4", "n1"): fast}
    found = judged(lost, lost, lost, lost, pairs=pairs)
    assert [each.level for each in found.values()] == ["OK", "FAIL", "OK", "OK"]
    found = judged(FACTS, FACTS, pairs={("n1", "n2"): {}})
    assert found["n2"].reasons == ["between nodes: n1 and n2 exchange nothing"]


def test_a_node_that_does_not_answer_fails() -> None:
    found = judged(FACTS, None, why={"n2": "task 1: Exited with exit code 1"})
    assert found["n2"].reasons == ["answer: task 1: Exited with exit code 1"] and found["n1"].level == "OK"


# -- what a node says -------------------------------------------------------------------------------------


def test_an_answer_comes_whole_through_srun_and_a_cut_one_does_not() -> None:
    answers = [{"node": name, "text": "x y\n" * 900} for name in ("n1", "n2")]
    first, second = map(health.lines_of, answers)
    assert max(map(len, first)) < 1000
    mixed = [line for pair in zip(first, second, strict=True) for line in pair]
    assert health.parsed("slurmstepd: info: hello\n" + "\n".join(mixed)) == {"n1": answers[0], "n2": answers[1]}
    assert health.parsed("\n".join([*first, *second[:-1]])) == {"n1": answers[0]}


def test_the_numbers_of_xids_are_read_from_the_log() -> None:
    log = (
        "[    1.2] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\nNVRM: Xid (0000:01:00): 13, x\n"
    )
    assert health.xids(log, uptime=100.0) == [79, 13] and health.xids("") == []
    assert health.xids(log, uptime=100_000.0) == [13], "from yesterday"


def test_a_clock_is_compared_over_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    with health.clock_served() as port:
        own = health.clock_offset(f"localhost:{port}")
    assert own is not None and abs(own) < 0.5
    assert health.clock_offset("") is None
    monkeypatch.setattr(health, "PINGS", 1)
    assert health.clock_offset(f"localhost:{port}") is None


def test_a_disk_that_cannot_be_written_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "WRITTEN", 1 << 16)
    assert set(health.disk(tmp_path / "not" / "there")) == {"free_gib", "mounted", "write_rate", "read_rate"}
    assert health.disk(tmp_path / "not" / "there", named=True)["problem"] == "it is not there"
    assert health.disk(Path("/proc/sys"))["mounted"] == "proc"

    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(health.tempfile, "TemporaryFile", full)
    assert health.disk(tmp_path)["problem"] == "No space left on device"


def test_facts_of_this_machine_are_all_that_is_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(health, "SECONDS", 0.01)
    monkeypatch.setattr(health, "COPIED", 1 << 20)
    facts = json.loads(json.dumps(health.facts({"disks": [str(tmp_path)]})))
    assert {*FACTS} <= {*facts} and facts["cpu_rate"] > 0 < facts["memory_rate"]
    assert judge({"here": facts})[0].node == "here"


def test_a_framework_measures_this_node(pytorch_python: Path) -> None:
    found = health.framework(str(pytorch_python), 0)
    assert (found["device"], len(found["peaks"]), len(found["pairs"])) == ("cpu", 2, 2), found
    assert all(each["flops_per_second"] > 1e8 < each["bytes_per_second"] for each in found["peaks"])
    assert "problem" in health.framework("/bin/false", 0)


# -- who is asked ----------------------------------------------------------------------------------------


@pytest.fixture
def three_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[dict[str, Any]], None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(queue, "expand", lambda names: tuple(names.split(",")))
    for name, value in (("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "n1,n2,n3")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(queue.LEFT_OUT, raising=False)
    monkeypatch.setattr(gates.step, "address", lambda node: node)

    def answering(facts: dict[str, Any]) -> None:
        monkeypatch.setattr(gates, "_ask", lambda command, program: (facts, ""))

    return answering


def test_a_node_that_failed_is_left_out_where_there_are_spares(
    three_nodes: Callable[[dict[str, Any]], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(queue.LEFT_OUT, "")
    three_nodes({"n1": FACTS, "n2": node_with("gpus.0.ecc_uncorrected", 1), "n3": FACTS})
    said: list[str] = []
    gates.leave_out_failed(2, Cluster(), tmp_path, said.append)
    assert said[-1].startswith("left out by the gate: n2: GPU 0: 1 uncorrectable memory errors")
    allocation = queue.this_allocation(gates.os.environ)
    assert allocation is not None and allocation.nodes == ("n1", "n3")
    assert "--exclude=n2" in gates.step.once_a_node(2)
    assert [verdict.kept(name).partition(" at ")[0] for name in ("n2", "n3", "n9")] == ["FAIL", "OK", ""]
    monkeypatch.setenv(queue.LEFT_OUT, "")
    with pytest.raises(EncoreError, match="1 of 3 nodes failed the gate: n2") as refused:
        gates.leave_out_failed(None, Cluster(), tmp_path, said.append)
    assert "sbatch --exclude=n2" in refused.value.hint


def test_the_gate_of_a_run_needs_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(EncoreError, match="outside of a Slurm job"):
        gates.leave_out_failed(1, Cluster(), tmp_path, lambda text: None)


def test_each_host_has_a_reason_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        ("ssh", "n2"): ({"other": FACTS}, ""),
        ("ssh", "n3"): ({}, "Connection refused"),
        ("ssh", "n4"): ({}, ""),
    }
    monkeypatch.setattr(gates, "_ask", lambda command, program: answers[command])
    place = gates.Place(nodes=("n2", "n3", "n4"), everywhere=tuple(answers), clock="here")
    found = {each.node: each.reasons for each in gates.check(place, ())}
    assert found == {"n2": [], "n3": ["answer: Connection refused"], "n4": ["answer: no answer within 180 s"]}
    one = gates.Place(nodes=("n2",), everywhere=(("ssh", "n2"),), clock="here")
    assert [(each.node, each.level) for each in gates.check(one, ())] == [("n2", "OK")], "by the name that ssh has"


@pytest.mark.parametrize(
    ("variables", "code", "said"),
    [
        ({}, 0, ""),
        ({"ENCORE_DISK": "/nonexistent/disk"}, 1, "FAIL disk: /nonexistent/disk cannot be written: it is not there"),
        (
            {"ENCORE_CLUSTER": "{folder}/encore/cluster.toml"},
            0,
            "the gate could not run (exit code 2): the node is not drained",
        ),
        ({"ENCORE_PROGRAM": "/nonexistent/encore", "PATH": "/usr/bin:/bin"}, 0, "could not run (exit code 127)"),
    ],
)
def test_a_prolog_drains_for_what_the_gate_found_alone(
    variables: dict[str, str], code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "encore").mkdir()
    (tmp_path / "encore" / "cluster.toml").write_text('partitoin = "gpu"\n', encoding="utf-8")
    given = {name: value.replace("{folder}", str(tmp_path)) for name, value in variables.items()}
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "ENCORE_PROGRAM": str(tmp_path / "program"), **given}
    (tmp_path / "program").write_text(f'#!/bin/sh\nexec {sys.executable} -m encore.cli.app "$@"\n', encoding="utf-8")
    (tmp_path / "program").chmod(0o755)
    command = [str(paths.ROOT / "slurm" / "prolog.sh")]
    done = subprocess.run(
        command, cwd=paths.ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code and (not said or said in done.stdout), done.stdout + done.stderr


def test_one_command_may_answer_for_some_nodes_and_say_why_not_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "\n".join(health.lines_of({"node": "n1", "x": 1}))
    script = f"cat <<'E'\n{lines}\nE\necho 'srun: error: n2: task 1: Exited with exit code 9' >&2; exit 9"
    monkeypatch.setattr(gates, "NODE_SECONDS", 0.2)
    began = time.monotonic()
    assert gates._ask((), ("sleep", "60")) == ({}, "exit code -15") and time.monotonic() - began < 30
    assert gates._ask((), ("no-such-program",)) == ({}, "no-such-program: No such file or directory")
    monkeypatch.setattr(gates, "NODE_SECONDS", 60)
    assert gates._ask((), ("sh", "-c", script)) == (
        {"n1": {"node": "n1", "x": 1}},
        "n2: task 1: Exited with exit code 9",
    )
