"""A job's processes on this machine: find ranks, send signals, and clean up."""

import contextlib
import ctypes
import os
import platform
import re
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from encore import files
from encore.job import Command

PR_SET_CHILD_SUBREAPER = 36
CLEAN_UP_SECONDS = 30.0
# File in an experiment's folder: PID, host and start time of the launcher, while it runs
LAUNCHER = "launcher.pid"


def start(
    command: Command, output: IO[bytes], errors: IO[bytes] | None = None, keep: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a command in a new session, so that Ctrl-C in the terminal only reaches this process, which terminates it.

    Args:
        command: Command to start.
        output: File for stdout, and for stderr if ``errors`` is None.
        errors: File for stderr.
        keep: File descriptors to inherit.
    """
    return subprocess.Popen(
        command.argv,
        env=dict(command.environment),
        cwd=command.working_directory,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if errors is None else errors,
        start_new_session=True,
        pass_fds=tuple(keep),
    )


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    rank: int
    pid: int
    host: str
    step: int
    time: float  # Time of the step
    alive: float = 0.0  # When a thread of the rank last ran
    started: int = 0  # Start of the process, clock ticks since boot; 0: unknown


def output_of(*argv: str, errors: int = subprocess.DEVNULL, seconds: float = 30.0) -> str:
    """Return a short command's output regardless of its exit code; empty if the command is missing or times out."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=seconds,
            check=False,
        ).stdout  # fmt: skip
    return ""


def clean_up(command: Command) -> None:
    """Remove a command's resources that outlive its processes, such as a container."""
    if command.cleanup:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                command.cleanup,
                env=dict(command.environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=CLEAN_UP_SECONDS,
                check=False,
            )


def kills_for_memory() -> int:
    """Return the number of OOM kills on this machine since boot, if the kernel reports it."""
    return sum(map(int, re.findall(r"^oom_kill (\d+)$", files.text_of("/proc/vmstat"), re.MULTILINE)))


def heartbeats(folder: Path) -> list[Heartbeat]:
    """Return the heartbeats in a job's ``heartbeat`` folder, in order of rank."""
    beats = []
    for path in folder.glob("rank_*"):
        with contextlib.suppress(OSError, ValueError):
            pid, host, step, when, alive, started = path.read_text(encoding="ascii").split()
            beats.append(
                Heartbeat(
                    rank=int(path.name[5:]),
                    pid=int(pid),
                    host=host,
                    step=int(step),
                    time=float(when),
                    alive=float(alive),
                    started=int(started),
                )
            )
    return sorted(beats, key=lambda beat: beat.rank)


def signal_ranks(folder: Path, number: signal.Signals) -> int:
    """Send a signal to every rank on this machine that has a heartbeat file. Return the number of ranks."""
    sent = 0
    for process in rank_processes(folder):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)
            sent += 1
    return sent


def family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def adopt_orphans() -> None:
    """Become the subreaper of orphaned descendants (prctl(2), Linux only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end(processes: list[psutil.Process], grace_seconds: float) -> None:
    """Terminate ``processes``: SIGTERM, wait, then SIGKILL."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_seconds)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def rank_processes(folder: Path) -> list[psutil.Process]:
    """Return the running ranks on this machine, from the heartbeats in ``folder``."""
    ranks = [beat for beat in heartbeats(folder) if beat.host == platform.node()]
    return [process for beat in ranks for process in _find(beat.pid, beat.started, folder.parent)]


def _find(pid: int, ticks: int, experiment: Path) -> list[psutil.Process]:
    """Return the process with this PID if it belongs to the experiment, else an empty list.

    PIDs are reused, and anyone with write access to the folder can put any PID there. The process must have started
    at the recorded time, run as this user or the folder's owner, and have the folder in its command line.
    """
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        users = (os.geteuid(), experiment.stat().st_uid)
        is_same = start_ticks(pid) == ticks and process.uids().real in users
        if is_same and any(_contains(argument, experiment) for argument in process.cmdline()) and is_running(process):
            return [process]
    return []


def _contains(argument: str, folder: Path) -> bool:
    # Whether a command-line argument contains the path of ``folder``, perhaps through a symbolic link
    for end in re.finditer(rf"/{re.escape(folder.name)}(?!\w)", argument):
        starts = (slash.start() for slash in re.finditer("/", argument[: end.start() + 1]))
        if any(_is_same(argument[start : end.end()], folder) for start in starts):
            return True
    return False


def _is_same(path: str, folder: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return folder.samefile(path)
    return False


def start_ticks(pid: int) -> int:
    """Return a process's start time in clock ticks since boot (proc(5)); 0 if it has exited.

    Together with the PID it identifies a process. psutil's start time changes with the system clock.
    """
    fields = files.text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[19]) if fields else 0


def note_launcher(folder: Path, pid: int) -> None:
    with files.replaced(folder / LAUNCHER) as file:
        file.write(f"{pid} {platform.node()} {start_ticks(pid)}".encode())


def left_running(folder: Path) -> list[psutil.Process]:
    """Return running local processes of the experiment in ``folder``: launcher, ranks, and their descendants."""
    roots = rank_processes(folder / "heartbeat")
    with contextlib.suppress(OSError, ValueError):
        pid, host, ticks = (folder / LAUNCHER).read_text(encoding="ascii").split()
        roots += _find(int(pid), int(ticks), folder) if host == platform.node() else []
    processes = dict.fromkeys(process for root in roots for process in family(root.pid))
    return [process for process in processes if is_running(process)]


def is_running(process: psutil.Process) -> bool:
    """Return whether a process runs. Zombies do not count."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def is_stopped(beat: Heartbeat) -> bool:
    """Return whether a rank on this machine is stopped by a signal or in uninterruptible sleep."""
    with contextlib.suppress(psutil.NoSuchProcess):
        stopped = (psutil.STATUS_STOPPED, psutil.STATUS_DISK_SLEEP)
        return beat.host == platform.node() and psutil.Process(beat.pid).status() in stopped
    return False
