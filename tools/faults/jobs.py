"""Faults of Slurm jobs, on the two-node cluster of the tests: as root, where Slurm's programs are installed."""

import contextlib
import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from encore import paths
from encore.run import hints
from tests.cluster import slurm
from tests.cluster.slurm import Cluster, wait_for
from tools.faults.trial import RANKS, Done, Trial, Verdict, settings

Harm = Callable[[Cluster, str], object]


def _kill_node(cluster: Cluster, job: str) -> None:
    cluster.kill_node("n2")
    wait_for(lambda: cluster.state(job) != "RUNNING", "the lost node to be noticed", 90)
    cluster.start_node("n2")


HARM: dict[str, Harm] = {
    "scancel-job": lambda cluster, job: cluster.call("scancel", job),
    "sigkill-job": lambda cluster, job: cluster.call("scancel", "--signal=KILL", "--full", job),
    "requeued-job": lambda cluster, job: cluster.call("scontrol", "requeue", job),
    "killed-node": _kill_node,
}


@contextlib.contextmanager
def _cluster(trial: Trial) -> Iterator[Cluster]:
    """Start a cluster, which the commands of the trial reach."""
    # Munge wants a folder that nobody but root may write to, all the way up.
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp", prefix="encore-slurm-") as folder,
        slurm.running(Path(folder)) as cluster,
        mock.patch.dict(os.environ, cluster.environment),
    ):
        yield cluster


def job_fault(harm: str, trial: Trial) -> Verdict:
    """Harm a job at some moment of its training; it resumes by itself where it is requeued, else as status says."""
    missing = slurm.missing_programs()
    if missing or os.geteuid() != 0:
        return Verdict("not tried", f"needs root and {', '.join(missing) or 'nothing more'}")
    if not (paths.ROOT / ".venv").exists():
        return Verdict("not tried", "needs ./setup.sh: a job would run it")
    where = ("--data", str(trial.bench.data), "--results", str(trial.results), "--seed", "7")
    where += settings(trial.bench.name)
    _ = trial.bench.unbroken
    with _cluster(trial) as cluster:
        job = _number(trial.do(shlex.join(["encore", "submit", trial.bench.name, "--nodes", str(RANKS), *where])))
        follower = trial.spawn(shlex.join(["encore", "follow", job, "--results", str(trial.results)]))
        trial.wait_for_moment(follower)
        HARM[harm](cluster, job)
        _end(cluster, job)
        if cluster.state(job) == "COMPLETED":  # by itself, after a requeue
            trial.ended(follower)
            return trial.judged(trial.run, Done(0, ""), {})
        trial.ended(follower)
        again = trial.do(hints.resume(trial.run))
        if "nothing is left to run" not in again.output:  # by itself, without reaching the target
            _end(cluster, _number(again))
        return trial.judged(trial.run, Done(3, ""), {})


def _number(done: Done) -> str:
    found = re.search(r"submitted as job (\d+)", done.output)
    if found is None:
        raise RuntimeError(done.output)
    return found[1]


def _end(cluster: Cluster, job: str) -> None:
    """Wait for the end of a job; one that is back in the queue starts soon, not after Slurm's two minutes."""
    end = time.monotonic() + 240
    while time.monotonic() < end:
        if cluster.state(job) == "PENDING" and cluster.is_idle():
            time.sleep(3)  # slurmd refuses the credential of a job that it ended in the same second
            with contextlib.suppress(AssertionError):  # it may have started by itself meanwhile
                cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now")
        elif cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING") and cluster.is_idle():
            return
        time.sleep(0.5)
    raise RuntimeError(f"job {job} does not end")
