"""The loops of the sample order in C, with NumPy's results in less time.

NumPy waits for memory at most accesses of C4's order. order.c prefetches, and sorts swaps by blocks of targets that fit
in the caches; it is compiled when it is needed.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional, Tuple

import numpy as np

SOURCE = Path(__file__).with_name("order.c")
LARGE = 1 << 22  # values from which compiling takes less time than it saves
SWAPS = 1 << 26  # deferred swaps of a shuffle, 0.8 GB


def shuffle(values: np.ndarray, random: np.random.RandomState) -> None:
    """Shuffle a contiguous array of 32-bit values in place, as ``random.shuffle(values)``."""
    loops = library() if len(values) >= LARGE else None
    if loops is None:
        random.shuffle(values)
        return
    state: Any = random.get_state()  # name, key, position, and the state of Gaussian numbers
    used = ctypes.c_uint32(state[2])
    swaps = np.empty((min(SWAPS, len(values) // 8), 3), np.uint32)  # NumPy's large arrays have huge pages
    arrays = (values.ctypes.data, len(values), state[1].ctypes.data, ctypes.byref(used), swaps.ctypes.data)
    loops.shuffle(*arrays, len(swaps))
    state = (*state[:2], used.value, *state[3:])
    random.set_state(state)


def cut(lengths: np.ndarray, documents: np.ndarray, length: int, count: int) -> Optional[Tuple[np.ndarray, np.ndarray]]:
    """Return the arrays of ``order.cut``, or None if they are small or there is no C compiler."""
    loops = library() if len(documents) >= LARGE else None
    if loops is None:
        return None
    lengths = np.require(lengths, np.int32, ["ALIGNED", "C_CONTIGUOUS"])  # in an index they are not aligned
    indices, offsets = np.empty(count, np.int32), np.empty(count, np.int32)
    arrays = (array.ctypes.data for array in (lengths, documents, indices, offsets))
    loops.cut(*arrays, len(documents), length, count)
    return indices, offsets


@lru_cache(maxsize=None)
def library() -> Optional[Any]:
    """Return order.c as a library, or None without a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.so"
        command = [compiler, "-O3", "-fPIC", "-shared", str(SOURCE), "-o", str(path)]
        try:
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
            loops = ctypes.CDLL(str(path))
        except (OSError, subprocess.CalledProcessError):
            return None
    pointer, number, large = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
    loops.shuffle.argtypes, loops.shuffle.restype = (pointer, number, pointer, pointer, pointer, number), None
    loops.cut.argtypes, loops.cut.restype = (pointer, pointer, pointer, pointer, large, ctypes.c_int64, large), None
    return loops
