"""Run a function over many tasks in worker processes, with clean shutdown in all cases."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from multiprocessing import connection
from pathlib import Path
from typing import Any, Callable, Generator, NamedTuple, Sequence, Tuple

from benchmarks.common.data.problem import FAILED, Problem, disk_problem
from benchmarks.common.data.progress import Progress

# Spawn, not fork: a parent that has loaded a numerical library has threads, which do not survive a fork, and a forked
# worker would keep its siblings' pipes open after the parent has exited.
_CONTEXT = multiprocessing.get_context("spawn")
_REPORT_PERIOD = 0.2  # seconds

Report = Callable[[int, int], None]
Function = Callable[[Any, Report], Tuple[int, int]]


class Workers(NamedTuple):
    """Preparation worker processes."""

    max_workers: int  # maximum number of processes
    folder: Path  # output folder, for messages about a full disk
    progress: Progress

    def run(
        self,
        phase: str,
        unit: str,
        function: Function,
        tasks: Sequence[Any],
        size: Callable[[Any], int],
        is_done: Callable[[Any], bool] = lambda task: bool(task.done_path.exists()),
    ) -> None:
        """Run the tasks that are not finished yet and report the progress.

        A problem in any worker is raised here after all workers have stopped. Function and tasks are pickled.

        Args:
            phase: name in the progress report.
            unit: of ``size`` and of the first number that a function returns.
            function: called with a task and a function that reports units and bytes so far; returns the final numbers.
            tasks: all tasks.
            size: units per task.
            is_done: whether a task was finished before; default: its ``done_path`` exists, which is written last.
        """
        waiting = [task for task in tasks if not is_done(task)]
        total = sum(size(task) for task in tasks)
        finished_units = total - sum(size(task) for task in waiting)
        if finished_units:
            finished = len(tasks) - len(waiting)
            self.progress.note(f"resuming: {finished:,} of {len(tasks):,} parts of {phase} were finished before")
        counts, sizes = [0] * len(waiting), [0] * len(waiting)
        self.progress.update(phase, finished_units, total, unit=unit)
        with closing(_reports(function, waiting, self.max_workers, self.folder)) as reports:
            for number, count, size_written in reports:
                # A report may arrive after its task has finished.
                counts[number], sizes[number] = max(counts[number], count), max(sizes[number], size_written)
                self.progress.update(phase, min(total, finished_units + sum(counts)), total, sum(sizes), unit)


# Yield task number, units and bytes so far for each worker report.
def _reports(
    function: Function, tasks: Sequence[Any], workers: int, folder: Path
) -> Generator[Tuple[int, int, int], None, None]:
    if not tasks:
        return
    reports = _CONTEXT.Queue()
    with ProcessPoolExecutor(min(workers, len(tasks)), _CONTEXT, _initialize_worker, (reports,)) as pool:
        # Ctrl-C reaches the entire process group. Workers start with it blocked and leave it to the parent.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            pending = {pool.submit(_run_task, function, number, task, folder) for number, task in enumerate(tasks)}
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        try:
            while pending:
                done, pending = wait(pending, _REPORT_PERIOD, FIRST_COMPLETED)
                while not reports.empty():
                    yield reports.get()
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            raise Problem(
                "a worker process was killed",
                "all workers run until their parts are finished",
                "check dmesg for the out-of-memory killer and run the same command again, with fewer --workers",
                FAILED,
            ) from None
        finally:
            for process in multiprocessing.active_children() if pending else ():
                process.terminate()


# Initialize a worker, which exits with its parent instead of waiting for its pipes.
def _initialize_worker(reports: Any) -> None:
    global _queue
    _queue = reports
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with_parent, args=(parent.sentinel,), daemon=True).start()


def _exit_with_parent(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


_queue: Any = None  # queue for worker reports


def _run_task(function: Function, number: int, task: Any, folder: Path) -> Tuple[int, int, int]:
    last = time.monotonic()

    def report(count: int, size: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _REPORT_PERIOD:
            last = time.monotonic()
            _queue.put((number, count, size))

    try:
        return (number, *function(task, report))
    except OSError as error:
        raise disk_problem(error, folder) from None
