"""Jobs on a real two-node Slurm: training over PMIx, requeue, faults, arrays, and the commands for jobs."""

import contextlib
import json
import os
import signal
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
from tests.trainings import HANGS, is_told

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
    """Whether SIGTERM is pending at a suspended rank. A rank may also run again or have ended: Slurm sends SIGCONT."""
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
        """Return the states in `encore status`, without the jobs of other tests."""
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
    job = jobs.submit("--runs", "2", *ONE_EPOCH, "--drop-caches")
    # For afterok a missed target is a failure only with --require-target.
    after = (f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes", "--nodes=2")
    dependent = jobs.submit("--require-target", *ONE_EPOCH, sbatch=after)
    jobs.wait_for_state(job, "COMPLETED", "FAILED")
    assert [jobs.state(job, number)[0] for number in (0, 1)] == ["not_reached"] * 2
    logs = [logged(jobs.folder(job) / f"result_{number}.txt") for number in (0, 1)]
    seeds, cleared = (
        [event["value"] for events in logs for event in events if event["key"] == key]
        for key in ("seed", "cache_clear")
    )
    assert len(set(seeds)) == 2 and cleared == [os.access("/proc/sys/vm/drop_caches", os.W_OK)] * 2
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


@pytest.mark.long
def test_full_file_system_ends_the_job(jobs: Jobs, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    jobs.cluster.call("mount", "-t", "tmpfs", "-o", "size=1100m", "none", str(disk))
    try:
        full = Jobs(jobs.cluster, disk / "results", jobs.data)
        job = full.submit(*ENDLESS)
        full.wait_for_step(job, 5)
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(2**20)):
                pass
        full.wait_for_state(job, "FAILED")
        # The disk may have no room for the reason nor for the output of the batch script.
        (disk / "filler").unlink()
        assert full.cluster.field(job, "ExitCode") == "1:0"
        full.assert_no_rank_runs()
    finally:
        jobs.cluster.call("umount", "--lazy", str(disk))


@pytest.mark.long
def test_job_without_its_image_fails_before_the_run(jobs: Jobs, tmp_path: Path) -> None:
    # From another folder, so the script has to find the checkout
    job = jobs.submit("--runtime", "docker", "--image", "encore/nowhere:none", cwd=tmp_path)
    jobs.wait_for_state(job, "FAILED")
    assert "hint:" in jobs.log(job) and not list(jobs.results.glob("[0-9]*"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nodes", "3"), "partition debug has 2"),
        (("--nodes", "1", "--partition", "debgu"), "did you mean 'debug'?"),
        (("--nodes", "1", "--time", "500"), "allows 01:00:00"),
        (("--nodes", "1", "--data", "/nosuch"), "there is no data set in /nosuch"),
        (("--nodes", "1", "--results", "/proc/x"), "hint:"),
        (("--nodes", "1", "--runtime", "pyxis"), "Pyxis is not installed here"),
        (("--nodes", "1", "--sbatch=--constraint=nosuch"), "sbatch:"),
    ],
)
def test_impossible_job_is_not_submitted(jobs: Jobs, options: tuple[str, ...], message: str) -> None:
    error = jobs.encore("submit", "resnet", "--data", str(jobs.data), *options, code=2).stderr
    assert message in error and "Traceback" not in error
    assert jobs.cluster.call("squeue", "--noheader") == ""


@pytest.mark.long
def test_doctor_checks_the_cluster(jobs: Jobs, tmp_path: Path) -> None:
    jobs.encore("doctor", "--slurm", "--json")
    file = tmp_path / "cluster.toml"
    file.write_text('partition = "gpu"\nruntime = "pyxis"\nnetwork_interface = "nosuch0"\n', encoding="utf-8")
    report = jobs.encore("doctor", "--slurm", "--cluster", str(file), "--json", code=2).stdout
    levels = {check["name"]: check["level"] for check in json.loads(report)["checks"]}
    assert (levels["partition"], levels["runtime"], levels["network"]) == ("FAIL", "FAIL", "WARN")


# A Python that crashes the second rank at its first start
CRASHING_PYTHON = """#!/bin/sh
case "$SLURM_PROCID $*" in
1*.train*) [ -e {mark} ] || {{ touch {mark}; kill -SEGV $$; }} ;;
esac
exec {python} "$@"
"""


@pytest.mark.long
def test_pytorch_job_survives_a_crash_at_its_start(jobs: Jobs, pytorch_python: Path, tmp_path: Path) -> None:
    python, mark = tmp_path / "python", tmp_path / "crashed"
    python.write_text(CRASHING_PYTHON.format(mark=mark, python=pytorch_python), encoding="utf-8")
    python.chmod(0o755)
    job = jobs.submit("--python", str(python), benchmark="ncf")
    jobs.wait_for_state(job, "COMPLETED", "FAILED")
    assert jobs.state(job)[0] == "reached", jobs.log(job)
    assert mark.exists() and "could not start the ranks" in jobs.log(job)
    environment = run_folder.open_run(jobs.folder(job)).passport()["environment"]
    assert environment["MASTER_ADDR"] == "localhost" and "HOROVOD_CONTROLLER" not in environment
    jobs.assert_no_rank_runs()
