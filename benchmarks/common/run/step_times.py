"""Step time and waiting time of this rank, one line per minute, to find slow ranks.

Synchronous ranks all have the slowest rank's step time, so only the waiting time reveals it. A rank on a CPU
waits if none of its threads runs, is runnable or reads a file, and no batch is being fetched. Threads of
communication libraries are ignored: they may spin. A rank on a GPU queues its work, so its threads reveal nothing.
"""

import json
import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Collection, Dict, Iterator, List, Optional, Set

from benchmarks.common.records import StepWindow, plain
from benchmarks.common.run.ranks import Ranks

TASKS = "/proc/self/task"
WINDOW_SECONDS = 60.0  # per line; the first ones are shorter, to find slow ranks early
FIRST_SECONDS = 5.0
SAMPLE_SECONDS = 0.25  # 240 samples per minute: the waiting fraction has a resolution of 3 percentage points


def threads() -> Set[str]:
    with suppress(OSError):
        return set(os.listdir(TASKS))  # noqa: PTH208
    return set()


def read(thread: str, name: str) -> bytes:
    """Read a thread's /proc file, b"" if it has exited. Path.read_text takes 3 times as long."""
    try:
        file = os.open(f"{TASKS}/{thread}/{name}", os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, 512)
    except OSError:
        return b""
    finally:
        os.close(file)


def is_working(ignored: Collection[str]) -> bool:
    """Return whether a thread of this process, except ``ignored``, runs, is runnable or waits for a disk."""
    return any(read(name, "stat").rpartition(b") ")[2][:1] in (b"R", b"D") for name in threads() if name not in ignored)


def delays() -> Dict[str, float]:
    """Return the seconds that each thread was runnable without a core (schedstat)."""
    fields = {name: read(name, "schedstat").split() for name in threads()}
    return {name: int(values[1]) / 1e9 for name, values in fields.items() if len(values) == 3}


class StepTimes:
    """Append lines to ``folder``/rank_N.jsonl from a thread that samples the other threads of this rank."""

    def __init__(self, folder: Path, ranks: Ranks, input_wait: Any, communicating: Optional[Collection[str]]) -> None:
        """Start sampling; ``input_wait``: see StepReports.

        ``communicating``: names of the threads of communication libraries, for a rank on a CPU.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"rank_{ranks.rank}.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self._node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._local_rank = ranks.local_rank
        self._input_wait = input_wait
        self._others = None if communicating is None else set(communicating)
        self._began = time.time()
        self._since: Optional[float] = None  # The end of the last step; None outside of the training
        self._fetching = False
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._step = 0
        self._open_window()
        threading.Thread(target=self._follow, name="step-times", daemon=True).start()

    def start(self) -> None:
        """Start a training part, whose first step starts now."""
        self._since = time.time()

    def add(self, steps: range) -> None:
        now = time.time()
        if self._since is not None:
            with self._lock:
                self._seconds += [(now - self._since) / len(steps)] * len(steps)
                self._step = steps.stop
        self._since = now

    def stop(self) -> None:
        self._since = None

    def end(self) -> None:
        """Write the last line and stop sampling."""
        self.stop()
        self._ended.set()
        self._write()

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Fetch a batch inside: whatever is waited for is none of the other ranks."""
        self._fetching = True
        try:
            yield
        finally:
            self._fetching = False

    def _open_window(self) -> None:
        self._opened = time.time()
        self._seconds: List[float] = []
        self._sampled = self._waited = 0.0
        self._stalled: float = self._input_wait.total
        self._cpu, self._delays = time.process_time(), delays()

    def _follow(self) -> None:
        if self._others is not None:
            self._others.add(str(threading.get_native_id()))
        last = time.time()
        while not self._ended.wait(SAMPLE_SECONDS):
            now, previous = time.time(), last
            last = now
            if self._since is not None:
                self._sampled += now - previous
                # If the rank was stopped or had no core, the sampling interval is longer; that is not waiting time.
                if self._others is not None and not self._fetching and not is_working(self._others):
                    self._waited += min(now - previous, 1.5 * SAMPLE_SECONDS)
            if now - self._opened >= min(WINDOW_SECONDS, max(FIRST_SECONDS, (self._opened - self._began) / 2)):
                self._write()

    def _write(self) -> None:
        with self._lock:
            steps = sorted(self._seconds)
            if not steps:
                return
            is_known, ready = self._others is not None and self._sampled > 0, delays()
            line = StepWindow(
                time=round(time.time(), 3),
                node=self._node,
                local_rank=self._local_rank,
                step=self._step,
                steps=len(steps),
                window=round(time.time() - self._opened, 3),
                median=round(steps[len(steps) // 2], 6),
                p99=round(steps[min(len(steps) - 1, int(0.99 * len(steps)))], 6),
                waiting=round(self._waited / self._sampled, 4) if is_known else None,
                input=round((self._input_wait.total - self._stalled) / max(sum(steps), 1e-9), 4),
                cpu=round(time.process_time() - self._cpu, 3),
                delayed=round(sum(max(0.0, ready[name] - self._delays.get(name, 0.0)) for name in ready), 3),
            )
            self._open_window()
        # A full disk is reported when records and checkpoints are written.
        with suppress(OSError, ValueError):
            self._file.write(json.dumps(plain(line)) + "\n")
            self._file.flush()
