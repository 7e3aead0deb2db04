"""Run one command to its end: follow it, pass signals on, notice a rank that dies or hangs."""

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
STOP_SECONDS = 8.0  # Between a signal and the killing of the ranks, outside of Slurm: an engine gives a container 10 s
SRUN_SECONDS = 15.0  # Time that srun gets to end the ranks of all nodes, before it is killed itself
LAST_LINES = 15
# Times the limit of a step: how long ranks that have made none are waited for, from one sign of progress to the next.
# They compile: the step for one shape takes a compiler that tunes minutes.
WARM_UP_FACTOR = 3.0
ENGINE_FAILED = (125, 126, 127)  # Exit codes of ``docker run`` and ``podman run`` for a container that did not start


@dataclass(frozen=True)
class Limits:
    hang_seconds: float = 600.0  # For a step of any rank, WARM_UP_FACTOR times as long before the first; 0: no limit
    # For a checkpoint to begin after a signal, and for the ranks to end after it; None: the default of the place.
    stop_seconds: float | None = None


@dataclass(frozen=True)
class Outcome:
    status: Status
    reason: str = ""
    last_lines: tuple[str, ...] = ()
    # Nodes of the Slurm job that no longer answer: the cause, and none of the training's.
    lost_nodes: tuple[str, ...] = ()
    is_final: bool = False  # Whether a resume would end in the same way
    memory: Literal["", "GPU", "CPU"] = ""  # Whose memory was too small, where that is the reason


class Signals:
    """While entered, a stop signal sets a flag instead of ending this process.

    Sources: SIGINT a terminal, SIGHUP a terminal that was closed, SIGTERM a scheduler that takes the nodes away,
    SIGUSR1 Slurm some time before the limit (sbatch --signal). SIGHUP stays ignored under nohup.
    """

    def __init__(self) -> None:
        self.received = 0
        self.times = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.times += 1


def run(
    command: Command,
    experiment: Experiment,
    owner: ownership.Owner,
    signals: Signals,
    on_progress: Callable[[follow.Progress], None],
    limits: Limits,
) -> Outcome:
    """Execute ``command`` for ``experiment``, which ``owner`` owns; return when no process of it is left."""
    processes.adopt_orphans()
    with telemetry.sampled(experiment.folder / "telemetry.jsonl", command.samplers) as samplers:
        return _run(command, experiment, owner, signals, on_progress, limits, samplers)


def _run(
    command: Command,
    experiment: Experiment,
    owner: ownership.Owner,
    signals: Signals,
    on_progress: Callable[[follow.Progress], None],
    limits: Limits,
    samplers: Sequence[int],
) -> Outcome:
    others = {process.pid for process in processes.family(os.getpid())}
    ranks = experiment.folder / "ranks"
    ranks.mkdir(exist_ok=True)
    for path in command.rank_folders:
        path.mkdir(exist_ok=True)
    for path in (experiment.folder / "heartbeat").glob("rank_*"):
        path.unlink()
    # In a file, which every runtime and node sees: for benchmarks/detection/evaluator.py.
    with files.replaced(ranks / "hang_seconds") as file:
        file.write(f"{limits.hang_seconds}\n".encode())
    tail = follow.Tail(experiment.metrics)
    tail.read()
    processes.clean_up(command)
    with (ranks / "launcher.txt").open("ab") as output:
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
            others |= {process.pid for sampler in samplers for process in processes.family(sampler)}
            if _leave_none(child, experiment, others):
                # What the engine was asked for before its client was killed may come about a moment later.
                processes.clean_up(command)
                time.sleep(POLL_SECONDS)
            processes.clean_up(command)
            (experiment.folder / processes.LAUNCHER).unlink(missing_ok=True)


