"""Run a training as a process: to its end, or until it is interrupted; one that does not end is found.

run([sys.executable, "-m", "benchmarks.ncf.pytorch.train", ...], folder, {})
losses = read_losses(folder)
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, List, Mapping

LAST_LINES = 12
# Between looks at a training that is to be interrupted in its first steps: a GPU makes one in a millisecond.
POLL_SECONDS = 0.002
POLL_END_SECONDS = 0.1
STACK_SECONDS = 1.0  # for ranks to write the stacks of their threads
# Modules of programs that need not be next to this Python.
LAUNCHERS = {"torchrun": "torch.distributed.run", "horovodrun": "horovod.runner.launch"}
# After its last record within which all processes of a training must have ended: what takes longer hangs.
EXIT_SECONDS = 60.0


class Skipped(Exception):
    """A check that this machine or this configuration cannot make; says why."""


class Failed(Exception):
    """A training that did not end as it should."""

    def __init__(self, found: str, output: Path) -> None:
        super().__init__(found)
        lines = [line.rstrip() for line in output.read_text(encoding="utf-8", errors="replace").splitlines()]
        self.lines = tuple([line for line in lines if line][-LAST_LINES:])


def launcher(text: str) -> List[str]:
    """Return a launcher's words, with the module of its program in this Python."""
    words = shlex.split(text)
    module = LAUNCHERS.get(words[0]) if words else None
    return [sys.executable, "-m", module, *words[1:]] if module else words


def run(command: List[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Run a training to its end; Failed if it ends otherwise, or if a process of it does not end."""
    with open(folder / "output.txt", "ab") as output:
        variables = {**os.environ, **environment}
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables)
        exits = exits_after_its_end(child, folder)
        if not exits:
            signal_ranks(folder, signal.SIGUSR1)  # they write the stacks of their threads
            time.sleep(STACK_SECONDS)
            signal_ranks(folder, signal.SIGKILL)
            child.kill()
        code = child.wait()
    if not exits:
        raise Failed(f"a hang: still running {EXIT_SECONDS:.0f} s after the end of the training", written_last(folder))
    if code != 0:
        raise Failed(f"the training ended with {ending(code)}", folder / "output.txt")


def exits_after_its_end(child: Any, folder: Path) -> bool:
    """Wait for a training; return whether it ends, at the latest EXIT_SECONDS after its last record."""
    latest = math.inf
    while child.poll() is None and time.monotonic() < latest:
        if latest == math.inf and has_ended(folder):
            latest = time.monotonic() + EXIT_SECONDS
        time.sleep(POLL_END_SECONDS)
    return child.poll() is not None


def signal_ranks(folder: Path, number: int) -> None:
    """Send a signal to all ranks of a training."""
    for heartbeat in folder.glob("heartbeat/rank_*"):
        with suppress(OSError, ValueError, IndexError):
            os.kill(int(heartbeat.read_text(encoding="ascii").split()[0]), number)


def has_ended(folder: Path) -> bool:
    """Return whether a training has written its last record."""
    with suppress(OSError, IndexError, ValueError):
        last = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
        return bool(json.loads(last).get("kind") == "end")
    return False


def written_last(folder: Path) -> Path:
    """Return the output that was written last: of a training, or of a rank where the launcher keeps it."""
    outputs = [folder / "output.txt", *folder.parent.glob("ranks/**/stderr*")]
    return max(outputs, key=lambda path: path.stat().st_mtime)


def ending(code: int) -> str:
    """Describe an exit code."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def interrupt(
    command: List[str], folder: Path, steps: int = 1, environment: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Run a training and send it SIGTERM after ``steps`` steps."""
    heartbeat = folder / "heartbeat" / "rank_0"
    with open(folder / "output.txt", "ab") as output:
        variables = {**os.environ, **environment}
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables)
        while child.poll() is None and not has_stepped(heartbeat, steps):
            time.sleep(POLL_SECONDS)
        child.terminate()
        code = child.wait()
    if code != 0:
        raise Failed(f"the interrupted training ended with {ending(code)}", folder / "output.txt")


def has_stepped(heartbeat: Path, steps: int = 1) -> bool:
    """Return whether a rank has made ``steps`` steps."""
    try:
        return int(heartbeat.read_text(encoding="ascii").split()[2]) >= steps - 1
    except (OSError, ValueError, IndexError):
        return False
