"""Jobs on a real two-node Slurm: training over PMIx, requeue, faults, arrays, and the commands for jobs."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest

from encore import files, paths
from encore.machine import node_checks
from encore.run import run_folder
from tests.cluster.conftest import OPTIONS, Cluster, Jobs, wait_for
from tests.conftest import logged, losses, records
from tests.machine.machines import write_program
from tests.machine.test_preflight import GPU
from tests.trainings import HANGS, PATIENCE, is_told

ONE_EPOCH = ("--set", "epochs=1")
ENDLESS = ("--set", "epochs=300")


def curve(jobs: Jobs, job: str, number: int = 0) -> list[float]:
    return losses(jobs.experiment(job, number) / "metrics.jsonl")


@dataclass(frozen=True)
class Finished:
    """An uninterrupted job that was submitted and followed with Encore's commands."""

    jobs: Jobs
    job: str
    followed: str
    environments: list[dict[str, str]]

    @property
    def losses(self) -> list[float]:
        # Losses of every run with this seed, interrupted or not
        return curve(self.jobs, self.job)


@pytest.fixture(scope="module")
def finished(cluster: Cluster, few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    jobs = Jobs(cluster, tmp_path_factory.mktemp("finished"), few_digits)
    folders = ("--results", str(jobs.results), "--data", str(jobs.data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEAK_OF_THE_LOGIN_SHELL", "1")
        process = jobs.encore("submit", "resnet", "--nodes", "2", "--json", *folders, *OPTIONS)
    job = json.loads(process.stdout)["job"]
    jobs.wait_for_step(job, 2)
    environments = [rank.environ() for rank in jobs.ranks(job)]
    followed = jobs.encore("follow", job, "--results", str(jobs.results), code=3).stdout
    jobs.wait_for_state(job, "COMPLETED", "FAILED")
    return Finished(jobs, job, followed, environments)


def test_job_trains_on_two_nodes_and_is_followed_to_its_end(finished: Finished) -> None:
    jobs, job = finished.jobs, finished.job
    assert "not reached" in finished.followed
    assert (jobs.cluster.field(job, "JobState"), jobs.state(job)[0]) == ("COMPLETED", "not_reached"), jobs.log(job)
    names = ("SLURMD_NODENAME", "LEAK_OF_THE_LOGIN_SHELL")
    assert [tuple(map(rank.get, names)) for rank in finished.environments] == [("n1", None), ("n2", None)]
    folder, experiment = jobs.folder(job), jobs.experiment(job)
    passport = run_folder.open_run(folder).metadata()
    assert passport["slurm"] == {"job": job, "cluster": "encore", "partition": "debug", "nodes": ["n1", "n2"]}
    controller = passport["environment"]["HOROVOD_CONTROLLER"]
    assert (passport["nodes"], passport["ranks_per_node"], controller) == (2, 1, "mpi")
    assert {path.name for path in (experiment / "ranks").glob("rank.*")} == {"rank.0", "rank.1"}
    assert [event["key"] for event in logged(folder / "result_0.txt")].count("run_stop") == 1
    first_lines = {
        path.relative_to(experiment).as_posix(): json.loads(path.read_text(encoding="utf-8").partition("\n")[0])
        for path in (*experiment.glob("telemetry*.jsonl"), *experiment.glob("steps/*.jsonl"))
    }
    assert {path: line["node"] for path, line in first_lines.items()} == {
        "telemetry.jsonl": "n1", "telemetry.n2.jsonl": "n2",
        "steps/rank_0.jsonl": "n1", "steps/rank_1.jsonl": "n2",
    }  # fmt: skip
    assert first_lines["steps/rank_1.jsonl"]["waiting"] is not None
    jobs.assert_no_rank_runs()


def has_sigterm(rank: psutil.Process) -> bool:
    # Whether SIGTERM is pending at a suspended rank. A rank may also run again or have ended: Slurm sends SIGCONT.
    try:
        return rank.status() != psutil.STATUS_STOPPED or is_told(rank, signal.SIGTERM)
    except (psutil.NoSuchProcess, FileNotFoundError):
        return True


@contextlib.contextmanager
def suspended(ranks: list[psutil.Process]) -> Iterator[None]:
    # Suspend the ranks, so that they cannot finish before the signal that the block sends arrives
    for rank in ranks:
        rank.suspend()
    yield
    wait_for(lambda: all(map(has_sigterm, ranks)), "SIGTERM at the ranks")
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.resume()


def test_resume_after_usr1_gives_the_same_losses(jobs: Jobs, finished: Finished) -> None:
    job = jobs.submit()
    jobs.wait_for_step(job, 3)
    with suspended(jobs.ranks(job)):
        # The signal that Slurm sends before the time limit because of --signal=B:USR1@120
        jobs.cluster.call("scancel", "--batch", "--signal=USR1", job)
    jobs.restart(job)
    assert jobs.state(job) == ("interrupted", "stopped by SIGUSR1, a checkpoint was written")
    jobs.wait_for_state(job, "COMPLETED", "FAILED")
    starts = records(jobs.experiment(job) / "metrics.jsonl", "start")
    assert [start["resumed_step"] > 0 for start in starts] == [False, True], jobs.log(job)
    assert curve(jobs, job) == finished.losses
    assert "resuming" in jobs.log(job) and "resume with: " not in jobs.log(job), "Slurm resumes it, not the user"
    jobs.assert_no_rank_runs()


def test_array_shares_a_run_folder_until_it_is_cancelled(jobs: Jobs) -> None:
    array = jobs.submit(*ENDLESS, sbatch=("--nodes=1", "--array=0-1"))
    queued = jobs.submit()
    for number in (0, 1):
        jobs.wait_for_step(array, 1, number)

    def shown_states() -> dict[str, str]:
        # Return the states in `encore status`, without the jobs of other tests
        rows = json.loads(jobs.encore("status", "--results", str(jobs.results), "--json").stdout)["runs"]
        return {row["job"]: row["state"] for row in rows if row["job"].startswith((array, queued))}

    states = shown_states()
    assert states.pop(queued) == "queued" and set(states.values()) == {"running"}, states
    assert len(list(jobs.results.glob("[0-9]*"))) == 1
    configs = [files.read_json(jobs.experiment(array, number) / "config.json") for number in (0, 1)]
    assert configs[0]["seed"] != configs[1]["seed"] and curve(jobs, array, 0)[0] != curve(jobs, array, 1)[0]
    jobs.cluster.call("scancel", queued)
    assert "--resume" in jobs.encore("cancel", array, "--results", str(jobs.results)).stdout
    for number in (0, 1):
        wait_for(lambda number=number: jobs.state(array, number)[0] == "interrupted", f"end of {number}")
        assert jobs.state(array, number)[1] == "stopped by SIGTERM, a checkpoint was written"
    # Slurm lists the tasks for some seconds after their end
    wait_for(jobs.cluster.is_idle, "idle nodes")
    wait_for(lambda: "running" not in shown_states().values(), "ended states")
    jobs.encore("cancel", array, "--results", str(jobs.results), code=2)
    jobs.assert_no_rank_runs()


@pytest.mark.long
def test_runs_of_one_job_have_different_seeds(jobs: Jobs) -> None:
    job = jobs.submit("--runs", "2", *ONE_EPOCH)
    # For afterok a missed target is a failure only with --require-target.
    after = (f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes", "--nodes=2")
    dependent = jobs.submit("--require-target", *ONE_EPOCH, sbatch=after)
    jobs.wait_for_state(job, "COMPLETED", "FAILED")
    assert [jobs.state(job, number)[0] for number in (0, 1)] == ["not_reached"] * 2
    logs = [logged(jobs.folder(job) / f"result_{number}.txt") for number in (0, 1)]
    seeds = {event["value"] for events in logs for event in events if event["key"] == "seed"}
    assert len(seeds) == 2
    jobs.wait_for_state(dependent, "FAILED", "CANCELLED", "COMPLETED")
    assert (jobs.state(dependent)[0], jobs.cluster.field(dependent, "ExitCode")) == ("not_reached", "3:0")


@pytest.mark.long
def test_time_limit_requeues_the_job(jobs: Jobs) -> None:
    # A minute to reach the first steps on a busy machine, and one more to stop
    job = jobs.submit(*ENDLESS, sbatch=("--nodes=2", "--time=2", "--signal=B:USR1@60"))
    jobs.wait_for_step(job, 5)
    with suspended(jobs.ranks(job)):
        pass
    jobs.wait_for_state(job, "PENDING")
    assert jobs.cluster.field(job, "Restarts") == "1"
    assert jobs.state(job)[1] == "stopped by SIGUSR1, a checkpoint was written"


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "fault", "reason"),
    [((), psutil.Process.kill, "rank 1 was killed by SIGKILL"), (HANGS, psutil.Process.suspend, "rank 1 hangs")],
    ids=["killed", "hanging"],
)
def test_failed_rank_ends_the_job_with_the_reason(
    jobs: Jobs, options: tuple[str, ...], fault: Callable[[psutil.Process], None], reason: str
) -> None:
    job = jobs.submit(*ENDLESS, *options)
    jobs.wait_for_step(job, 5)
    fault(jobs.ranks(job)[1])
    jobs.wait_for_state(job, "FAILED")
    status, message = jobs.state(job)
    assert status == "failed" and reason in message
    jobs.assert_no_rank_runs()


def lose_node(jobs: Jobs, job: str) -> None:
    jobs.cluster.kill_node("n2")
    jobs.wait_for_state(job, "PENDING")
    jobs.cluster.start_node("n2")


def preempt(jobs: Jobs, job: str) -> None:
    options = ("--nodes=2", "--partition=urgent", "--exclusive", "--wrap=srun true")
    urgent = jobs.cluster.call("sbatch", "--parsable", f"--output={jobs.results}/urgent.out", *options)
    jobs.wait_for_state(urgent, "COMPLETED")
    error = jobs.encore("submit", "--resume", str(jobs.folder(job)), code=2).stderr
    assert f"job {job} of cluster encore" in error, "a pending job owns its run"


@pytest.mark.long
@pytest.mark.parametrize("interrupt", [lose_node, preempt])
def test_requeued_job_gives_the_same_losses(
    jobs: Jobs, finished: Finished, interrupt: Callable[[Jobs, str], None]
) -> None:
    job = jobs.submit()
    jobs.wait_for_step(job, 5)
    interrupt(jobs, job)
    jobs.restart(job)
    jobs.wait_for_state(job, "COMPLETED", "FAILED")
    assert (jobs.state(job)[0], curve(jobs, job)) == ("not_reached", finished.losses), jobs.log(job)
    assert "resume with: " not in jobs.log(job), "Slurm resumes it, not the user"
    jobs.assert_no_rank_runs()


# A Python that crashes the second rank at its first start
CRASHING_PYTHON = """
case "$SLURM_PROCID $*" in
1*.train*) [ -e {mark} ] || {{ touch {mark}; kill -SEGV $$; }} ;;
esac
exec {python} "$@"
"""


@pytest.mark.long
def test_pytorch_job_survives_a_crash_at_its_start(jobs: Jobs, pytorch_python: Path, tmp_path: Path) -> None:
    mark = tmp_path / "crashed"
    python = write_program(tmp_path / "python", CRASHING_PYTHON.format(mark=mark, python=pytorch_python))
    job = jobs.submit("--python", str(python), benchmark="ncf")
    jobs.wait_for_state(job, "COMPLETED", "FAILED")
    assert jobs.state(job)[0] == "reached", jobs.log(job)
    assert mark.exists() and "could not start the ranks" in jobs.log(job)
    environment = run_folder.open_run(jobs.folder(job)).metadata()["environment"]
    assert environment["MASTER_ADDR"] == "localhost" and "HOROVOD_CONTROLLER" not in environment
    jobs.assert_no_rank_runs()


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
        # Run ``setup`` in the mount namespace of the second node and its slurmd ``under`` a command
        # slurmctld waits for minutes for a node that is lost while its job completes.
        wait_for(self.cluster.is_idle, "the end of the last gate")
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

    def gate(self, *options: str) -> dict[str, node_checks.NodeVerdict]:
        command = (sys.executable, "-m", "encore.cli.app", "doctor", "--nodes", *(options or ("--quick",)), "--json")
        process = subprocess.run(
            ["salloc", "--quiet", "--nodes=2", "--exclusive", *command, "--disk", str(self.folder / "disk")],
            env={**self.cluster.environment, "XDG_CACHE_HOME": str(self.folder), "PYTHONPATH": str(paths.ROOT)},
            cwd=paths.ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        self.messages = process.stderr
        verdicts = {
            node["node"]: node_checks.NodeVerdict(
                node["node"], node["level"], tuple(node_checks.Check(**check) for check in node["checks"])
            )
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
    wait_for(cluster.is_idle, "the end of the last gate")
    for node in ("n1", SECOND):
        cluster.kill_node(node)
        cluster.start_node(node)
    wait_for(cluster.is_idle, "idle nodes without faults")


def gpu_with(**values: Any) -> dict[str, Any]:
    return {"gpus": [GPU, {**GPU, **values}]}


def replaced(output: str, path: str) -> dict[str, Any]:
    # Mount the output of a command over a file
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
    "rows to remap": (gpu_with(remapped=[0, 1, 1, 0]), "GPU 1: row remapping is pending"),
    "half of the lanes": (gpu_with(pcie_width=8), "GPU 1: PCIe x8 instead of x16, 31.5 instead of 63.0 GB/s"),
    "power cap": (gpu_with(power_limit=400.0), "power limit, W: 400, others have 700"),
    "heat": (gpu_with(throttle=0x40), "GPU 1: clocks are throttled: heat (hardware)"),
    "an NVLink less": (gpu_with(nvlinks=17), "active NVLinks: 17, others have 18"),
    "lower clocks": (gpu_with(sm_mhz_max=1410), "largest SM clock, MHz: 1410, others have 1980"),
    "Xid 79": (replaced(XID, "$(command -v dmesg)"), "Xid: 79 in the kernel log"),
}


GATE_FAULT = "rows to remap"  # the others are left to make test-all


def failures(result: node_checks.NodeVerdict) -> set[str]:
    # Return the failed checks without measurements: both nodes and other tests share the cores and the disk
    measured = (*(title for _, title, *_ in node_checks.MEASURED), "write of ", "read of ")
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
def test_prolog_drains_the_faulty_node(faulty: FaultyCluster, cluster: Cluster) -> None:
    configuration, variables = cluster.folder / "slurm.conf", f"PYTHONPATH={paths.ROOT} XDG_CACHE_HOME={cluster.folder}"
    original = configuration.read_text(encoding="utf-8")
    program = write_program(cluster.folder / "prolog.sh", f"{variables} {paths.ROOT}/slurm/prolog.sh\n")
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
    assert "excluded by the gate: n2: GPU 1: 1 uncorrectable" in jobs.log(job)
    report = files.read_json(jobs.folder(job) / "gate.json")
    assert {node["node"]: node["level"] == "FAIL" for node in report["nodes"]} == {"n1": False, SECOND: True}