def _engine_failure(command: Command, child: subprocess.Popen[bytes], experiment: Experiment) -> Outcome | None:
    # The failure of a container engine that could not start the container at all.
    if command.runtime not in engines.BUILDERS or child.returncode not in ENGINE_FAILED:
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
    progress, slow = follow.Progress(), follow.SlowRankWatch(experiment.folder)
    stop_at: float | None = None
    stale, kills = _being_written(experiment), processes.kills_for_memory()
    while True:
        ended = child.poll() is not None
        for record in tail.read():
            progress.add(record)
        progress.slow = slow.look()
        on_progress(progress)
        if ended:
            return _conclude(child, progress, experiment, signals, kills)
        if signals.received and stop_at is None:
            stop_at = time.monotonic() + stop_seconds
            # Ranks that are not up yet have nothing to save.
            if not processes.signal_ranks(experiment.folder / "heartbeat", signal.SIGTERM):
                stop_at = 0.0
        # There is time for a checkpoint of any size where nobody insists, and Slurm does not kill next.
        may_save = signals.times < 2 and not (owner.job and signals.received == signal.SIGTERM)
        if stop_at is not None and may_save and _being_written(experiment) - stale:
            stop_at = max(stop_at, time.monotonic() + stop_seconds)
        if stop_at is not None and time.monotonic() > stop_at:
            return Outcome("interrupted", f"stopped by {signal.Signals(signals.received).name}, without a checkpoint")
        if not ownership.renew(experiment, owner):
            return Outcome("interrupted", "another process has taken the experiment over")
        hung = watch.check()
        if hung:
            processes.dump_stacks(experiment.folder / "heartbeat")
            return Outcome("failed", hung, rank_output(experiment, watch.suspect))
        time.sleep(POLL_SECONDS)


def _being_written(experiment: Experiment) -> set[Path]:
    # Checkpoints that are not whole yet.
    return set((experiment.folder / "checkpoint").glob("writing_*"))


def _conclude(
    child: subprocess.Popen[bytes], progress: follow.Progress, experiment: Experiment, signals: Signals, kills: int
) -> Outcome:
    # How the ranks ended; the kernel had killed ``kills`` processes for their memory when they started.
    code = child.returncode
    if code == 0 and progress.outcome in FINISHED:
        return Outcome(progress.outcome)
    if signals.received:
        how = "a checkpoint was written" if (progress.outcome == "interrupted") else "without a checkpoint"
        return Outcome("interrupted", f"stopped by {signal.Signals(signals.received).name}, {how}")
    if progress.outcome == "interrupted":
        return Outcome("interrupted", "a rank was stopped by a signal; a checkpoint was written")
    program = Path(child.args[0]).name  # type: ignore[index, arg-type]
    ranks = {beat.pid for beat in processes.heartbeats(experiment.folder / "heartbeat")}
    if code < 0 and not program.startswith("python") and child.pid not in ranks:
        return Outcome("failed", f"the launcher, {program}, {_describe_code(code)}; its ranks were ended")
    rank, how = first_failure(experiment, code)
    if how == _describe_code(-signal.SIGKILL) and processes.kills_for_memory() > kills:
        how = f"was killed by the kernel: {BY_KERNEL}"
    text = _rank_text(experiment, rank)
    lines = last_lines(text)
    printed = {symptom for symptom in (*DISK_FULL, *DIVERGED, UNRESUMABLE) for line in lines if symptom in line}
    if printed & {*DISK_FULL}:
        where = experiment.folder
        return Outcome("failed", f"rank {rank} could not write: the disk is full; free some space around {where}")
    diverged, memory = [symptom for symptom in DIVERGED if symptom in printed], out_of_memory(text, how)
    reason, is_final = f"rank {rank} {how}", True
    if diverged:
        reason, memory = f"{diverged[0]}; resumed it would end in the same way", ""
    elif memory:
        reason += "" if BY_KERNEL in how else f": out of memory on the {memory}"
    elif how == _describe_code(REFUSED):
        reason = f"rank {rank} refused; resumed it would refuse again"
    elif UNRESUMABLE in printed:
        reason = f"no checkpoint is whole: {UNRESUMABLE}"
    else:
        is_final = False
    return Outcome("failed", reason, lines, is_final=is_final, memory=memory)


