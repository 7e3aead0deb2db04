"""Which rank hangs, by the heartbeats."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.common.run import stopping
from encore import job, paths
from encore.machine import processes
from encore.run import ownership, run_folder, supervise
from tests.trainings import wait_until

STEP = 12


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("step", [STEP, STEP + 1])
def test_a_process_on_another_host_without_a_sign_of_life_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, culprit: int, step: int
) -> None:
    now = time.time()
    for rank in (0, 1):
        alive = now - 10.0 if rank == culprit else now - 0.4
        beat = f"99999{rank} node{rank} {step if rank == culprit else STEP} {now - 10 + rank} {alive}"
        (tmp_path / f"rank_{rank}").write_text(beat.ljust(112), encoding="ascii")
    watch = supervise.HangWatch(tmp_path, 5.0)
    later = time.monotonic() + 2
    monkeypatch.setattr(time, "monotonic", lambda: later)
    monkeypatch.setattr(time, "time", lambda: now)
    found = watch.check()
    assert found.startswith(f"rank {culprit} hangs: no rank made a step for 9 s, and its process gives no heartbeat")
    assert f"on node{culprit}" in found and watch.suspect == culprit


@pytest.mark.parametrize(
    ("step", "seconds", "hangs"),
    [(-1, 2.0, ""), (-1, 4.0, "before its first step: no progress for 2400 s"), (0, 2.0, "made a step")],
)
def test_ranks_that_start_have_longer_for_each_sign_of_progress(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: int, seconds: float, hangs: str
) -> None:
    now, limit = time.time(), 600.0
    for rank in (0, 1):
        beat = f"99999{rank} node{rank} {step} {now - limit * seconds} {now}"
        (tmp_path / f"rank_{rank}").write_text(beat.ljust(112), encoding="ascii")
    watch = supervise.HangWatch(tmp_path, limit)
    later = time.monotonic() + 2
    monkeypatch.setattr(time, "monotonic", lambda: later)
    found = watch.check()
    assert hangs in found and bool(found) == bool(hangs)


def test_progress_within_a_step_is_a_sign_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_heartbeats", [])
    stopping.progress()  # of a program that has no run
    stopping.Heartbeat(tmp_path, 0)
    (first,) = processes.heartbeats(tmp_path)

    def came_further() -> bool:
        stopping.progress()
        (beat,) = processes.heartbeats(tmp_path) or (first,)
        return beat.step == -1 and beat.time > first.time

    wait_until(came_further, "a later time for the same step")


RANK = """
import os, pathlib, sys, time
from benchmarks.common.run.stopping import Heartbeat
Heartbeat(pathlib.Path("heartbeat"), int(sys.argv[1])).beat(3)
time.sleep(0.5)
while sys.argv[1] == "0":
    time.sleep(0.1)  # for the other one, as in a collective without a watchdog
"""


def test_ranks_that_wait_without_end_for_a_lost_one_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With TORCH_NCCL_ASYNC_ERROR_HANDLING=0 nobody else ends them, where the launcher does not see the loss
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)
    (tmp_path / "heartbeat").mkdir()
    launcher = f"for rank in 0 1; do {sys.executable} -c '{RANK.replace(chr(39), chr(34))}' $rank & done; wait"
    command = job.Command(
        argv=("bash", "-c", launcher), environment={"PYTHONPATH": str(paths.ROOT)}, working_directory=tmp_path
    )
    owner, limits = ownership.this_process(""), supervise.Limits(hang_seconds=3.0)
    outcome = supervise.run(
        command, run_folder.Experiment(0, tmp_path), owner, supervise.Signals(), lambda progress: None, limits
    )
    assert (outcome.status, outcome.reason.split(":")[0]) == ("failed", "rank 1 hangs")
    assert processes.rank_processes(tmp_path / "heartbeat") == []


def test_a_rank_that_waits_shows_its_last_step_and_that_it_is_alive(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib\n"
        "from benchmarks.common.run.stopping import Heartbeat\n"
        "beat = Heartbeat(pathlib.Path(sys.argv[1]), 3)\n"
        f"[beat.beat(step) for step in range({STEP + 1})]\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as child:
        try:
            wait_until(lambda: [beat.step for beat in processes.heartbeats(tmp_path)] == [STEP], "the last step")
            (first,) = processes.heartbeats(tmp_path)
            wait_until(lambda: processes.heartbeats(tmp_path)[0].alive > first.alive, "a heartbeat")
            assert processes.heartbeats(tmp_path)[0].time == first.time
        finally:
            child.kill()
