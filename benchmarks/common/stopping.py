"""Stop on SIGTERM and SIGINT at a step that all ranks agree on, and show that a rank is alive."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import Optional

HEARTBEAT_SECONDS = 0.05


class StopRequest:
    """Turn SIGTERM and SIGINT into the flag ``requested`` of this rank, which the training loop asks for.

    Until ``arm`` is called there is nothing to save: a signal then ends the process at once with the
    shell's convention 128 + signal number.
    """

    def __init__(self) -> None:
        self.requested = self._armed = False
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)
        # A crash inside a framework's library leaves the Python stacks in the rank's output.
        faulthandler.enable(file=2, all_threads=True)
        # The launcher asks a rank that hangs for the stacks of all its threads with SIGUSR1.
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)

    def arm(self) -> None:
        """Let a signal set the flag from now on instead of ending the process."""
        self._armed = True

    def _handle(self, number: int, frame: Optional[FrameType]) -> None:
        self.requested = True
        if not self._armed:
            # Not sys.exit: the stack may be inside a framework call that never returns to Python.
            os._exit(128 + number)


class Heartbeat:
    """Write ``PID HOST STEP UNIX_TIME`` of one rank to a small file, at most 20 times a second.

    The launcher compares the files to find a rank that died or hangs, on any node that shares the folder.
    It must be this often: while one rank hangs, the others come a few steps further and no more.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"rank_{rank}", "w", encoding="ascii")  # noqa: SIM115
        self._next = 0.0
        self._host = socket.gethostname()
        self.beat(-1)

    def beat(self, step: int) -> None:
        """Record that this rank has come to ``step`` (-1 while it starts)."""
        now = time.time()
        if now < self._next:
            return
        self._next = now + HEARTBEAT_SECONDS
        self._file.seek(0)
        self._file.write(f"{os.getpid()} {self._host} {step} {now:.3f}\n".ljust(96))
        self._file.flush()