def out_of_memory(text: str, how: str) -> Literal["", "GPU", "CPU"]:
    """Return whose memory was too small for a rank that printed ``text`` and ended as ``how`` says; empty: neither's.

    Frameworks report memory that they did not get and can do without: what counts follows the first error.
    """
    begins = [place for place in map(text.find, ERRORS) if place >= 0]
    error = text[min(begins) :] if begins else "\n".join(last_lines(text))
    if GPU_MEMORY.search(error):
        return "GPU"
    return "CPU" if CPU_MEMORY.search(error) or BY_KERNEL in how else ""


def _leave_none(child: subprocess.Popen[bytes], experiment: Experiment, others: Collection[int]) -> bool:
    # End all processes of the job, but ``others`` of this process's; return whether there were any left.
    if child.poll() is None and child.args[0] in ("srun", "mpirun"):  # type: ignore[index, operator]
        # SIGTERM to it kills the ranks on all nodes; killed itself, it would leave those elsewhere.
        processes.end([psutil.Process(child.pid)], grace_seconds=SRUN_SECONDS)
    left = [
        *(processes.family(child.pid) if child.poll() is None else ()),
        # What a launcher leaves that was killed itself is this process's by now.
        *(process for process in processes.family(os.getpid()) if process.pid not in others),
        *processes.rank_processes(experiment.folder / "heartbeat"),
    ]
    processes.end(left, grace_seconds=1.0)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5)
    return bool(left)


class HangWatch:
    """Report ranks without progress, by this host's monotonic clock: setting the time of day changes nothing."""

    def __init__(self, folder: Path, hang_seconds: float) -> None:
        self._folder = folder
        self._hang_seconds = hang_seconds
        self._next = time.monotonic() + 1.0
        self._progress: dict[int, tuple[int, float]] = {}  # Step and its time of each rank, as last read
        self._progress_at = 0.0  # When one of them changed
        self._alive: dict[int, tuple[float, float]] = {}  # Last sign of life of each rank, and when it was first read
        self.suspect = 0

    def check(self) -> str:
        """Return the reason if the run hangs, else an empty string; reads the heartbeats once a second."""
        now = time.monotonic()
        if self._hang_seconds <= 0 or now < self._next:
            return ""
        self._next = now + 1.0
        beats = processes.heartbeats(self._folder)
        if not beats:
            return ""
        self._note(beats, now)
        is_starting = max(beat.step for beat in beats) < 0
        limit = self._hang_seconds * (WARM_UP_FACTOR if is_starting else 1)
        silent = now - self._progress_at
        if silent < limit:
            return ""

        def is_stopped(beat: processes.Heartbeat) -> bool:
            return processes.is_stopped(beat) or now - self._alive[beat.rank][1] > limit / 2

        # The other ranks wait for a stopped rank, or else for the one with the fewest steps.
        slowest = min(beats, key=lambda beat: (not is_stopped(beat), beat.step, beat.time))
        self.suspect = slowest.rank
        reason = "its process gives no heartbeat" if is_stopped(slowest) else "it came least far"
        position = f"(step {slowest.step} of process {slowest.pid} on {slowest.host})"
        if is_starting:
            state = f"hangs before its first step: no progress for {silent:.0f} s"
        else:
            state = f"hangs: no rank made a step for {silent:.0f} s"
        return f"rank {slowest.rank} {state}, and {reason} {position}"

    def _note(self, beats: Sequence[processes.Heartbeat], now: float) -> None:
        progress = {beat.rank: (beat.step, beat.time) for beat in beats}
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        for beat in beats:
            if self._alive.get(beat.rank, (None,))[0] != beat.alive:
                self._alive[beat.rank] = beat.alive, now


# What a rank prints when it cannot write: the C library twice, MXNet once.
DISK_FULL = ("No space left on device", "File too large", "FileStream.Write incomplete")

