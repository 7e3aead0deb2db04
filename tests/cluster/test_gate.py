"""The gate on a real two-node Slurm with a fault on one node.

Both nodes are this machine. The slurmd of the second one runs in a mount namespace or on one core, so its processes see
another machine. Both have a fake pynvml module with their GPUs.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml
import pytest

from encore import files, paths
from encore.machine import verdict
from tests.cluster.conftest import Jobs
from tests.cluster.slurm import Cluster, wait_for
from tests.machine.test_gate import GPU
from tests.trainings import PATIENCE

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
    def raise_unsupported(*_): raise NVMLError(name)
    return raise_unsupported
"""
SECOND = "n2"


@dataclass
class FaultyCluster:
    """Restarts the nodes of a cluster, the second one with a fault."""

    cluster: Cluster
    folder: Path
    messages: str = ""  # standard error of the last gate

    def start(
        self,
        setup: str = ":",
        under: tuple[str, ...] = (),
        gpus: Sequence[dict[str, Any]] = (GPU, GPU),
        first_gpus: Sequence[dict[str, Any]] = (GPU, GPU),
    ) -> None:
        """Run ``setup`` in the mount namespace of the second node and its slurmd ``under`` a command."""
        for node in ("n1", SECOND):
            is_second = node == SECOND
            module = self.folder / f"nvml_{node}.py"
            module.write_text(NVML.format(gpus=json.dumps(list(gpus if is_second else first_gpus))), encoding="utf-8")
            # An empty folder for compiled modules: Python would reuse the module of an earlier fault.
            cache = f"mount -t tmpfs tmpfs {Path(pynvml.__file__).parent / '__pycache__'}"
            mounts = f'mount --bind {module} {pynvml.__file__}\n{cache}\n{setup if is_second else ":"}\nexec "$@"'
            if node in self.cluster.daemons:
                self.cluster.kill_node(node)
            prefix = under if is_second else ()
            self.cluster.start_node(node, [*prefix, "unshare", "--mount", "sh", "-euc", mounts, "sh"])
        wait_for(self.cluster.is_idle, "idle nodes")
        time.sleep(1)  # slurmd rejects the credential of a step that it ended in the same second

    def gate(self, *options: str) -> dict[str, verdict.Verdict]:
        command = (sys.executable, "-m", "encore.cli.app", "doctor", "--nodes", *(options or ("--quick",)), "--json")
        process = subprocess.run(
            ["salloc", "--quiet", "--nodes=2", "--exclusive", *command, "--disk", str(self.folder / "disk")],
            env={**self.cluster.environment, "XDG_CACHE_HOME": str(self.folder), "PYTHONPATH": str(paths.ROOT)},
            cwd=paths.ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        self.messages = process.stderr
        verdicts = {
            node["node"]: verdict.Verdict(node["node"], tuple(verdict.Check(**check) for check in node["checks"]))
            for node in json.loads(process.stdout)["nodes"]
        }
        has_failed = any(result.level == "FAIL" for result in verdicts.values())
        assert process.returncode == (2 if has_failed else 0), process.stderr
        return verdicts


@pytest.fixture(scope="module")
def faulty(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "disk").mkdir()
    yield FaultyCluster(cluster, folder)
    for node in ("n1", SECOND):
        cluster.kill_node(node)
        cluster.start_node(node)
    wait_for(cluster.is_idle, "idle nodes without faults")


def gpu_with(**values: Any) -> dict[str, Any]:
    return {"gpus": [GPU, {**GPU, **values}]}


def replaced(output: str, path: str) -> dict[str, Any]:
    """Mount the output of a command over a file."""
    file = "/run/encore-fault"
    return {"setup": f"{output} > {file}\nchmod 755 {file}\nmount --bind {file} {path}"}


XID = "printf '#!/bin/sh\\necho \"NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\"\\n'"
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "one core": ({"under": ("taskset", "-c", "0")}, "cores: 1, others have "),
    "less memory": (
        replaced("sed 's/MemTotal:.*/MemTotal: 4000000 kB/' /proc/meminfo", "/proc/meminfo"),
        "memory: 3.8 GiB",
    ),
    "read-only disk": ({"setup": "mount -t tmpfs -o ro tmpfs {disk}"}, "disk: {disk} cannot be written: Read-only"),
    "full disk": ({"setup": "mount -t tmpfs -o size=16m tmpfs {disk}"}, "disk: {disk} cannot be written: No space"),
    "little shared memory": ({"setup": "mount -t tmpfs -o size=16m tmpfs /dev/shm"}, "shared memory, MiB: 16, others"),
    "no Python": ({"setup": f"mount --bind /bin/false {os.path.realpath(sys.executable)}"}, "answer: "),
    "a GPU less": ({"gpus": [GPU]}, "number of GPUs: 1, others have 2"),
    "memory errors": (gpu_with(ecc_uncorrected=3), "GPU 1: 3 uncorrectable memory errors"),
    "rows to remap": (gpu_with(remapped=[0, 1, 1, 0]), "GPU 1: rows wait to be remapped"),
    "half of the lanes": (gpu_with(pcie_width=8), "GPU 1: PCIe x8 instead of x16, 31.5 instead of 63.0 GB/s"),
    "power cap": (gpu_with(power_limit=400.0), "power limit, W: 400, others have 700"),
    "heat": (gpu_with(throttle=0x40), "GPU 1: its clocks are lowered: heat (hardware)"),
    "an NVLink less": (gpu_with(nvlinks=17), "active NVLinks: 17, others have 18"),
    "lower clocks": (gpu_with(sm_mhz_max=1410), "largest SM clock, MHz: 1410, others have 1980"),
    "Xid 79": (replaced(XID, "$(command -v dmesg)"), "Xid: 79 in the kernel's log"),
}


