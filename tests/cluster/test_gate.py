"""The gate on a real two-node Slurm, one of whose nodes is harmed, and telemetry of both while they train.

Both nodes are this machine. The second one's slurmd runs in a mount namespace, a cgroup or on one core, so that what it
starts finds another machine; GPUs are a module in the place of pynvml, alike on both but for the harm.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest

from encore import paths
from encore.machine import verdict
from tests.cluster.conftest import Jobs
from tests.cluster.slurm import Cluster, wait_for
from tests.machine.test_gate import GPU

NVML = """
import json
GPUS = json.loads({gpus!r})
class NVMLError(Exception): pass
NVML_VOLATILE_ECC = NVML_CLOCK_SM = NVML_CLOCK_MEM = NVML_TEMPERATURE_GPU = NVML_SUCCESS = 0
NVML_NVLINK_MAX_LINKS = 18
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return len(GPUS)
def nvmlDeviceGetHandleByIndex(index): return GPUS[index]
def nvmlDeviceGetName(gpu): return gpu["name"]
def nvmlSystemGetDriverVersion(): return GPUS[0]["driver"]
def nvmlDeviceGetVbiosVersion(gpu): return gpu["vbios"]
def nvmlDeviceGetTotalEccErrors(gpu, kind, counter): return gpu["ecc_uncorrected" if kind else "ecc_corrected"]
def nvmlDeviceGetRemappedRows(gpu): return gpu["remapped"]
def nvmlDeviceGetMaxClockInfo(gpu, clock): return gpu["sm_mhz_max"]
def nvmlDeviceGetEnforcedPowerLimit(gpu): return gpu["power_limit"] * 1000
def nvmlDeviceGetPowerManagementDefaultLimit(gpu): return gpu["power_limit_default"] * 1000
def nvmlDeviceGetCurrentClocksEventReasons(gpu): return gpu["throttle"]
def nvmlDeviceGetCurrPcieLinkWidth(gpu): return gpu["pcie_width"]
def nvmlDeviceGetMaxPcieLinkWidth(gpu): return gpu["pcie_width_max"]
def nvmlDeviceGetMaxPcieLinkGeneration(gpu): return gpu["pcie_generation_max"]
def nvmlDeviceGetNvLinkState(gpu, link): return int(link < gpu["nvlinks"])
def __getattr__(name):
    def refuse(*_): raise NVMLError(name)
    return refuse
"""
ISOLATED = ("unshare", "--mount", "sh", "-euc", '{setup}\nexec "$@"', "sh")
SECOND = "n2"


class Harmed:
    """Starts the nodes of a cluster again, the second one under a harm."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.said = ""

    def start(
        self,
        setup: str = ":",
        under: tuple[str, ...] = (),
        gpus: Sequence[dict[str, Any]] = (GPU, GPU),
        others: Sequence[dict[str, Any]] = (GPU, GPU),
    ) -> None:
        for node in ("n1", SECOND):
            cards = list(gpus if node == SECOND else others)
            fake = self._folder / f"nvml_{node}.py"
            fake.write_text(textwrap.dedent(NVML).format(gpus=json.dumps(cards)), encoding="utf-8")
            # Python would take the module that it compiled for the harm before, and leave this one's to others.
            compiled = f"mount -t tmpfs tmpfs {Path(pynvml.__file__).parent / '__pycache__'}"
            mounts = f"mount --bind {fake} {pynvml.__file__}\n{compiled}\n" + (setup if node == SECOND else ":")
            prefix = [word.format(setup=mounts) if "{setup}" in word else word for word in ISOLATED]
            if node in self._cluster.daemons:
                self._cluster.kill_node(node)
            self._cluster.start_node(node, [*(under if node == SECOND else ()), *prefix])
        wait_for(self._cluster.is_idle, "the nodes are idle again")
        time.sleep(1)  # slurmd refuses the credential of a step that it ended in the same second

    def gate(self, *options: str) -> dict[str, verdict.Verdict]:
        encore = (sys.executable, "-m", "encore.cli.app", "doctor", "--nodes", *(options or ("--quick",)), "--json")
        done = subprocess.run(
            ["salloc", "--quiet", "--nodes=2", "--exclusive", *encore, "--disk", str(self.disk)],
            env={**self._cluster.environment, "XDG_CACHE_HOME": str(self._folder), "PYTHONPATH": str(paths.ROOT)},
            cwd=paths.ROOT, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        found = [
            verdict.Verdict(each["node"], tuple(verdict.Check(**check) for check in each["checks"]))
            for each in json.loads(done.stdout)["nodes"]
        ]
        self.said = done.stderr
        assert done.returncode == (2 if any(each.level == "FAIL" for each in found) else 0), done.stderr
        return {each.node: each for each in found}


@pytest.fixture(scope="module")
def harmed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harmed]:
    yield (made := Harmed(cluster, tmp_path_factory.mktemp("harmed")))
    for node in ("n1", SECOND):
        cluster.kill_node(node)
        cluster.start_node(node)
    wait_for(cluster.is_idle, "the nodes are well again")
    assert made is not None


