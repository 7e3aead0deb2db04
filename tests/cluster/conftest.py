"""A real two-node Slurm for the tests of this folder, if ENCORE_CLUSTER_TESTS is set (`make test-cluster` sets it)."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from encore import files, paths
from encore.machine import processes
from tests.cluster import slurm
from tests.cluster.slurm import Cluster, wait_for
from tests.trainings import PATIENCE, steps_so_far

VARIABLE = "ENCORE_CLUSTER_TESTS"
# Two epochs of 12 steps. No accuracy reaches the target, so every seed finishes with the status "not_reached".
OPTIONS = ("--seed", "5", "--set", "epochs=2", "--set", "warmup_epochs=0", "--set", "quality_target=1.0")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} is not set: no Slurm is started (make test-cluster does)")
    missing = slurm.missing_programs()
    if missing or os.geteuid() != 0:
        pytest.fail(f"a cluster needs root and {', '.join(slurm.PROGRAMS)}; missing: {missing}")
    # munge requires that only root can write to the folder and its parents, so pytest's folder will not do.
    folder = Path(tempfile.mkdtemp(prefix="encore-slurm-", dir="/var/tmp"))
    try:
        with slurm.running(folder) as running:
            yield running
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
        """Submit slurm/run.sub with OPTIONS, which ``arguments`` can override, and return the job number."""
        script = (str(paths.ROOT / "slurm" / "run.sub"), benchmark, "--results", str(self.results))
        data = ("--data", str(self.data), *OPTIONS) if benchmark == "resnet" else ()
        self.results.mkdir(exist_ok=True)
        log = f"--output={self.results}/slurm-%j.out"
        return self.cluster.call("sbatch", "--parsable", log, *sbatch, *script, *data, *arguments, **call)

    def encore(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run an Encore command on this cluster that must exit with ``code``."""
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
        """Return status and reason of an experiment."""
        path = self.experiment(job, number) / "state.json"
        state = files.read_json(path) if path.exists() else {"status": "prepared", "reason": ""}
        return state["status"], state["reason"]

    def wait_for_state(self, job: str, *states: str) -> None:
        """Wait for one of these states in Slurm."""
        wait_for(lambda: self.cluster.field(job, "JobState") in states, f"job {job} in {states}")

    def wait_for_step(self, job: str, step: int, number: int = 0) -> None:
        metrics = self.experiment(job, number) / "metrics.jsonl"
        wait_for(lambda: steps_so_far(metrics) >= step, f"step {step} of job {job}", poll=0.05)

    def ranks(self, job: str) -> list[psutil.Process]:
        beats = processes.heartbeats(self.experiment(job) / "heartbeat")
        return [psutil.Process(beat.pid) for beat in beats]

    def restart(self, job: str) -> None:
        """Start a requeued job now; Slurm would start it after two minutes."""
        self.wait_for_state(job, "PENDING")
        wait_for(self.cluster.is_idle, "idle nodes")
        # slurmd rejects the credential of a job that finished in the same second.
        time.sleep(3)
        self.cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now")

    def assert_no_rank_runs(self) -> None:
        """Check that all processes with this results folder exit."""

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
