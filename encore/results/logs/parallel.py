"""Reads many files on all cores, and gives the results in the order of the files.

    from encore.results.logs.parallel import map_files
    for run in map_files(read_run, paths):
        print(run.minutes)

Files that one core reads within a moment are read in this process: starting others takes as long.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from encore.errors import EncoreError, ExitCode

Result = TypeVar("Result")
OnRead = Callable[[int, int], None]  # Called with the bytes that are read so far, and with all there are

_WORTHWHILE = 16 << 20  # Bytes of logs that one core reads in about 0.3 s; two processes start in a tenth of that
_CHUNKS_PER_CORE = 8  # Few messages, and no core left with all at the end
_PACKED = 10  # Bytes of text in a byte of a compressed log


def map_files(read: Callable[[Path], Result], files: Sequence[Path], on_read: OnRead | None = None) -> Iterator[Result]:
    """Yield ``read(file)`` for each file, in their order; ``read`` must be a function that pickle can name."""
    sizes = [_size(file) for file in files]
    done, total = 0, sum(sizes)
    workers = _workers(len(files), total)
    found = _in_processes(read, files, workers) if workers > 1 else map(read, files)
    for size, result in zip(sizes, found, strict=True):
        done += size
        if on_read:
            on_read(done, total)
        yield result


def _workers(files: int, total: int) -> int:
    # A fork copies the locks that other threads hold, and not the threads.
    if files < 2 or total < _WORTHWHILE or threading.active_count() > 1 or not hasattr(os, "fork"):
        return 1
    from encore.machine.node import cores

    return min(cores(), files)


def _size(file: Path) -> int:
    try:
        size = file.stat().st_size
    except OSError:
        return 0
    return size * _PACKED if file.suffix == ".gz" else size


def _in_processes(read: Callable[[Path], Result], files: Sequence[Path], workers: int) -> Iterator[Result]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start_worker)
    try:
        # A worker that is interrupted before _start_worker would print a traceback: it inherits what is blocked here.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            found = pool.map(read, files, chunksize=max(1, len(files) // (workers * _CHUNKS_PER_CORE)))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield from found
    except BrokenProcessPool as error:
        raise EncoreError(
            "a process that read logs was killed",
            expected="memory for one process per core",
            hint="run it again on fewer cores: taskset -c 0 encore ...",
            exit_code=ExitCode.FAILED,
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


# Leave signals to the parent, and end with it: a killed parent cannot tell its workers.
def _start_worker() -> None:
    from multiprocessing import parent_process

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    from multiprocessing.connection import wait

    wait([sentinel])
    os._exit(ExitCode.INTERRUPTED)
