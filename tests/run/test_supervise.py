"""Supervision of a run: hanging ranks, the time for a last checkpoint, and the reason of its end."""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest

from benchmarks.common.run import stopping
from encore import paths
from encore.containers import engines
from encore.job import Command
from encore.machine import processes
from encore.run import follow, ownership, run_folder, supervise
from tests.results.result_logs import write_files
from tests.trainings import wait_until

STEP = 12


@pytest.fixture(autouse=True)
def no_orphans(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not every orphan of the tests after these is to become this process's child
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)


def supervised(
    folder: Path,
    argv: tuple[str, ...],
    limits: supervise.Limits,
    signals: supervise.Signals | None = None,
    on_progress: Callable[[follow.Progress], None] = lambda progress: None,
    job: str = "",
) -> supervise.Outcome:
    (folder / "heartbeat").mkdir()
    command = Command(argv=argv, environment={"PYTHONPATH": str(paths.ROOT)}, working_directory=folder)
    experiment, owner = run_folder.Experiment(0, folder), ownership.this_process(job)
    return supervise.run(command, experiment, owner, signals or supervise.Signals(), on_progress, limits)


def silent_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limit: float, steps: Sequence[int], seconds: float, dead: int = -1
) -> tuple[supervise.HangWatch, str]:
    # Return a watch and its finding after ``seconds`` without a step; rank ``dead`` also gives no heartbeat
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    watch = supervise.HangWatch(folder, limit)
    for elapsed in (2.0, 2.0 + seconds):
        monkeypatch.setattr(time, "monotonic", lambda elapsed=elapsed: 100.0 + elapsed)
        for rank, step in enumerate(steps):
            beat = f"99999{rank} node{rank} {step} {rank} {0.0 if rank == dead else elapsed} 0"
            (folder / f"rank_{rank}").write_text(beat.ljust(112), encoding="ascii")
        reason = watch.check()
    return watch, reason


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("step", [STEP, STEP + 1])
def test_rank_without_heartbeat_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dead: int, step: int) -> None:
    steps = [step if rank == dead else STEP for rank in (0, 1)]
    watch, reason = silent_run(tmp_path, monkeypatch, 5.0, steps, 10.0, dead)
    place, symptom = f"(step {step} of process 99999{dead} on node{dead})", "its heartbeat stopped"
    assert reason == f"rank {dead} hangs: no step on any rank for 10 s, and {symptom} {place}" and watch.suspect == dead


@pytest.mark.parametrize(
    ("step", "limits", "hangs"),
    [
        (-1, 2.0, ""),
        (-1, 4.0, "before its first step: no progress for 2400 s"),
        (0, 2.0, "no step on any rank"),
        (0, 0.9, ""),
    ],
)
def test_starting_ranks_have_a_longer_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: int, limits: float, hangs: str
) -> None:
    _, reason = silent_run(tmp_path, monkeypatch, 600.0, (step, step), 600.0 * limits)
    assert hangs in reason and bool(reason) == bool(hangs)


def test_clock_jump_is_not_a_hang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jumped = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: jumped)
    assert silent_run(tmp_path, monkeypatch, 600.0, (STEP, STEP), 10.0)[1] == ""


def test_progress_within_a_step_renews_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_heartbeats", [])
    stopping.progress()  # of a program without a run
    stopping.Heartbeat(tmp_path, 0)
    (first,) = processes.heartbeats(tmp_path)

    def is_renewed() -> bool:
        stopping.progress()
        return processes.heartbeats(tmp_path)[0].time > first.time

    wait_until(is_renewed, "a later time for the same step")


RANK = """
import os, pathlib, sys, time
from benchmarks.common.run.stopping import Heartbeat
Heartbeat(pathlib.Path("heartbeat"), int(sys.argv[1])).beat(3)
time.sleep(0.5)
while sys.argv[1] == "0":
    time.sleep(0.1)  # for the other one, as in a collective without a watchdog
"""


@pytest.mark.slow
def test_ranks_that_wait_for_a_dead_rank_are_ended(tmp_path: Path) -> None:
    # As with TORCH_NCCL_ASYNC_ERROR_HANDLING=0, and a launcher that does not see the end of a rank
    launcher = (
        f"for rank in 0 1; do {sys.executable} -c '{RANK.replace(chr(39), chr(34))}' $rank {tmp_path} & done; wait"
    )
    outcome = supervised(tmp_path, ("bash", "-c", launcher), supervise.Limits(hang_seconds=3.0))
    assert (outcome.status, outcome.reason.split(":")[0]) == ("failed", "rank 1 hangs")
    assert processes.rank_processes(tmp_path / "heartbeat") == []


