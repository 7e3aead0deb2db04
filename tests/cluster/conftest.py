"""A real cluster for all tests of this folder. They run where ENCORE_CLUSTER_TESTS is set: `make test-cluster`."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from encore import files, paths
from tests.cluster import slurm
from tests.cluster.slurm import Cluster, wait_for
from tests.trainings import PATIENCE

WANTED = "ENCORE_CLUSTER_TESTS"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if not os.environ.get(WANTED):
        pytest.skip(f"{WANTED} is not set: no Slurm is started (make test-cluster does)")
    missing = slurm.missing_programs()
    if missing or os.geteuid() != 0:
        pytest.fail(f"a cluster needs root and {', '.join(slurm.PROGRAMS)}; missing: {missing}")
    # Not pytest's folder: munge wants one that nobody but root may write to, all the way up.
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

    def submit(self, *arguments: str, sbatch: tuple[str, ...] = ("--nodes=2",), tiny: bool = True) -> str:
        """Return the number of a job of slurm/run.sub on half of the digits, with two epochs unless given otherwise."""
        short = ("--set", "epochs=2", "--set", "quality_target=1.0") if tiny else ()
        own = ("--results", str(self.results), "--data", str(self.data))
        script = str(paths.ROOT / "slurm" / "run.sub")
        log = f"--output={self.results}/slurm-%j.out"
        self.results.mkdir(exist_ok=True)
        return self.cluster.call("sbatch", "--parsable", log, *sbatch, script, "resnet", *own, *short, *arguments)

    def log(self, job: str) -> str:
        return "".join(path.read_text() for path in sorted(self.results.glob(f"slurm-{job}*.out")))

    def folder(self, job: str) -> Path:
        wait_for(lambda: any(self.results.glob(f"[0-9]*-job{job}")), f"run folder of job {job}")
        (found,) = self.results.glob(f"[0-9]*-job{job}")
        return found

    def state(self, job: str, number: int = 0) -> dict[str, Any]:
        path = self.folder(job) / f"experiment_{number}" / "state.json"
        return files.read_json(path) if path.exists() else {"status": "prepared", "reason": ""}

    def wait_for_state(self, job: str, *states: str, seconds: float = PATIENCE) -> str:
        """Wait until Slurm reports that the job is in one of these states."""
        wait_for(lambda: self.cluster.state(job) in states, f"job {job} in {states}", seconds)
        return self.cluster.state(job)

    def wait_for_step(self, job: str, step: int, number: int = 0) -> None:
        metrics = self.folder(job) / f"experiment_{number}" / "metrics.jsonl"
        mark = f'"step": {step},'
        wait_for(lambda: metrics.exists() and mark in metrics.read_text(), f"step {step} of job {job}", PATIENCE)

    def start_again(self, job: str) -> None:
        """Let a requeued job start soon: Slurm holds it back for two minutes."""
        self.wait_for_state(job, "PENDING")
        wait_for(self.cluster.is_idle, "idle nodes")
        # slurmd refuses the credential of a job that it ended in the same second.
        time.sleep(3)
        self.cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now")


@pytest.fixture
def jobs(cluster: Cluster, few_digits: Path, tmp_path: Path) -> Iterator[Jobs]:
    yield Jobs(cluster, tmp_path / "results", few_digits)
    cluster.call("scancel", "--user=root")
    wait_for(cluster.is_idle, "idle nodes after the test")
