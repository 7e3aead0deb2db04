"""Where the time from the start of a process to its clock goes, part by part, and what each may take.

What is inside another part counts as its own alone. A step that torch.compile compiles in its first call, as on one
rank, is in the part that calls it.
"""

import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterator, List

# Seconds of each part on eight GPUs of a node, 60 in all. MLPerf's logs from init_start to run_start have 13 to 45 s in
# v0.7 and 41 to 143 s in v4.0, imports and joining not counted.
BUDGET = {
    "imports": 12.0,  # Python and the framework, up to the first line of the run
    "ranks": 8.0,  # finding the other ranks
    "network": 10.0,  # weights, optimizer, warm-up steps, and what of the initialization is in no other part
    "kernels": 6.0,  # measuring the implementations of operators and optimizers
    "compile": 10.0,  # torch.compile, one rank of a node after the other
    "capture": 8.0,  # CUDA graphs, with the calls before them
    "connect": 4.0,  # opening the connections of all collectives
    "rest": 2.0,  # all else, such as reading what describes the data set
}

_parts: Dict[str, float] = {}
_open: List[str] = []
_since = [0.0]


def reset() -> None:
    """Forget all parts; what the process has taken so far was its imports."""
    _parts.clear()
    _open.clear()
    _parts["imports"] = _age()


@contextmanager
def part(name: str) -> Iterator[None]:
    """Count the time of what is inside as the part ``name`` of BUDGET, up to ``seconds_by_part``."""
    _count()
    _open.append(name)
    try:
        yield
    finally:
        _count()
        _open.pop()


def seconds_by_part() -> Dict[str, float]:
    """Return the seconds of each part so far; they add up to the age of the process."""
    seconds = {**_parts, "rest": _age() - sum(_parts.values())}
    return {name: round(seconds[name], 3) for name in BUDGET if name in seconds}


def _count() -> None:
    now = time.perf_counter()
    if _open:
        _parts[_open[-1]] = _parts.get(_open[-1], 0.0) + now - _since[0]
    _since[0] = now


# Seconds since the process began, as the kernel has it (proc(5), /proc/self/stat).
def _age() -> float:
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    clock: int = getattr(time, "CLOCK_BOOTTIME", 7)  # which Python 3.6 has no name for
    return time.clock_gettime(clock) - ticks / os.sysconf("SC_CLK_TCK")
