"""How long a stopped run may take for its checkpoint: as long as it is being written, unless somebody insists."""

import signal
import sys
from pathlib import Path

import pytest

from encore import paths
from encore.job import Command
from encore.machine import processes
from encore.run import follow, ownership, run_folder, supervise

STOP_SECONDS = 2.0
RANK = f"""
import pathlib, signal, time
from benchmarks.common.run.stopping import Heartbeat

def save(number, frame):
    writing = pathlib.Path("checkpoint/writing_00000001")
    writing.mkdir(parents=True, exist_ok=True)
    time.sleep({2 * STOP_SECONDS})
    writing.rename("checkpoint/step_00000001")
    with open("metrics.jsonl", "a") as metrics:
        metrics.write('{{"kind": "end", "time": 1.0, "outcome": "interrupted"}}\\n')
    raise SystemExit(0)

signal.signal(signal.SIGTERM, save)
beat = Heartbeat(pathlib.Path("heartbeat"), 0)
beat.beat(1)
while True:
    time.sleep(0.1)
"""


@pytest.fixture(autouse=True)
def no_orphans(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not every orphan of the tests after these is to become this process's child
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)


def stopped(folder: Path, number: signal.Signals, times: int = 1, job: str = "") -> supervise.Outcome:
    # Stop a rank that takes longer over its checkpoint than a rank may take that writes none
    (folder / "heartbeat").mkdir()
    environment = {"PYTHONPATH": str(paths.ROOT)}
    command = Command(argv=(sys.executable, "-c", RANK), environment=environment, working_directory=folder)
    signals = supervise.Signals()

    def stop(progress: follow.Progress) -> None:
        if processes.heartbeats(folder / "heartbeat"):
            signals.received, signals.times = number, times

    owner = ownership.this_process(job)
    return supervise.run(
        command, run_folder.Experiment(0, folder), owner, signals, stop, supervise.Limits(600.0, STOP_SECONDS)
    )


@pytest.mark.parametrize(("number", "job"), [(signal.SIGINT, ""), (signal.SIGTERM, ""), (signal.SIGUSR1, "12")])
def test_a_checkpoint_that_is_being_written_is_waited_for(tmp_path: Path, number: signal.Signals, job: str) -> None:
    outcome = stopped(tmp_path, number, job=job)
    assert (outcome.status, outcome.reason) == ("interrupted", f"stopped by {number.name}, a checkpoint was written")
    assert (tmp_path / "checkpoint" / "step_00000001").is_dir()


@pytest.mark.parametrize(("times", "job"), [(2, ""), (1, "12")])
def test_who_insists_does_not_wait(tmp_path: Path, times: int, job: str) -> None:
    # A second Ctrl-C, and Slurm's SIGTERM, which SIGKILL follows
    assert stopped(tmp_path, signal.SIGTERM, times, job).reason == "stopped by SIGTERM, without a checkpoint"
    assert not (tmp_path / "checkpoint" / "step_00000001").exists()


def test_what_a_killed_run_left_half_written_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "writing_00000001").mkdir(parents=True)
    assert stopped(tmp_path, signal.SIGINT).reason == "stopped by SIGINT, without a checkpoint"
