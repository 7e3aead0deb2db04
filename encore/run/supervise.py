"""Run a training command: track progress, forward signals, and detect ranks that die or hang."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import psutil

from encore import files
from encore.containers import engines
from encore.job import Command
from encore.machine import processes, telemetry
from encore.run import follow, ownership
from encore.run.run_folder import FINISHED, Experiment, Status

POLL_SECONDS = 0.1
STOP_SECONDS = 8.0  # From a signal to SIGKILL outside Slurm. Docker and Podman kill a container after 10 s.
SRUN_SECONDS = 15.0  # Grace period for srun to terminate the ranks on all nodes
LAST_LINES = 15
# Multiplies hang_seconds until the first step: compiling and autotuning a step takes minutes per input shape.
WARM_UP_FACTOR = 3.0
# Exit codes of ``docker run`` and ``podman run`` if the container does not start
CONTAINER_START_FAILED = (125, 126, 127)


@dataclass(frozen=True)
class Limits:
    hang_seconds: float = 600.0  # Limit without progress on any rank; 0: unlimited. See WARM_UP_FACTOR
    # Time from a signal to the start of a checkpoint, and from there to SIGKILL; None: STOP_SECONDS
    stop_seconds: float | None = None


@dataclass(frozen=True)
class Outcome:
    status: Status
    reason: str = ""
    last_lines: tuple[str, ...] = ()
    # Slurm nodes that stopped responding. The failure is a node failure, not a training failure.
    lost_nodes: tuple[str, ...] = ()
    is_final: bool = False  # Whether resuming would fail in the same way
    memory: Literal["", "GPU", "CPU"] = ""  # Which memory was exhausted, if any


class Signals:
    """Context manager that records stop signals instead of terminating this process.

    SIGINT comes from the terminal, SIGHUP from a terminal that is closed, SIGTERM from a scheduler that revokes the
    nodes, SIGUSR1 from Slurm before the time limit (sbatch --signal). SIGHUP stays ignored under nohup.
    """

    def __init__(self) -> None:
        self.received = 0
        self.count = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.count += 1


def run(
    command: Command,
    experiment: Experiment,
    owner: ownership.Owner,
    signals: Signals,
    on_progress: Callable[[follow.Progress], None],
    limits: Limits,
) -> Outcome:
    """Run ``command`` for ``experiment`` (owned by ``owner``). Return after all processes have exited."""
    processes.adopt_orphans()
    ranks_folder = experiment.folder / "ranks"
    ranks_folder.mkdir(exist_ok=True)
    for path in command.rank_folders:
        path.mkdir(exist_ok=True)
    for path in (experiment.folder / "heartbeat").glob("rank_*"):
        path.unlink()
    # In a file, because it is visible in all runtimes and on all nodes. Read by benchmarks/detection/evaluator.py.
    with files.replaced(ranks_folder / "hang_seconds") as file:
        file.write(f"{limits.hang_seconds}\n".encode())
    tail = follow.Tail(experiment.metrics)
    tail.read()
    processes.clean_up(command)
    sampling = telemetry.sample_nodes(experiment.folder / "telemetry.jsonl", command.samplers)
    with sampling as samplers, (ranks_folder / "launcher.txt").open("ab") as output:
        unrelated_pids = {process.pid for process in processes.family(os.getpid())}
        output.write(f"{START}{shlex.join(command.argv)}\n".encode())
        output.flush()
        child = processes.start(command, output)
        watch = HangWatch(experiment.folder / "heartbeat", limits.hang_seconds)
        try:
            processes.note_launcher(experiment.folder, child.pid)
            outcome = _watch(
                child, experiment, owner, tail, signals, on_progress, watch, limits.stop_seconds or STOP_SECONDS
            )
            return _engine_failure(command, child, experiment) or outcome
        finally:
            unrelated_pids |= {process.pid for sampler in samplers for process in processes.family(sampler)}
            if _terminate_all(child, experiment, unrelated_pids):
                # The container engine may still be executing requests from the killed client.
                processes.clean_up(command)
                time.sleep(POLL_SECONDS)
            processes.clean_up(command)
            (experiment.folder / processes.LAUNCHER).unlink(missing_ok=True)


def _engine_failure(command: Command, child: subprocess.Popen[bytes], experiment: Experiment) -> Outcome | None:
    # None unless the container engine could not start the container.
    if command.runtime not in engines.BUILDERS or child.returncode not in CONTAINER_START_FAILED:
        return None
    lines = rank_output(experiment, -1)
    error = engines.explain("\n".join(lines), command.runtime)
    return Outcome("failed", f"{error.found}; hint: {error.hint}", lines)


def _watch(
    child: subprocess.Popen[bytes],
    experiment: Experiment,
    owner: ownership.Owner,
    tail: follow.Tail,
    signals: Signals,
    on_progress: Callable[[follow.Progress], None],
    watch: "HangWatch",
    stop_seconds: float,
) -> Outcome:
    progress, slow_rank_watch = follow.Progress(), follow.SlowRankWatch(experiment.folder)
    kill_at: float | None = None
    stale_checkpoints, oom_kills = _partial_checkpoints(experiment), processes.kills_for_memory()
    while True:
        has_exited = child.poll() is not None
        for record in tail.read():
            progress.add(record)
        progress.slow = slow_rank_watch.look()
        on_progress(progress)
        if has_exited:
            return _outcome(child, progress, experiment, signals, oom_kills)
        if signals.received and kill_at is None:
            # Ranks without a heartbeat have not started training: no state needs saving.
            has_ranks = processes.signal_ranks(experiment.folder / "heartbeat", signal.SIGTERM)
            kill_at = time.monotonic() + stop_seconds if has_ranks else 0.0
        # Let a checkpoint finish, however large, unless the user repeats the signal or Slurm is about to kill the job.
        may_save = signals.count < 2 and not (owner.job and signals.received == signal.SIGTERM)
        if kill_at is not None and may_save and _partial_checkpoints(experiment) - stale_checkpoints:
            kill_at = max(kill_at, time.monotonic() + stop_seconds)
        if kill_at is not None and time.monotonic() > kill_at:
            return Outcome("interrupted", f"stopped by {signal.Signals(signals.received).name}, without a checkpoint")
        if not ownership.renew(experiment, owner):
            return Outcome("interrupted", "another process took over the experiment")
        hang_reason = watch.check()
        if hang_reason:
            # The ranks write the stacks of all threads to stderr.
            processes.signal_ranks(experiment.folder / "heartbeat", signal.SIGUSR1)
            time.sleep(1.0)
            return Outcome("failed", hang_reason, rank_output(experiment, watch.suspect))
        time.sleep(POLL_SECONDS)


def _partial_checkpoints(experiment: Experiment) -> set[Path]:
    # Checkpoints in progress, including those from earlier attempts.
    return set((experiment.folder / "checkpoint").glob("writing_*"))


def _outcome(
    child: subprocess.Popen[bytes], progress: follow.Progress, experiment: Experiment, signals: Signals, oom_kills: int
) -> Outcome:
    # Classify the exit of the ranks. ``oom_kills`` is the kernel's OOM-kill count before they started.
    code = child.returncode
    if code == 0 and progress.outcome in FINISHED:
        return Outcome(progress.outcome)
    if signals.received:
        checkpoint = "a checkpoint was written" if (progress.outcome == "interrupted") else "without a checkpoint"
        return Outcome("interrupted", f"stopped by {signal.Signals(signals.received).name}, {checkpoint}")
    if progress.outcome == "interrupted":
        return Outcome("interrupted", "a rank was stopped by a signal; a checkpoint was written")
    launcher = Path(child.args[0]).name  # type: ignore[index, arg-type]
    rank_pids = {beat.pid for beat in processes.heartbeats(experiment.folder / "heartbeat")}
    if code < 0 and not launcher.startswith("python") and child.pid not in rank_pids:
        return Outcome("failed", f"launcher {launcher} {_describe_code(code)}; all ranks were terminated")
    rank, failure = first_failure(experiment, code)
    if failure == _describe_code(-signal.SIGKILL) and processes.kills_for_memory() > oom_kills:
        failure = f"was killed by the kernel: {OOM_KILLED}"
    text = _rank_text(experiment, rank)
    lines = last_lines(text)
    symptoms = {symptom for symptom in (*DISK_FULL, *DIVERGED, UNRESUMABLE) for line in lines if symptom in line}
    if symptoms & {*DISK_FULL}:
        advice = f"free some space on the file system of {experiment.folder}"
        return Outcome("failed", f"rank {rank} could not write: the disk is full; {advice}")
    divergence, memory = [symptom for symptom in DIVERGED if symptom in symptoms], out_of_memory(text, failure)
    reason, is_final = f"rank {rank} {failure}", True
    if divergence:
        reason, memory = f"{divergence[0]}; resuming would fail in the same way", ""
    elif memory:
        reason += "" if OOM_KILLED in failure else f": out of memory on the {memory}"
    elif failure == _describe_code(INVALID_INPUT):
        reason = f"rank {rank} rejected the configuration, data or device; resuming would fail in the same way"
    elif UNRESUMABLE in symptoms:
        reason = f"all checkpoints are damaged: {UNRESUMABLE}"
    else:
        is_final = False
    return Outcome("failed", reason, lines, is_final=is_final, memory=memory)


def out_of_memory(text: str, failure: str) -> Literal["", "GPU", "CPU"]:
    """Return which memory a rank exhausted, judged by the output and the failure; empty if none.

    Only output after the first error counts: frameworks also print allocation failures that they recover from.
    """
    error_offsets = [offset for offset in map(text.find, ERRORS) if offset >= 0]
    error = text[min(error_offsets) :] if error_offsets else "\n".join(last_lines(text))
    if GPU_MEMORY.search(error):
        return "GPU"
    return "CPU" if CPU_MEMORY.search(error) or OOM_KILLED in failure else ""


def _terminate_all(child: subprocess.Popen[bytes], experiment: Experiment, unrelated_pids: Collection[int]) -> bool:
    # Terminate all processes of the job except ``unrelated_pids``. Return whether any process was still running.
    if child.poll() is None and child.args[0] in ("srun", "mpirun"):  # type: ignore[index, operator]
        # On SIGTERM srun and mpirun terminate the ranks on all nodes. On SIGKILL they leave the remote ranks running.
        processes.end([psutil.Process(child.pid)], grace_seconds=SRUN_SECONDS)
    running = [
        *(processes.family(child.pid) if child.poll() is None else ()),
        # A killed launcher's orphans are reparented to this process (see processes.adopt_orphans).
        *(process for process in processes.family(os.getpid()) if process.pid not in unrelated_pids),
        *processes.rank_processes(experiment.folder / "heartbeat"),
    ]
    processes.end(running, grace_seconds=1.0)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5)
    return bool(running)


class HangWatch:
    """Detect ranks without progress. Uses the monotonic clock of this host, so clock changes have no effect."""

    def __init__(self, folder: Path, hang_seconds: float) -> None:
        self._folder = folder
        self._hang_seconds = hang_seconds
        self._next_check = time.monotonic() + 1.0
        self._progress: dict[int, tuple[int, float]] = {}  # Last step and its time, by rank
        self._progress_at = 0.0  # Time of the last change in ``_progress``
        self._alive: dict[int, tuple[float, float]] = {}  # Last heartbeat by rank, and when it was first read
        self.suspect = 0

    def check(self) -> str:
        """Return why the run hangs; empty if it does not. Reads the heartbeats no more than once per second."""
        now = time.monotonic()
        if self._hang_seconds <= 0 or now < self._next_check:
            return ""
        self._next_check = now + 1.0
        beats = processes.heartbeats(self._folder)
        if not beats:
            return ""
        self._record(beats, now)
        before_first_step = max(beat.step for beat in beats) < 0
        limit = self._hang_seconds * (WARM_UP_FACTOR if before_first_step else 1)
        silent = now - self._progress_at
        if silent < limit:
            return ""

        def is_stopped(beat: processes.Heartbeat) -> bool:
            return processes.is_stopped(beat) or now - self._alive[beat.rank][1] > limit / 2

        # A stopped rank, otherwise the rank with the lowest step, blocks the other ranks.
        suspect = min(beats, key=lambda beat: (not is_stopped(beat), beat.step, beat.time))
        self.suspect = suspect.rank
        symptom = "its heartbeat stopped" if is_stopped(suspect) else "it has the lowest step"
        location = f"(step {suspect.step} of process {suspect.pid} on {suspect.host})"
        if before_first_step:
            state = f"hangs before its first step: no progress for {silent:.0f} s"
        else:
            state = f"hangs: no step on any rank for {silent:.0f} s"
        return f"rank {suspect.rank} {state}, and {symptom} {location}"

    def _record(self, beats: Sequence[processes.Heartbeat], now: float) -> None:
        progress = {beat.rank: (beat.step, beat.time) for beat in beats}
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        for beat in beats:
            if self._alive.get(beat.rank, (None,))[0] != beat.alive:
                self._alive[beat.rank] = beat.alive, now


# Error messages for a full disk: C library (2), MXNet (1).
DISK_FULL = ("No space left on device", "File too large", "FileStream.Write incomplete")

# Messages of failures that a resume cannot fix, because it has the same configuration and checkpoints.
DIVERGED = ("the loss is not finite", "the training has diverged")
UNRESUMABLE = "this experiment cannot be resumed"  # All checkpoints are damaged
INVALID_INPUT = 2  # Exit code for a bad configuration, data set or device (benchmarks/common/data/problem.py)

# First words of fatal errors in Python and C++.
ERRORS = ("Traceback (most recent call last)", "terminate called")
# PyTorch, CUDA, NCCL and MXNet before 2.0; DALI twice; cuBLAS and cuDNN; TensorFlow; MXNet 2.0.
GPU_MEMORY = re.compile(
    r"cuda[^\n]*out of memory|CUDABadAlloc|Can't allocate [^\n]* on device|_STATUS_ALLOC_FAILED"
    r"|OOM when allocating [^\n]*device:GPU|Memory allocation failed out of memory",
    re.IGNORECASE,
)
# Python, NumPy, C++, PyTorch, TensorFlow, MXNet, the C library.
CPU_MEMORY = re.compile(
    r"\bMemoryError|ArrayMemoryError|bad_alloc|DefaultCPUAllocator: |OOM when allocating"
    r"|Failed to allocate CPU Memory|Cannot allocate memory"
)
OOM_KILLED = "out of memory"  # In the failure text if the kernel or Slurm OOM-killed the rank

PREFIX = re.compile(r"^\[\d+\]<std(out|err)>:")  # Prefix of rank output in horovodrun

START = "\n$ "  # Separates the attempts in launcher.txt

# A killed rank (SIGILL, SIGBUS, SIGFPE, SIGKILL or SIGSEGV) in torchrun's failure table. The table is ordered by rank
# and may also list ranks that failed because their peer was killed.
TORCHRUN_KILLED = re.compile(
    r"^  rank +: (?P<rank>\d+) [^\n]*\n  exitcode +: (?P<code>-(?:4|7|8|9|11)) \(", re.MULTILINE
)

# A killed rank, reported by the shell before horovodrun terminates the remaining workers (it kills them after 5 s). If
# the killed rank has live child processes, horovodrun first reports a rank that lost the connection.
HOROVODRUN_KILLED = re.compile(
    r"^\[(?P<rank>\d+)\]<stderr>:(?:Killed|Segmentation fault|Bus error|Illegal instruction|Floating point exception)"
    r"(?: \(core dumped\))?$(?=.*^Terminating remaining workers)"
    r".*^Process (?P=rank) exit with status code (?P<code>1\d\d)",
    re.MULTILINE | re.DOTALL,
)

# Launcher messages for failed ranks. The first match is the cause.
FAILURES = (
    # horovodrun: one line per failed rank.
    re.compile(r"Process (?P<rank>\d+) exit with status code (?P<code>-?\d+)"),
    # torchrun: the root cause is in a separate section.
    re.compile(r"Root Cause.*?rank\s*: (?P<rank>\d+).*?exitcode\s*: (?P<code>-?\d+)", re.DOTALL),
    # mpirun: killed rank, then rank with a non-zero exit code.
    re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal \d+ \((?P<code>[\w ]+)\)"),
    re.compile(r"Process name: \[\[\d+,\d+\],(?P<rank>\d+)\]\s+Exit code:\s+(?P<code>\d+)"),
    # srun: one line per task that did not start, otherwise one line per node and exit status.
    re.compile(r"error: task (?P<rank>\d+) (?P<code>launch failed: [^\n]+)"),
    re.compile(r"error: \S+: tasks? (?P<rank>\d+)[-,\d]*: (?:Exited with exit code )?(?P<code>[\w ]+)"),
)


def first_failure(experiment: Experiment, code: int) -> tuple[int, str]:
    text = launcher_output(experiment)
    for pattern in (TORCHRUN_KILLED, HOROVODRUN_KILLED, *FAILURES):
        match = pattern.search(text)
        if match is not None:
            return int(match["rank"]), _describe(match["code"])
    return 0, _describe_code(code)


# Signal names in srun's messages.
SRUN_SIGNALS = {"Killed": -9, "Terminated": -15, "Aborted": -6, "Segmentation fault": -11, "Bus error": -7}


def launcher_output(experiment: Experiment) -> str:
    _, separator, latest = files.text_of(experiment.folder / "ranks" / "launcher.txt").rpartition(START)
    return latest.partition("\n")[2] if separator else latest


def _describe(reported: str) -> str:
    # Launchers report an exit code, a signal name, or a launch failure.
    status = reported.strip().partition(" (core")[0]
    if status.startswith("launch failed"):
        return f"could not be started: {status.partition(': ')[2]}; see slurmd's log on its node"
    if status == "Out Of Memory":
        return "was killed: its node is out of memory"
    return _describe_code(int(status) if status.lstrip("-").isdigit() else SRUN_SIGNALS.get(status, 1))


def _describe_code(code: int) -> str:
    number = -code if code < 0 else code - 128
    if number > 0 and number in {s.value for s in signal.Signals}:
        return f"was killed by {signal.Signals(number).name}"
    return f"failed with exit code {code}"


def rank_output(experiment: Experiment, rank: int) -> tuple[str, ...]:
    return last_lines(_rank_text(experiment, rank))


def _rank_text(experiment: Experiment, rank: int) -> str:
    return "".join(map(files.text_of, _rank_files(experiment.folder / "ranks", rank))) or launcher_output(experiment)


def last_lines(text: str) -> tuple[str, ...]:
    plain = (PREFIX.sub("", line).rstrip() for line in text.splitlines())
    return tuple([line for line in plain if line][-LAST_LINES:])


def _rank_files(folder: Path, rank: int) -> list[Path]:
    # Output files per rank; empty if the launcher does not write any.
    # horovodrun zero-pads the rank number.
    for candidate in folder.glob("rank.*"):
        if int(candidate.name[5:]) == rank:
            return [candidate / "stdout", candidate / "stderr"]
    # torchrun creates one folder per attempt; use the last one.
    attempts = sorted(folder.glob(f"*/attempt_*/{rank}"), key=lambda path: path.stat().st_mtime)
    return [attempt / name for attempt in attempts[-1:] for name in ("stdout.log", "stderr.log")]
