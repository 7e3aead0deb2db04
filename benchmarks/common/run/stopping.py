"""Stop all ranks at the same step on SIGTERM and SIGINT, write heartbeats, and exit the process."""

import atexit
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Callable, Iterator, List, NoReturn, Optional, Tuple

HEARTBEAT_SECONDS = 0.05  # write interval while steps are made
ALIVE_SECONDS = 0.5  # write interval otherwise
LAUNCHER_SECONDS = 2.0  # between two looks at the process that supervises this run
_heartbeats: List["Heartbeat"] = []  # this process's, the newest last


def progress() -> None:
    """Record progress within a step: a warmed-up shape, a measured kernel.

    The launcher has a time limit per step; before the first step, some calls may be minutes apart.
    """
    if _heartbeats:
        _heartbeats[-1].again()


def start_ticks(pid: int) -> int:
    """Return the process start in clock ticks since boot (proc(5)); 0 if it has exited or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def supervisor(experiment: Path) -> Optional[Tuple[int, int]]:
    """Return PID and start ticks of the ``encore run`` that owns the experiment; None if it is not visible.

    It may run on another host or in another PID namespace, or not exist.
    """
    try:
        owner = json.loads((experiment / "owner.json").read_text(encoding="utf-8"))
        pid, ticks = int(owner["pid"]), int(owner["process_started"])
        is_here = owner["host"] == socket.gethostname() and start_ticks(pid) == ticks
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (pid, ticks) if is_here else None


class StopRequest:
    """Set the flag ``requested`` on SIGTERM and SIGINT; the training loop polls it.

    Before ``arm``, no state needs saving, and a signal exits the process immediately with code 128 + signal
    number, as in a shell.
    """

    def __init__(self) -> None:
        self.requested = self._armed = False
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)
        # A crash inside a framework's library leaves the Python stacks in the rank's output.
        faulthandler.enable(file=2, all_threads=True)
        # The launcher sends SIGUSR1 to print all thread stacks on a hanging rank.
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)

    def arm(self) -> None:
        self._armed = True

    def _handle(self, number: int, frame: Optional[FrameType]) -> None:
        self.requested = True
        if not self._armed:
            # Not sys.exit: a framework call may never return to Python.
            os._exit(128 + number)


class Heartbeat:
    """Write ``PID HOST STEP UNIX_TIME ALIVE STARTED`` to one small file per rank: times of step and write, and process
    start in clock ticks since boot.

    The launcher compares the files to find dead or hanging ranks on all nodes that share the folder. A thread writes
    them, so that the file has the last step before a wait, and a rank that waits for another one still has a current
    ALIVE time; a stopped process does not.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"rank_{rank}", "w", encoding="ascii")  # noqa: SIM115
        self._supervisor = supervisor(folder.parent)
        self._host = socket.gethostname()
        self._started = start_ticks(os.getpid())
        self.beat(-1)
        self._write()
        _heartbeats.append(self)
        threading.Thread(target=self._follow, name="heartbeat", daemon=True).start()

    def beat(self, step: int) -> None:
        """Record that this rank has come to ``step`` (-1 while it starts)."""
        self._last = step, time.time()

    def again(self) -> None:
        """Record progress within the current step."""
        self.beat(self._last[0])

    def _follow(self) -> None:
        last_written, alive = self._last, time.time()
        looked = time.monotonic()
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            if self._supervisor and time.monotonic() - looked >= LAUNCHER_SECONDS:
                looked = time.monotonic()
                self._stop_without_supervisor()
            if self._last != last_written or time.time() - alive >= ALIVE_SECONDS:
                last_written, alive = self._last, time.time()
                # A full disk is reported when records and checkpoints are written.
                with suppress(OSError):
                    self._write()

    def _stop_without_supervisor(self) -> None:
        # Without a supervisor nobody detects hanging ranks or stops them: stop with a checkpoint.
        pid, ticks = self._supervisor or (0, 0)
        if start_ticks(pid) != ticks:
            self._supervisor = None
            print("encore run has ended: stopping with a checkpoint", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

    def _write(self) -> None:
        step, when = self._last
        self._file.seek(0)
        beat = f"{os.getpid()} {self._host} {step} {when:.3f} {time.time():.3f} {self._started}\n"
        self._file.write(beat.ljust(128))
        self._file.flush()


@contextmanager
def leaving_together(framework: Any) -> Iterator[None]:
    """Call ``framework.finish`` if all ranks exit with an error: a rank that just exits may abort the others."""
    try:
        yield
    except SystemExit:
        framework.finish()
        raise


def end_process(main: Callable[[], int]) -> NoReturn:
    """Call a training's ``main`` and exit with its code like Python, but without finalizing the interpreter.

    Threads are still running: the heartbeat, which may hold its file lock, and framework threads that need Python
    to release objects, such as Gloo's after a collective. Finalizing the interpreter would abort the
    process and lose the exit code of the training.
    """
    code = 1
    try:
        code = main()
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        else:
            code = leaving.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    # Horovod leaves the other ranks here.
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
