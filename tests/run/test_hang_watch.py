"""Which rank hangs, by the heartbeats."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from encore.machine import processes
from encore.run.supervise import HangWatch
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
    watch = HangWatch(tmp_path, 5.0)
    later = time.monotonic() + 2
    monkeypatch.setattr(time, "monotonic", lambda: later)
    monkeypatch.setattr(time, "time", lambda: now)
    found = watch.check()
    assert found.startswith(f"rank {culprit} hangs: no rank made a step for 9 s, and its process gives no sign of life")
    assert f"on node{culprit}" in found
    assert watch.suspect == culprit


def test_a_rank_that_waits_shows_its_last_step_and_that_it_is_alive(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib\n"
        "from benchmarks.common.stopping import Heartbeat\n"
        "beat = Heartbeat(pathlib.Path(sys.argv[1]), 3)\n"
        f"[beat.beat(step) for step in range({STEP + 1})]\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as child:
        try:
            wait_until(lambda: [beat.step for beat in processes.heartbeats(tmp_path)] == [STEP], "the last step")
            (first,) = processes.heartbeats(tmp_path)
            wait_until(lambda: processes.heartbeats(tmp_path)[0].alive > first.alive, "a sign of life")
            assert processes.heartbeats(tmp_path)[0].time == first.time
        finally:
            child.kill()