GATE_FAULT = "rows to remap"  # the others are left to make test-all


def failures(result: verdict.Verdict) -> set[str]:
    """Return the failed checks without measurements: both nodes and other tests share the cores and the disk."""
    measured = (*(title for _, title, *_ in verdict.MEASURED), "write of ", "read of ")
    return {check.name for check in result.checks if check.level == "FAIL" and not check.name.startswith(measured)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == GATE_FAULT else pytest.mark.long) for name in FAULTS]
)
def test_only_the_faulty_node_fails(faulty: FaultyCluster, name: str) -> None:
    options, reason = FAULTS[name]
    disk = str(faulty.folder / "disk")
    faulty.start(**{key: value.replace("{disk}", disk) if key == "setup" else value for key, value in options.items()})
    verdicts = faulty.gate()
    assert any(line.startswith(reason.replace("{disk}", disk)) for line in verdicts[SECOND].reasons), verdicts
    assert verdicts[SECOND].level == "FAIL" and not failures(verdicts["n1"]), verdicts


@pytest.mark.long
def test_framework_measures_within_and_between_nodes(faulty: FaultyCluster, pytorch_python: Path) -> None:
    # Rates of two nodes on the same cores are arbitrary, so only the existence of the measurements is checked.
    faulty.start(gpus=[], first_gpus=[])
    verdicts = faulty.gate("--python", str(pytorch_python))
    assert "measuring between n1-n2" in faulty.messages
    assert not set().union(*map(failures, verdicts.values())) & {"answer", "framework", "between nodes"}, verdicts


@pytest.mark.long
def test_prolog_drains_the_faulty_node(faulty: FaultyCluster, cluster: Cluster) -> None:
    configuration, program = cluster.folder / "slurm.conf", cluster.folder / "prolog.sh"
    original = configuration.read_text(encoding="utf-8")
    variables = f"PYTHONPATH={paths.ROOT} XDG_CACHE_HOME={cluster.folder}"
    program.write_text(f"#!/bin/sh\n{variables} {paths.ROOT}/slurm/prolog.sh\n", encoding="utf-8")
    program.chmod(0o755)
    configuration.write_text(f"{original}Prolog={program}\n", encoding="utf-8")
    try:
        cluster.call("scontrol", "reconfigure")
        faulty.start(**gpu_with(remapped=[0, 0, 0, 1]))
        job = cluster.call("sbatch", "--parsable", "--nodes=1", "--nodelist=n2", "--output=/dev/null", "--wrap=true")
        wait_for(lambda: "drain" in cluster.call("sinfo", "-h", "-N", "-n", SECOND, "-o", "%T"), "a drained n2")
        command = (sys.executable, "-m", "encore.cli.app", "doctor", "--slurm")
        environment = {**cluster.environment, "XDG_CACHE_HOME": str(cluster.folder), "COLUMNS": "300"}
        process = subprocess.run(command, env=environment, cwd=paths.ROOT, capture_output=True, text=True, check=False)
        reason = r"n2 drained.*: Prolog error; the gate found n2 FAIL at .*row remapping has failed"
        assert re.search(reason, process.stdout), process.stdout
        cluster.call("scancel", job)
    finally:
        configuration.write_text(original, encoding="utf-8")
        cluster.call("scontrol", "reconfigure")
        cluster.call("scontrol", "update", f"NodeName={SECOND}", "State=RESUME")


@pytest.mark.long
def test_run_leaves_out_the_faulty_node(faulty: FaultyCluster, jobs: Jobs) -> None:
    faulty.start(**gpu_with(ecc_uncorrected=1))

    def submit(*options: str) -> str:
        # Up to four times, since the other node fails as well if the shared cores are busy during its measurement
        for _ in range(4):
            job = jobs.submit("--gate", *options)
            jobs.wait_for_state(job, "COMPLETED", "FAILED")
            if "2 of 2 nodes failed" not in jobs.log(job):
                break
        return job

    assert "1 of 2 nodes failed the gate: n2: GPU 1" in jobs.log(submit())
    job = submit("--nodes", "1", "--system", "cpu", "--runtime", "host")
    assert jobs.cluster.field(job, "JobState") == "COMPLETED", jobs.log(job)
    assert "left out by the gate: n2: GPU 1: 1 uncorrectable" in jobs.log(job)
    report = files.read_json(jobs.folder(job) / "gate.json")
    assert {node["node"]: node["level"] == "FAIL" for node in report["nodes"]} == {"n1": False, SECOND: True}
