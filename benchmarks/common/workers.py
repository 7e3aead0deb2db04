"""Runs one function over many tasks in several processes, and ends cleanly in every way it can end.

``multiprocessing.Pool`` waits for ever when a worker is killed, and ``concurrent.futures`` leaves its
workers behind when the parent is; here either end of a pipe sees the other one go.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

from benchmarks.common.preparing import FAILED, Problem

# Spawned and not forked: a parent that has loaded a numerical library has threads, which do not survive
# a fork, and a forked worker would hold its siblings' pipes open after the parent has gone.
_CONTEXT = multiprocessing.get_context("spawn")
_REPORT_PERIOD = 0.2  # seconds

Report = Callable[[int, int], None]
Function = Callable[[Any, Report], Tuple[object, int, int]]


class Event(NamedTuple):
    """What a worker tells: images and bytes so far in its task, and the result when the task is done."""

    task: int
    """Position in the list of tasks."""
    count: int
    size: int
    done: bool = False
    result: Any = None


def run(function: Function, tasks: Sequence[object], workers: int) -> Iterator[Event]:
    """Calls ``function(task, report)`` for each task in up to ``workers`` processes and yields events.

    The function returns a result and its final counts of images and bytes. A problem in any worker is
    raised here, after all of them have been stopped. Function and tasks cross to the workers by pickle.
    """
    waiting = list(range(len(tasks)))[::-1]
    busy: Dict[Connection, int] = {}
    processes: Dict[Connection, BaseProcess] = {}
    try:
        for _ in range(min(workers, len(tasks))):
            _start(function, processes)
        for connection, process in processes.items():
            busy[connection] = _give(connection, process, waiting, tasks)
        while busy:
            for connection in _readable(busy):
                position = busy.pop(connection)
                event = _receive(connection, processes[connection], position)
                if not event.done:
                    busy[connection] = position
                elif waiting:
                    busy[connection] = _give(connection, processes[connection], waiting, tasks)
                yield event
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.join()


def _start(function: Function, processes: Dict[Connection, BaseProcess]) -> None:
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_serve, args=(theirs, function), daemon=True)
    # Ctrl-C reaches the whole process group; blocked from its birth on, a worker leaves it to the parent.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    processes[ours] = process
    theirs.close()


def _readable(connections: Iterable[Connection]) -> List[Connection]:
    return [ready for ready in wait(list(connections)) if isinstance(ready, Connection)]


def _give(connection: Connection, process: BaseProcess, waiting: List[int], tasks: Sequence[object]) -> int:
    position = waiting.pop()
    try:
        connection.send(tasks[position])
    except ConnectionError:
        raise _lost(process) from None
    return position


def _receive(connection: Connection, process: BaseProcess, position: int) -> Event:
    try:
        message = connection.recv()
    except (EOFError, ConnectionError):
        raise _lost(process) from None
    if isinstance(message, Problem):
        raise message
    return Event(position, *message)


def _lost(process: BaseProcess) -> Problem:
    process.join()
    code = process.exitcode or 0
    return Problem(
        "a worker process ended by {}".format(
            "signal {}".format(-code) if code < 0 else "an error of its own"
        ),
        "every worker lives until its parts are done",
        "look for the out-of-memory killer in dmesg and give the same command again, with fewer --workers",
        FAILED,
    )


def _serve(connection: Connection, function: Function) -> None:
    last = time.monotonic()

    def report(count: int, size: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _REPORT_PERIOD:
            last = time.monotonic()
            connection.send((count, size))

    try:
        while True:
            task = connection.recv()
            try:
                result, count, size = function(task, report)
                connection.send((count, size, True, result))
            except Problem as problem:
                connection.send(problem)
    except (EOFError, ConnectionError):
        return  # the parent has gone
