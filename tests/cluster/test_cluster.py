"""Jobs on a real two-node Slurm: training over PMIx, requeue, faults, arrays, and the commands for jobs."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from encore import files
from encore.run import run_folder
from tests.cluster.conftest import OPTIONS, Jobs
from tests.cluster.slurm import Cluster, wait_for
from tests.conftest import logged, losses, records
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
        """Losses of every run with this seed, interrupted or not."""
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
    passport = run_folder.open_run(folder).passport()
    assert (passport["nodes"], passport["ranks_per_node"]) == (2, 1)
    assert passport["slurm"] == {"job": job, "cluster": "encore", "partition": "debug", "nodes": ["n1", "n2"]}
    assert passport["environment"]["HOROVOD_CONTROLLER"] == "mpi"
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
    """Whether a suspended rank has a pending SIGTERM, or has already continued or ended: Slurm sends SIGCONT as well."""
    try:
        return rank.status() != psutil.STATUS_STOPPED or is_told(rank, signal.SIGTERM)
    except (psutil.NoSuchProcess, FileNotFoundError):
        return True


@contextlib.contextmanager
def suspended(ranks: list[psutil.Process]) -> Iterator[None]:
    """Suspend the ranks, so that they cannot finish before the signal that the block sends arrives."""
    for rank in ranks:
        rank.suspend()
    yield
    wait_for(lambda: all(map(has_sigterm, ranks)), "SIGTERM at the ranks", PATIENCE)
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

    def shown() -> dict[str, str]:
        rows = json.loads(jobs.encore("status", "--results", str(jobs.results), "--json").stdout)["runs"]
        return {row["job"]: row["state"] for row in rows if row["job"].startswith((array, queued))}

    configs = [files.read_json(jobs.experiment(array, number) / "config.json") for number in (0, 1)]
    print(shown())
    assert configs[0]["seed"] != configs[1]["seed"]
    assert curve(jobs, array, 0)[0] != curve(jobs, array, 1)[0]
    assert len(list(jobs.results.glob("[0-9]*"))) == 1
    print(jobs.encore("cancel", array, "--results", str(jobs.results)).stdout)
    for number in (0, 1):
        wait_for(lambda number=number: jobs.state(array, number)[0] == "interrupted", "both interrupted", PATIENCE)
    print(shown())
    jobs.encore("cancel", array, "--results", str(jobs.results), code=2)
