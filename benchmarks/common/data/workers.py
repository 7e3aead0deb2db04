"""Run one function over many tasks in several processes, and end cleanly in every way it can end.

``multiprocessing.Pool`` waits for ever when a worker is killed, and ``concurrent.futures`` leaves its
workers behind when the parent is; here either end of a pipe sees the other one go.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from contextlib import closing, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Callable, Dict, Generator, List, NamedTuple, Sequence, Tuple, cast

from benchmarks.common.data.problem import FAILED, Problem, disk_problem
from benchmarks.common.data.progress import Progress

# Spawned and not forked: a parent that has loaded a numerical library has threads, which do not survive
# a fork, and a forked worker would hold its siblings' pipes open after the parent has gone.
_CONTEXT = multiprocessing.get_context("spawn")
_REPORT_PERIOD = 0.2  # seconds

Report = Callable[[int, int], None]
Function = Callable[[Any, Report], Tuple[int, int]]


class Stage(NamedTuple):
    """One phase of a preparation that worker processes do."""

    phase: str
    unit: str
    """What ``size`` and a function's first number count."""
    function: Function
    """Called with a task and a function to report units and bytes so far; returns their final numbers."""
    size: Callable[[Any], int]
    """Units of a task."""


def run(
    stage: Stage, tasks: Sequence[Any], waiting: Sequence[Any], workers: int, folder: Path, progress: Progress
) -> None:
    """Do the ``waiting`` ones of all tasks in up to ``workers`` processes, and report how far all of them are.

    A problem in any worker is raised here, after all of them have been stopped; a full disk is that of
    ``folder``. Function and tasks cross to the workers by pickle.
    """
    total = sum(stage.size(task) for task in tasks)
    before = total - sum(stage.size(task) for task in waiting)
    if before:
        finished = len(tasks) - len(waiting)
        progress.note(f"resuming: {finished:,} of {len(tasks):,} parts of {stage.phase} were finished before")
    counts, sizes = [0] * len(waiting), [0] * len(waiting)
    progress.update(stage.phase, before, total, unit=stage.unit)
    with closing(_reports(stage.function, waiting, workers, folder)) as reports:
        for place, count, size in reports:
            counts[place], sizes[place] = count, size
            progress.update(stage.phase, min(total, before + sum(counts)), total, sum(sizes), stage.unit)


def _reports(
    function: Function, tasks: Sequence[Any], workers: int, folder: Path
) -> Generator[Tuple[int, int, int], None, None]:
    """Yield the number of a task with its units and bytes so far, whenever a worker reports them."""
    waiting = iter(enumerate(tasks))
    processes: Dict[Connection, BaseProcess] = {}
    try:
        for _ in range(min(workers, len(tasks))):
            _start(function, folder, processes)
        busy = list(processes)
        while busy:
            for connection in cast("List[Connection]", wait(busy)):
                try:
                    report = connection.recv()
                    if report is None:  # asks for a task
                        task = next(waiting, None)
                        if task is None:
                            busy.remove(connection)
                        else:
                            connection.send(task)
                except (EOFError, ConnectionError):
                    raise _lost(processes[connection]) from None
                if isinstance(report, Problem):
                    raise report
                if report is not None:
                    yield report
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.join()


def _start(function: Function, folder: Path, processes: Dict[Connection, BaseProcess]) -> None:
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_serve, args=(theirs, function, folder), daemon=True)
    # Ctrl-C reaches the whole process group; blocked from its birth on, a worker leaves it to the parent.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    processes[ours] = process
    theirs.close()


def _lost(process: BaseProcess) -> Problem:
    process.join()
    code = process.exitcode or 0
    return Problem(
        f"a worker process ended by {f'signal {-code}' if code < 0 else 'an error of its own'}",
        "every worker lives until its parts are done",
        "look for the out-of-memory killer in dmesg and give the same command again, with fewer --workers",
        FAILED,
    )


def _serve(connection: Connection, function: Function, folder: Path) -> None:
    """Ask for tasks, and send their numbers with units and bytes so far, or a problem."""
    place, last = 0, time.monotonic()

    def report(count: int, size: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _REPORT_PERIOD:
            last = time.monotonic()
            connection.send((place, count, size))

    with suppress(EOFError, ConnectionError):  # the parent has gone
        while True:
            connection.send(None)
            place, task = connection.recv()
            try:
                connection.send((place, *function(task, report)))
            except Problem as problem:
                connection.send(problem)
            except ConnectionError:
                raise
            except OSError as error:
                connection.send(disk_problem(error, folder))
