"""Stop on SIGTERM and SIGINT at a step that all ranks agree on, show that a rank is alive, and end its process."""

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

HEARTBEAT_SECONDS = 0.05  # between two writings of a rank that makes steps
ALIVE_SECONDS = 0.5  # the same of one that makes none
LAUNCHER_SECONDS = 2.0  # between two looks at the process that supervises this run
_heartbeats: List["Heartbeat"] = []  # this process's, the newest last


def progress() -> None:
    """Record that this rank has come further within what it does: warmed up a shape, measured a kernel.

    The launcher waits for the next step only so long; before the first one, some calls of this may be minutes apart.
    """
    if _heartbeats:
        _heartbeats[-1].again()


def start_ticks(pid: int) -> int:
    """Return the clock ticks from boot to the start of a process (proc(5)); 0 if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def supervisor(experiment: Path) -> Optional[Tuple[int, int]]:
    """Return PID and start ticks of the ``encore run`` that owns the experiment; None if this process cannot see it.

    It may run on another host or in another PID namespace, or there is none.
    """
    try:
        owner = json.loads((experiment / "owner.json").read_text(encoding="utf-8"))
        pid, ticks = int(owner["pid"]), int(owner["process_started"])
        is_here = owner["host"] == socket.gethostname() and start_ticks(pid) == ticks
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (pid, ticks) if is_here else None


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
        self._armed = True

    def _handle(self, number: int, frame: Optional[FrameType]) -> None:
        self.requested = True
        if not self._armed:
            # Not sys.exit: the stack may be inside a framework call that never returns to Python.
            os._exit(128 + number)


class Heartbeat:
    """Keeps ``PID HOST STEP UNIX_TIME ALIVE STARTED`` of one rank in a small file: times of the step and of writing,
    and the start of the process in clock ticks since boot.

    The launcher compares the files to find a rank that died or hangs, on any node that shares the folder. A thread
    writes them, so that the last step before a wait is in the file, and so that a rank that waits for another one still
    shows that it is alive; one that is stopped does not.
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
        """Record that this rank is still in its step and has come further."""
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
                # A full disk is reported by what writes records and checkpoints.
                with suppress(OSError):
                    self._write()

    def _stop_without_supervisor(self) -> None:
        # Nobody would notice a rank that hangs, or end the ranks: stop all of them with a checkpoint
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
    """Leave the other ranks where all of them end with a message: a rank that just exits may abort the others."""
    try:
        yield
    except SystemExit:
        framework.finish()
        raise


def end_process(main: Callable[[], int]) -> NoReturn:
    """Call a training's ``main`` and end with its exit code as Python does, but leave the interpreter whole.

    Threads still run then: the heartbeat's, which may hold the lock of its file, and those of a framework, which may
    hold what only Python can free, as Gloo's do after a collective. A process whose interpreter is taken apart under
    them is aborted, and its exit code says nothing of what the training found.
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
