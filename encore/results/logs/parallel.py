"""Parallel reading of files, or sets of files, on all cores, with results in input order.

    from encore.results.logs.parallel import map_files
    for run in map_files(read_run, paths):
        print(run.minutes)

Small inputs are read in this process: starting worker processes would take as long.
"""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from encore.errors import EncoreError, ExitCode

Part = TypeVar("Part")
Result = TypeVar("Result")
FileSet = tuple[Path, list[Path]]  # A folder, and files in it
OnRead = Callable[[int, int], None]  # Called with the bytes that are read so far, and with all there are

_WORTHWHILE = 16 << 20  # Bytes of logs that one core reads in about 0.3 s; two processes start in a tenth of that
_CHUNK = 2  # Small, to balance the load at the end
_SETS_PER_CORE = 8  # Enough sets per core to balance the load
_NEW_OBJECTS = 100_000
_PACKED = 10  # Typical compression ratio of logs


def map_files(read: Callable[[Path], Result], files: Sequence[Path], on_read: OnRead | None = None) -> Iterator[Result]:
    """Yield ``read(file)`` in input order; ``read`` must be picklable."""
    return _map(read, files, [_size(file) for file in files], on_read)


def map_sets(
    read: Callable[[FileSet], Result], sets: Sequence[FileSet], on_read: OnRead | None = None
) -> Iterator[Result] | None:
    """Yield ``read(set)`` per set of files, like ``map_files``; None if there are too few sets for the cores.

    Results are computed in the process that reads the files, which need not be sent to this process.
    """
    sizes = [sum(map(_size, files)) for _, files in sets]
    if len(sets) < _SETS_PER_CORE * _workers(len(sets), sum(sizes)):
        return None
    return _map(read, sets, sizes, on_read)


def _map(
    read: Callable[[Part], Result], parts: Sequence[Part], sizes: Sequence[int], on_read: OnRead | None
) -> Iterator[Result]:
    done, total = 0, sum(sizes)
    workers = _workers(len(parts), total)
    results = _in_processes(read, parts, workers) if workers > 1 else map(read, parts)
    for size, result in zip(sizes, results, strict=True):
        done += size
        if on_read:
            on_read(done, total)
        yield result


def _workers(parts: int, total: int) -> int:
    # A fork copies locks held by other threads, but not the threads.
    if parts < 2 or total < _WORTHWHILE or threading.active_count() > 1 or not hasattr(os, "fork"):
        return 1
    return min(len(os.sched_getaffinity(0)), parts)


def _size(file: Path) -> int:
    try:
        size = file.stat().st_size
    except OSError:
        return 0
    return size * _PACKED if file.suffix == ".gz" else size


def _in_processes(read: Callable[[Part], Result], parts: Sequence[Part], workers: int) -> Iterator[Result]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start_worker)
    try:
        # Workers inherit the blocked signals: one interrupted before _start_worker would print a traceback.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            results = pool.map(read, parts, chunksize=_CHUNK)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        yield from results
    except BrokenProcessPool as error:
        raise EncoreError(
            "a process that read logs was killed",
            expected="memory for one process per core",
            hint="run it again on fewer cores: taskset -c 0 encore ...",
            exit_code=ExitCode.FAILED,
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


# Ignore signals, which the parent handles, and exit with the parent: a killed parent cannot stop its workers.
def _start_worker() -> None:
    from multiprocessing import parent_process

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Parsing creates few reference cycles, but the default garbage collection every 700 objects takes a fifth of the
    # time.
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    from multiprocessing.connection import wait

    wait([sentinel])
    os._exit(ExitCode.INTERRUPTED)