def changed(**values: Any) -> dict[str, Any]:
    return {"gpus": [GPU, {**GPU, **values}]}


def bound(text: str, place: str) -> dict[str, str]:
    """What puts a program's output in the place of a file."""
    return {"setup": f"{text} > /run/encore-harm\nmount --bind /run/encore-harm {place}"}


XID = "printf '#!/bin/sh\\necho \"NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\"\\n'"
HARMS: dict[str, tuple[dict[str, Any], str]] = {
    "one core": ({"under": ("taskset", "-c", "0")}, "cores: 1, others have "),
    "less memory": (
        bound("sed 's/MemTotal:.*/MemTotal: 4000000 kB/' /proc/meminfo", "/proc/meminfo"),
        "memory: 3.8 GiB",
    ),
    "read-only disk": ({"setup": "mount -t tmpfs -o ro tmpfs {disk}"}, "disk: {disk} cannot be written: Read-only"),
    "full disk": ({"setup": "mount -t tmpfs -o size=16m tmpfs {disk}"}, "disk: {disk} cannot be written: No space"),
    "little shared memory": ({"setup": "mount -t tmpfs -o size=16m tmpfs /dev/shm"}, "shared memory, MiB: 16, others"),
    "no Python": ({"setup": f"mount --bind /bin/false {os.path.realpath(sys.executable)}"}, "answer: "),
    "a GPU less": ({"gpus": [GPU]}, "number of GPUs: 1, others have 2"),
    "memory errors": (changed(ecc_uncorrected=3), "GPU 1: 3 uncorrectable memory errors"),
    "rows to remap": (changed(remapped=[0, 1, 1, 0]), "GPU 1: rows wait to be remapped"),
    "half of the lanes": (changed(pcie_width=8), "GPU 1: PCIe x8 instead of x16, 31.5 instead of 63.0 GB/s"),
    "power cap": (changed(power_limit=400.0), "power limit, W: 400, others have 700"),
    "heat": (changed(throttle=0x40), "GPU 1: its clocks are lowered: heat (hardware)"),
    "an NVLink less": (changed(nvlinks=17), "active NVLinks: 17, others have 18"),
    "lower clocks": (changed(sm_mhz_max=1410), "largest SM clock, MHz: 1410, others have 1980"),
    "Xid 79": (bound(XID, "$(command -v dmesg)") | {"mode": "755"}, "Xid: 79 in the kernel's log"),
}


def failed(found: verdict.Verdict) -> set[str]:
    # Without what is measured: both nodes have the same two cores, on which other tests train
    measured = (*(title for _, title, *_ in verdict.MEASURED), "write of ", "read of ")
    return {each.name for each in found.checks if each.level == "FAIL" and not each.name.startswith(measured)}


def test_two_nodes_that_are_well_pass(harmed: Harmed) -> None:
    harmed.start()
    tries = [list(harmed.gate().values()) for _ in range(3)]
    while all("FAIL" in {each.level for each in found} for found in tries) and len(tries) < 10:
        tries.append(list(harmed.gate().values()))
    assert [each for found in tries for each in found if failed(each)] == []
    assert any("FAIL" not in {each.level for each in found} for found in tries), tries


def test_a_framework_measures_within_and_between_nodes(harmed: Harmed, pytorch_python: Path) -> None:
    # Two nodes that share two cores are as fast as the other lets them be: that they were measured is what counts.
    harmed.start(gpus=[], others=[])
    found = harmed.gate("--python", str(pytorch_python))
    assert "measuring between n1-n2" in harmed.said
    problems = {check.name for each in found.values() for check in each.checks if check.level == "FAIL"}
    assert not problems & {"answer", "framework", "between nodes"}, found


@pytest.mark.parametrize("name", HARMS)
def test_a_harmed_node_fails_with_the_reason_and_the_other_one_passes(harmed: Harmed, name: str) -> None:
    options, reason = HARMS[name]
    options = dict(options)
    if options.pop("mode", ""):
        options["setup"] = options["setup"].replace("\n", "\nchmod 755 /run/encore-harm\n", 1)
    options["setup"] = str(options.get("setup", ":")).replace("{disk}", str(harmed.disk))
    harmed.start(**options)
    found = harmed.gate()
    expected = reason.replace("{disk}", str(harmed.disk))
    assert any(each.startswith(expected) for each in found[SECOND].reasons), found
    assert found[SECOND].level == "FAIL" and not failed(found["n1"]), found


def test_a_node_with_few_cycles_is_slow(harmed: Harmed) -> None:
    version_1 = Path("/sys/fs/cgroup/cpu")
    is_old = version_1.is_dir()
    group = (version_1 if is_old else version_1.parent) / "encore-harm"
    file, few, all_cycles = ("cpu.cfs_quota_us", "20000", "-1") if is_old else ("cpu.max", "20000 100000", "max")
    group.mkdir(exist_ok=True)
    if not is_old:
        (group.parent / "cgroup.subtree_control").write_text("+cpu")
    try:
        (group / file).write_text(few)
        harmed.start(under=("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"))
        # Again where other tests, on the same cores, had slowed the other node as much at that moment
        tries = [harmed.gate()]
        while not any(map(is_slow, tries[-1][SECOND].reasons)) and len(tries) < 5:
            tries.append(harmed.gate())
        assert any(map(is_slow, tries[-1][SECOND].reasons)), tries
        assert [found["n1"] for found in tries if failed(found["n1"])] == []
    finally:
        (group / file).write_text(all_cycles)


