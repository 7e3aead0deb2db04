"""Run a training in a process, to its end or until it is interrupted; detects hangs.

run([sys.executable, "-m", "benchmarks.ncf.pytorch.train", ...], folder, {})
losses = read_losses(folder)
"""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Iterator, List, Mapping

LAST_LINES = 12
# Poll interval for an interruption in the first steps: a GPU makes one in a millisecond.
POLL_SECONDS = 0.002
POLL_END_SECONDS = 0.1
STACK_SECONDS = 1.0  # time for ranks to print their stacks
# Modules for programs that may be missing in this Python's folder.
LAUNCHERS = {"torchrun": "torch.distributed.run", "horovodrun": "horovod.runner.launch"}
# Time limit for all processes to exit after the last record; later is a hang.
EXIT_SECONDS = 60.0


class Skipped(Exception):
    """A check that is not possible on this machine or with this configuration."""


class Failed(Exception):
    """A training that did not end as it should."""

    def __init__(self, message: str, output: Path) -> None:
        super().__init__(message)
        lines = [line.rstrip() for line in output.read_text(encoding="utf-8", errors="replace").splitlines()]
        self.lines = tuple([line for line in lines if line][-LAST_LINES:])


def launcher(text: str) -> List[str]:
    arguments = shlex.split(text)
    module = LAUNCHERS.get(arguments[0]) if arguments else None
    return [sys.executable, "-m", module, *arguments[1:]] if module else arguments


@contextmanager
def run_process(command: List[str], folder: Path, environment: Mapping[str, str]) -> Iterator[Any]:
    """Start a process with output appended to output.txt; wait for it on exit."""
    with open(folder / "output.txt", "ab") as output:
        variables = {**os.environ, **environment}
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables)
        yield child
        child.wait()


def run(command: List[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Run a training to its end; raise Failed for an error or a process that does not exit."""
    latest = math.inf
    with run_process(command, folder, environment) as child:
        while child.poll() is None and time.monotonic() < latest:
            if latest == math.inf and has_ended(folder):
                latest = time.monotonic() + EXIT_SECONDS
            time.sleep(POLL_END_SECONDS)
        hangs = child.poll() is None
        if hangs:
            signal_ranks(folder, signal.SIGUSR1)  # prints the stacks of their threads
            time.sleep(STACK_SECONDS)
            signal_ranks(folder, signal.SIGKILL)
            child.kill()
    if hangs:
        # A launcher may capture the ranks' output.
        outputs = [folder / "output.txt", *folder.parent.glob("ranks/**/stderr*")]
        last = max(outputs, key=lambda path: path.stat().st_mtime)
        raise Failed(f"a hang: still running {EXIT_SECONDS:.0f} s after the end of the training", last)
    if child.returncode != 0:
        raise Failed(f"the training ended with {describe_exit(child.returncode)}", folder / "output.txt")


def signal_ranks(folder: Path, number: int) -> None:
    for heartbeat in folder.glob("heartbeat/rank_*"):
        with suppress(OSError, ValueError, IndexError):
            os.kill(int(heartbeat.read_text(encoding="ascii").split()[0]), number)


def has_ended(folder: Path) -> bool:
    with suppress(OSError, IndexError, ValueError):
        last = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
        return bool(json.loads(last).get("kind") == "end")
    return False


def describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def interrupt(
    command: List[str], folder: Path, steps: int = 1, environment: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Run a training and send it SIGTERM after ``steps`` steps."""
    with run_process(command, folder, environment) as child:
        while child.poll() is None and not has_stepped(folder / "heartbeat" / "rank_0", steps):
            time.sleep(POLL_SECONDS)
        child.terminate()
    if child.returncode != 0:
        raise Failed(f"the interrupted training ended with {describe_exit(child.returncode)}", folder / "output.txt")


def has_stepped(heartbeat: Path, steps: int = 1) -> bool:
    try:
        return int(heartbeat.read_text(encoding="ascii").split()[2]) >= steps - 1
    except (OSError, ValueError, IndexError):
        return False
