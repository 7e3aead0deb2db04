"""NumPy's shuffle of large arrays, with the same result in less time.

RandomState.shuffle waits for memory at each of its swaps. shuffle.c prefetches; it is compiled when it is needed.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional

import numpy as np

SOURCE = Path(__file__).with_suffix(".c")
BLOCK = 1 << 16  # random numbers drawn at a time: they fit in the L2 cache
LARGE = 1 << 22  # values from which compiling takes less time than it saves


def shuffle(values: np.ndarray, random: np.random.RandomState) -> None:
    """Shuffle a contiguous array of 32-bit values in place, as ``random.shuffle(values)``."""
    last, swap = len(values) - 1, compiled() if len(values) >= LARGE else None
    while swap is not None and last >= BLOCK:
        bits = last.bit_length()
        # Up to the next power of two the mask stays the same, and all draws are used.
        draws = random.randint(0, 1 << 32, min(BLOCK, last + 1 - (1 << (bits - 1))), np.uint32)
        last = swap(values.ctypes.data, last, (1 << bits) - 1, draws.ctypes.data, len(draws))
    random.shuffle(values[: last + 1])


@lru_cache(maxsize=None)
def compiled() -> Optional[Any]:
    """Return the function of shuffle.c, or None without a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "shuffle.so"
        command = [compiler, "-O3", "-fPIC", "-shared", str(SOURCE), "-o", str(library)]
        try:
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
            function = ctypes.CDLL(str(library)).shuffle
        except (OSError, subprocess.CalledProcessError):
            return None
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes, function.restype = (pointer, number, number, pointer, number), number
    return function