def is_slow(reason: str) -> bool:
    return reason.startswith("SHA-256 on all cores: ")


def test_a_prolog_drains_the_node_that_it_fails_on(harmed: Harmed, cluster: Cluster) -> None:
    # No job begins on a node whose Prolog fails; doctor --slurm has the gate's verdict next to Slurm's reason.
    configuration, program = cluster.folder / "slurm.conf", cluster.folder / "prolog.sh"
    before = configuration.read_text(encoding="utf-8")
    lines = ("#!/bin/sh", f"PYTHONPATH={paths.ROOT} XDG_CACHE_HOME={cluster.folder} {paths.ROOT}/slurm/prolog.sh")
    program.write_text("\n".join(lines) + "\n", encoding="utf-8")
    program.chmod(0o755)
    configuration.write_text(f"{before}Prolog={program}\n", encoding="utf-8")
    try:
        cluster.call("scontrol", "reconfigure")
        harmed.start(gpus=[GPU, {**GPU, "remapped": [0, 0, 0, 1]}])
        job = cluster.call("sbatch", "--parsable", "--nodes=1", "--nodelist=n2", "--output=/dev/null", "--wrap=true")
        wait_for(lambda: "drain" in cluster.call("sinfo", "-h", "-N", "-n", SECOND, "-o", "%T"), "n2 is drained")
        command = (sys.executable, "-m", "encore.cli.app", "doctor", "--slurm")
        variables = {**cluster.environment, "XDG_CACHE_HOME": str(cluster.folder), "COLUMNS": "300"}
        done = subprocess.run(command, env=variables, cwd=paths.ROOT, capture_output=True, text=True, check=False)
        assert re.search(
            r"n2 drained.*: Prolog error; the gate found n2 FAIL at .*row remapping has failed", done.stdout
        )
        cluster.call("scancel", job)
    finally:
        configuration.write_text(before, encoding="utf-8")
        cluster.call("scontrol", "reconfigure")
        cluster.call("scontrol", "update", f"NodeName={SECOND}", "State=RESUME")


def test_a_run_leaves_out_the_node_that_failed(harmed: Harmed, jobs: Jobs) -> None:
    harmed.start(gpus=[GPU, {**GPU, "ecc_uncorrected": 1}])

    def submitted(*options: str) -> str:
        # Again where the other node, on the same cores as other tests, was slow at that moment
        for _ in range(4):
            job = jobs.submit("--gate", *options)
            jobs.wait_for_state(job, "COMPLETED", "FAILED")
            if "2 of 2 nodes failed" not in jobs.log(job):
                break
        return job

    refused = submitted()
    assert jobs.cluster.state(refused) == "FAILED" and "1 of 2 nodes failed the gate: n2: GPU 1" in jobs.log(refused)
    job = submitted("--nodes", "1", "--system", "cpu", "--runtime", "host")
    assert jobs.cluster.state(job) == "COMPLETED", jobs.log(job)
    assert "left out by the gate: n2: GPU 1: 1 uncorrectable" in jobs.log(job)
    kept = json.loads((jobs.folder(job) / "gate.json").read_text(encoding="utf-8"))
    assert {each["node"]: each["level"] == "FAIL" for each in kept["nodes"]} == {"n1": False, "n2": True}


def test_telemetry_and_step_times_of_both_nodes(harmed: Harmed, jobs: Jobs) -> None:
    harmed.start(gpus=[], others=[])  # One rank a node
    job = jobs.submit("--system", "cpu", "--runtime", "host")
    jobs.wait_for_state(job, "COMPLETED", "FAILED")
    assert jobs.cluster.state(job) == "COMPLETED", jobs.log(job)
    folder = jobs.folder(job) / "experiment_0"
    nodes = {}
    for path in folder.glob("telemetry*.jsonl"):
        readings = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        (name,) = {each["node"] for each in readings}
        nodes[name] = (path.name, len(readings))
    files = {name: file for name, (file, _) in nodes.items()}
    assert files == {"n1": "telemetry.jsonl", "n2": "telemetry.n2.jsonl"}
    assert min(count for _, count in nodes.values()) > 5, nodes
    lines = [only_line(folder / "steps" / f"rank_{rank}.jsonl") for rank in (0, 1)]
    assert [each["node"] for each in lines] == ["n1", "n2"] and all(each["waiting"] is not None for each in lines)
    commands = (" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"]))
    # Of this run: other tests have samplers of their own.
    left = [each for each in commands if "encore.machine.telemetry" in each and str(jobs.results) in each]
    assert not left, "a sampler is left"


def only_line(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8").splitlines()[0]))