# What a rank prints then, and the reason of the experiment: a resumed run has the same configuration.
DIVERGED = ("the loss is not finite", "the training has diverged")
UNRESUMABLE = "this experiment cannot be resumed"  # What a rank prints whose checkpoints are all damaged
REFUSED = 2  # Exit code of a rank that refuses its configuration, data or device (benchmarks/common/data/problem.py)

# Where Python and C++ begin to print what ends a process.
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
BY_KERNEL = "out of memory"  # What ``first_failure`` says of a rank that the kernel or Slurm killed for its memory

PREFIX = re.compile(r"^\[\d+\]<std(out|err)>:")  # What horovodrun puts before each line of a rank

START = "\n$ "  # Divides the launcher's output where an experiment was started again

# A rank in torchrun's table that was killed (SIGILL, SIGBUS, SIGFPE, SIGKILL, SIGSEGV). The table has what failed until
# torchrun looked, in the order of the ranks: also those that the killed one left alone.
TORCHRUN_KILLED = re.compile(
    r"^  rank +: (?P<rank>\d+) [^\n]*\n  exitcode +: (?P<code>-(?:4|7|8|9|11)) \(", re.MULTILINE
)

# A rank that its shell reports as killed before horovodrun ends the others, which it kills after five seconds itself.
# horovodrun reports the end of a rank that lost its connection first where something that the killed one started lives.
HOROVODRUN_KILLED = re.compile(
    r"^\[(?P<rank>\d+)\]<stderr>:(?:Killed|Segmentation fault|Bus error|Illegal instruction|Floating point exception)"
    r"(?: \(core dumped\))?$(?=.*^Terminating remaining workers)"
    r".*^Process (?P=rank) exit with status code (?P<code>1\d\d)",
    re.MULTILINE | re.DOTALL,
)

# What launchers print of ranks that fail; the first one is the cause.
FAILURES = (
    # horovodrun: a line for each rank that ends badly.
    re.compile(r"Process (?P<rank>\d+) exit with status code (?P<code>-?\d+)"),
    # torchrun: a table, in which the root cause has its own part.
    re.compile(r"Root Cause.*?rank\s*: (?P<rank>\d+).*?exitcode\s*: (?P<code>-?\d+)", re.DOTALL),
    # mpirun: of a rank that is killed, and of one that gives up.
    re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal \d+ \((?P<code>[\w ]+)\)"),
    re.compile(r"Process name: \[\[\d+,\d+\],(?P<rank>\d+)\]\s+Exit code:\s+(?P<code>\d+)"),
    # srun: a line for a rank that it could not start, else one for each node with the tasks that ended alike.
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


# What srun prints instead of a number.
WORDS = {"Killed": -9, "Terminated": -15, "Aborted": -6, "Segmentation fault": -11, "Bus error": -7}


def launcher_output(experiment: Experiment) -> str:
    _, mark, latest = files.text_of(experiment.folder / "ranks" / "launcher.txt").rpartition(START)
    return latest.partition("\n")[2] if mark else latest


def _describe(reported: str) -> str:
    # Describe what a launcher reported: a number, a signal's name, or why nothing began.
    word = reported.strip().partition(" (core")[0]
    if word.startswith("launch failed"):
        return f"could not be started: {word.partition(': ')[2]}; see slurmd's log on its node"
    if word == "Out Of Memory":
        return "was killed: its node is out of memory"
    return _describe_code(int(word) if word.lstrip("-").isdigit() else WORDS.get(word, 1))


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
    # Files of one rank as its launcher named them; none for a launcher that makes none.
    # horovodrun pads the number with zeros to the width of the largest.
    for candidate in folder.glob("rank.*"):
        if int(candidate.name[5:]) == rank:
            return [candidate / "stdout", candidate / "stderr"]
    # torchrun makes a folder for each start; the latest is meant.
    starts = sorted(folder.glob(f"*/attempt_*/{rank}"), key=lambda path: path.stat().st_mtime)
    return [start / name for start in starts[-1:] for name in ("stdout.log", "stderr.log")]