def test_heartbeat_goes_on_while_a_rank_waits(tmp_path: Path) -> None:
    heartbeat = stopping.Heartbeat(tmp_path, 3)
    for step in range(STEP + 1):
        heartbeat.beat(step)
    wait_until(lambda: [beat.step for beat in processes.heartbeats(tmp_path)] == [STEP], "the last step")
    (first,) = processes.heartbeats(tmp_path)
    wait_until(lambda: processes.heartbeats(tmp_path)[0].alive > first.alive, "a heartbeat")
    assert processes.heartbeats(tmp_path)[0].time == first.time


STOP_SECONDS = 4.0
SAVING_RANK = f"""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "times", "job", "leftover", "is_saved"),
    [
        (signal.SIGINT, 1, "", False, True),
        (signal.SIGTERM, 1, "", False, True),
        (signal.SIGUSR1, 1, "12", False, True),
        (signal.SIGTERM, 2, "", False, False),  # a second Ctrl-C
        (signal.SIGTERM, 1, "12", False, False),  # by Slurm, which sends SIGKILL next
        (signal.SIGINT, 1, "", True, False),  # a partial checkpoint of an earlier run
    ],
)
def test_stopped_run_waits_for_its_checkpoint(
    tmp_path: Path, number: signal.Signals, times: int, job: str, leftover: bool, is_saved: bool
) -> None:
    # Writing the checkpoint takes longer than a rank may take that writes none
    if leftover:
        (tmp_path / "checkpoint" / "writing_00000001").mkdir(parents=True)
    signals = supervise.Signals()

    def stop(progress: follow.Progress) -> None:
        if processes.heartbeats(tmp_path / "heartbeat"):
            signals.received, signals.count = number, times

    limits = supervise.Limits(600.0, STOP_SECONDS)
    outcome = supervised(tmp_path, (sys.executable, "-c", SAVING_RANK, str(tmp_path)), limits, signals, stop, job)
    checkpoint = "a checkpoint was written" if is_saved else "without a checkpoint"
    assert (outcome.status, outcome.reason) == ("interrupted", f"stopped by {number.name}, {checkpoint}")
    assert (tmp_path / "checkpoint" / "step_00000001").is_dir() == is_saved


# -- reasons of an end ----------------------------------------------------------------------------------


def launched(folder: Path, printed: str, before: str = "") -> run_folder.Experiment:
    # An experiment whose launcher, or only rank, printed this at its last start
    text = f"{before}{supervise.START}python\n{printed}\n"
    return run_folder.Experiment(0, write_files(folder, {"ranks/launcher.txt": text}))


TRACEBACK = "Traceback (most recent call last):\n  File "
# Last output of a rank and its exit code
ENDINGS = [
    ("ValueError: x", 1),
    ("\nRuntimeError: stopped", -9),
    ("KILLED BY THE KERNEL", -9),
    ("No space left on device", 1),
    ("windows of 40 tokens\n  hint: set sequence_length=40", 2),
    ("the loss is not finite at step 3", 1),
    ("all checkpoints in checkpoint are damaged: this experiment cannot be resumed", 1),
    (f"{TRACEBACK}\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate", 1),
    (f"{TRACEBACK}\nMXNetError: storage.h:157: cudaMalloc retry failed: out of memory", 1),
    (f"{TRACEBACK}\nOOM when allocating tensor with shape[9] on /job:w/device:GPU:0 by GPU_0_bfc", 1),
    (f"{TRACEBACK}\nOOM when allocating tensor with shape[9] on /job:w/device:CPU:0 by cpu", 1),
    (f"{TRACEBACK}\nDefaultCPUAllocator: can't allocate memory: you tried to", 1),
    (f"{TRACEBACK}\nMXNetError: Failed to allocate CPU Memory", 1),
    (f"{TRACEBACK}\nnumpy.core._exceptions._ArrayMemoryError: Unable to allocate 4 GiB", 1),
    ("terminate called after throwing an instance of 'std::bad_alloc'" + "\n  frame" * 99, -6),
    ("ran out of memory; cuda out of memory\n" + f"{TRACEBACK}\nKeyError: 1", 1),
]


def test_reason_of_a_failure(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    outcomes = []
    for number, (printed, code) in enumerate(ENDINGS):
        experiment = launched(tmp_path / f"{number}", printed)
        child = Mock(returncode=code, args=["python"], pid=1)
        kills = processes.kills_for_memory() - (printed == "KILLED BY THE KERNEL")
        outcome = supervise._outcome(child, follow.Progress(), experiment, supervise.Signals(), kills)
        outcomes.append([code, *asdict(outcome).values()])
    recorded("endings.json", outcomes)
    child, progress = Mock(returncode=0, args=["python"]), follow.Progress(outcome="not_reached")
    assert supervise._outcome(child, progress, experiment, supervise.Signals(), 0).status == "not_reached"


@pytest.mark.parametrize(
    ("runtime", "code", "is_reported"), [("docker", 125, True), ("docker", 1, False), ("host", 125, False)]
)
def test_container_that_does_not_start_is_a_failure_of_the_engine(
    tmp_path: Path, runtime: str, code: int, is_reported: bool
) -> None:
    line, child = 'docker: could not select device driver "" with capabilities: [[gpu]].', Mock(returncode=code)
    command = Command(argv=(), environment={}, working_directory=tmp_path, runtime=runtime)
    outcome = supervise._engine_failure(command, child, launched(tmp_path, line))
    expected = f"docker: the engine cannot pass GPUs to containers; hint: {engines.NO_TOOLKIT}"
    assert outcome == (supervise.Outcome("failed", expected, (line,)) if is_reported else None)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("Process 1 exit with status code 9.", (1, "failed with exit code 9")),
        (
            # Rank 0 lost its connection to rank 1, whose worker was still alive.
            "[1]<stderr>:Killed\nProcess 0 exit with status code 1.\n"
            "Terminating remaining workers after failure of Process 0.\nProcess 1 exit with status code 137.",
            (1, "was killed by SIGKILL"),
        ),
        (
            # Rank 1 did not end in the five seconds that horovodrun gave it.
            "Process 0 exit with status code 1.\nTerminating remaining workers after failure of Process 0.\n"
            "[1]<stderr>:Killed\nProcess 1 exit with status code 137.",
            (0, "failed with exit code 1"),
        ),
        (
            "srun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Terminated",
            (1, "was killed by SIGKILL"),
        ),
        (
            "mpirun noticed that process rank 1 with PID 41 on node n2 exited on signal 9 (Killed).",
            (1, "was killed by SIGKILL"),
        ),
        (
            "mpirun detected that one or more processes exited with non-zero status\n\n"
            "  Process name: [[55601,1],3]\n  Exit code:    7\n",
            (3, "failed with exit code 7"),
        ),
        ("srun: error: n[1-2]: tasks 0-3: Exited with exit code 2", (0, "failed with exit code 2")),
        ("slurmstepd: error: n2: task 3: Out Of Memory", (3, "was killed: its node is out of memory")),
        (
            "srun: error: task 1 launch failed: Unspecified error\nsrun: error: n1: task 0: Killed",
            (1, "could not be started: Unspecified error; see slurmd's log on its node"),
        ),
        (
            "Root Cause (first observed failure):\n[0]:\n  time : x\n  rank      : 3 (local_rank: 3)\n"
            "  exitcode  : -9 (pid: 8)\n",
            (3, "was killed by SIGKILL"),
        ),
        (
            # Rank 0 lost its connection to rank 1, and ended before torchrun looked.
            "train FAILED\nFailures:\n[1]:\n  time      : x\n  host      : n1\n  rank      : 1 (local_rank: 1)\n"
            "  exitcode  : -9 (pid: 8)\n  error_file: <N/A>\n------\nRoot Cause (first observed failure):\n[0]:\n"
            "  time      : x\n  host      : n1\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 7)\n",
            (1, "was killed by SIGKILL"),
        ),
    ],
)
def test_first_failing_rank(output: str, expected: tuple[int, str], tmp_path: Path) -> None:
    assert supervise.first_failure(launched(tmp_path, output, "Process 0 exit with status code 4\n"), 1) == expected


@pytest.mark.parametrize("symptom", [*supervise.DIVERGED, supervise.UNRESUMABLE])
def test_final_errors_are_printed_by_the_ranks(symptom: str) -> None:
    assert any(symptom in path.read_text(encoding="utf-8") for path in paths.BENCHMARKS.rglob("*.py"))
