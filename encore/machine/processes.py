"""The processes of a job on this machine: find its ranks, signal them, leave none behind."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Last heartbeat of a rank."""

    rank: int
    pid: int
    host: str
    step: int
    time: float


def heartbeats(folder: Path) -> list[Heartbeat]:
    """Return the heartbeats in a job's ``heartbeat`` folder, in order of rank."""
    found = []
    for path in folder.glob("rank_*"):
        with contextlib.suppress(OSError, ValueError):
            pid, host, step, when = path.read_text(encoding="ascii").split()
            found.append(Heartbeat(rank=int(path.name[5:]), pid=int(pid), host=host, step=int(step), time=float(when)))
    return sorted(found, key=lambda beat: beat.rank)


def signal_ranks(folder: Path, number: signal.Signals) -> int:
    """Send a signal to every rank on this machine that has a heartbeat file; return how many."""
    sent = 0
    for beat in heartbeats(folder):
        if beat.host == platform.node():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(beat.pid, number)
                sent += 1
    return sent


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end(processes: list[psutil.Process], grace_seconds: float) -> None:
    """Send SIGTERM, wait, send SIGKILL: afterwards none of ``processes`` is left."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_seconds)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def rank_processes(folder: Path) -> list[psutil.Process]:
    """Return ranks of this machine that still run, found by their heartbeats."""
    alive = []
    for beat in heartbeats(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(beat.pid)
            # The number may belong to another process by now; and a zombie, which nobody has waited for, is dead.
            same = beat.host == platform.node() and process.create_time() <= beat.time + 1
            if same and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def is_stopped(beat: Heartbeat) -> bool:
    """Return whether a rank of this machine is stopped by a signal, or waits for a device that does not answer."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if beat.host == platform.node():
            return psutil.Process(beat.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_DISK_SLEEP)
    return False


def dump_stacks(folder: Path) -> None:
    """Ask the ranks for the stacks of their threads; they write them to their standard error."""
    signal_ranks(folder, signal.SIGUSR1)
    time.sleep(1.0)
