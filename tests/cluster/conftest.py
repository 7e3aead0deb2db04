"""A real Slurm of two nodes, its jobs, and fixtures of the tests on it."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from encore import paths
from encore.machine import processes
from encore.run import run_folder
from tests.results.result_logs import write_files
from tests.trainings import PATIENCE, held_port, steps_so_far, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "mpirun")

# KillWait: on a busy machine a rank may need minutes to finish its step and write a checkpoint before SIGKILL.
CONFIGURATION = """\
ClusterName=encore
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldLogFile={folder}/slurmctld.log
TmpFS={folder}/tmp.%n
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=10
KillWait=300
MinJobAge=600
JobRequeue=1
OverTimeLimit=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=1,sched_interval=1,bf_interval=1
NodeName=n1 NodeHostname=localhost Port={ports[1]} CPUs={cores} RealMemory={memory}
NodeName=n2 NodeHostname=localhost Port={ports[2]} CPUs={cores} RealMemory={memory}
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=60 State=UP PriorityTier=1
PartitionName=urgent Nodes=n1,n2 Default=NO MaxTime=60 State=UP PriorityTier=10
"""


SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
# Most conditions call a Slurm program, so the interval leaves the cores to the trainings.
wait_for = partial(wait_until, poll=0.5)


@dataclass
class Cluster:
    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": SEARCH_PATH}

    def call(self, *command: str, **options: Any) -> str:
        options = {"env": self.environment, "timeout": 120.0, **options}
        process = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        assert process.returncode == 0, f"{' '.join(command)}: {process.stdout}{process.stderr}"
        return process.stdout.strip()

    def field(self, job: str, name: str) -> str:
        pairs = (word.partition("=") for word in self.call("scontrol", "show", "job", job).split())
        return next((value for key, _, value in pairs if key == name), "")

    def start_node(self, node: str, under: Sequence[str] = ()) -> None:
        # Start the slurmd of a node; ``under`` is a prefix of its command, such as taskset
        self._daemon(node, [*under, "slurmd", "-D", "-N", node])

    def kill_node(self, node: str) -> None:
        # Kill the slurmd of a node and all its processes, as a power failure would
        daemon = self.daemons.pop(node)
        daemon.kill()
        for process in self._processes_on(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        daemon.wait()

    def _processes_on(self, node: str) -> list[psutil.Process]:
        # Tasks of the node, whose environment has its name, and the slurmstepd processes that started them.
        tasks = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                if variables.get("SLURMD_NODENAME") == node and str(self.folder) in variables["SLURM_CONF"]:
                    tasks += [process, *(p for p in process.parents() if p.name() == "slurmstepd")]
        return tasks

    def _daemon(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self.environment
            )

    def start(self) -> None:
        self._start_munge()
        self._daemon("slurmctld", ["slurmctld", "-D", "-c"])
        for node in ("n1", "n2"):
            self.start_node(node)
        wait_for(self.is_idle, f"two idle nodes; see the logs in {self.folder}")

    def is_idle(self) -> bool:
        command = ("sinfo", "--noheader", "--Node", "--partition=debug", "--format=%T")
        process = subprocess.run(command, capture_output=True, text=True, env=self.environment, check=False)
        return process.stdout.split() == ["idle", "idle"]

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        arguments = [f"--{name}={self.folder}/munge.{end}" for name, end in files.items()]
        self._daemon("munged", ["munged", "--foreground", "--force", *arguments])
        wait_for((self.folder / "munge.socket").exists, "munge's socket")

    def stop(self) -> None:
        for name in sorted(self.daemons, key=["n1", "n2", "slurmctld", "munged"].index):
            processes.end([psutil.Process(self.daemons[name].pid)], grace_seconds=60.0)
            self.daemons.pop(name).wait()
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                if process.info["name"] == "slurmstepd" and str(self.folder) in " ".join(process.environ().values()):
                    process.kill()


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    # Run the daemons in ``folder``, to which only root may write
    folder.chmod(0o755)
    for name in ("state", "spool.n1", "spool.n2", "tmp.n1", "tmp.n2"):
        (folder / name).mkdir()
    with contextlib.ExitStack() as stack:
        # Bound sockets reserve the ports while a daemon does not run: before it starts and after a test killed it.
        ports = [stack.enter_context(held_port()).getsockname()[1] for _ in range(3)]
        memory, cores = psutil.virtual_memory().total // 2**20 // 2, max(1, (os.cpu_count() or 1) // 2)
        text = CONFIGURATION.format(folder=folder, ports=ports, cores=cores, memory=memory)
        cluster = Cluster(write_files(folder, {"slurm.conf": text, "cgroup.conf": "CgroupPlugin=cgroup/v1\n"}))
        stack.callback(cluster.stop)
        cluster.start()
        yield cluster


VARIABLE = "ENCORE_CLUSTER_TESTS"
# Two epochs of 12 steps. No accuracy reaches the target, so every seed finishes with the status "not_reached".
OPTIONS = ("--seed", "5", "--set", "epochs=2", "--set", "warmup_epochs=0", "--set", "quality_target=1.0")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} is not set: no Slurm is started (make test-cluster does)")
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]
    if missing or os.geteuid() != 0:
        pytest.fail(f"a cluster needs root and {', '.join(PROGRAMS)}; missing: {missing}")
    # munge requires that only root can write to the folder and its parents, so pytest's folder will not do.
    folder = Path(tempfile.mkdtemp(prefix="encore-slurm-", dir="/var/tmp"))
    try:
        with running(folder) as started:
            yield started
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Jobs:
    cluster: Cluster
    results: Path
    data: Path

    def submit(
        self, *arguments: str, benchmark: str = "resnet", sbatch: tuple[str, ...] = ("--nodes=2",), **call: Any
    ) -> str:
        # Submit slurm/run.sub with OPTIONS, which ``arguments`` can override, and return the job number
        script = (str(paths.ROOT / "slurm" / "run.sub"), benchmark, "--results", str(self.results))
        data = ("--data", str(self.data), *OPTIONS) if benchmark == "resnet" else ()
        self.results.mkdir(exist_ok=True)
        log = f"--output={self.results}/slurm-%j.out"
        return self.cluster.call("sbatch", "--parsable", log, *sbatch, *script, *data, *arguments, **call)

    def encore(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        # Run an Encore command on this cluster that must exit with ``code``
        command = (sys.executable, "-m", "encore.cli.app", *arguments)
        variables = {**self.cluster.environment, "COLUMNS": "160"}
        process = subprocess.run(
            command, cwd=paths.ROOT, env=variables, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert process.returncode == code, process.stdout + process.stderr
        return process

    def log(self, job: str) -> str:
        return "".join(path.read_text() for path in sorted(self.results.glob(f"slurm-{job}*.out")))

    def folder(self, job: str) -> Path:
        wait_for(lambda: any(self.results.glob(f"[0-9]*-job{job}")), f"run folder of job {job}")
        return next(self.results.glob(f"[0-9]*-job{job}"))

    def experiment(self, job: str, number: int = 0) -> Path:
        return self.folder(job) / f"experiment_{number}"

    def state(self, job: str, number: int = 0) -> tuple[str, str]:
        # Return status and reason of an experiment
        state = run_folder.Experiment(number, self.experiment(job, number)).state()
        return state.status, state.reason

    def wait_for_state(self, job: str, *states: str) -> None:
        # Wait for one of these states in Slurm
        wait_for(lambda: self.cluster.field(job, "JobState") in states, f"job {job} in {states}")

    def wait_for_step(self, job: str, step: int, number: int = 0) -> None:
        metrics = self.experiment(job, number) / "metrics.jsonl"
        wait_for(lambda: steps_so_far(metrics) >= step, f"step {step} of job {job}", poll=0.05)

    def ranks(self, job: str) -> list[psutil.Process]:
        return [psutil.Process(beat.pid) for beat in processes.heartbeats(self.experiment(job) / "heartbeat")]

    def restart(self, job: str) -> None:
        # Start a requeued job now; Slurm would start it after two minutes
        self.wait_for_state(job, "PENDING")
        wait_for(self.cluster.is_idle, "idle nodes")
        # slurmd rejects the credential of a job that finished in the same second.
        time.sleep(3)
        self.cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now")

    def assert_no_rank_runs(self) -> None:
        # Check that all processes with this results folder exit

        def is_rank(process: psutil.Process) -> bool:
            command = " ".join(process.info["cmdline"] or [])
            return str(self.results) in command and process.info["status"] != psutil.STATUS_ZOMBIE

        attributes = ["cmdline", "status"]
        wait_for(lambda: not any(map(is_rank, psutil.process_iter(attributes))), "the end of all processes")


@pytest.fixture
def jobs(cluster: Cluster, few_digits: Path, tmp_path: Path) -> Iterator[Jobs]:
    yield Jobs(cluster, tmp_path / "results", few_digits)
    cluster.call("scancel", "--user=root")
    wait_for(cluster.is_idle, "idle nodes after the test")
