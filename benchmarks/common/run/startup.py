"""Startup time by phase, from process start to the start of the clock, with a budget for each phase.

Nested phases are counted separately. On a single rank, torch.compile runs in the first call of the step and counts
toward the phase of that call.
"""

import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterator, List

# Seconds per phase on a node with eight GPUs, 60 in total. From init_start to run_start, MLPerf logs have 13 to 45 s in
# v0.7 and 41 to 143 s in v4.0, without imports and process group setup.
BUDGET = {
    "imports": 12.0,  # Python and the framework, up to the first line of the run
    "ranks": 8.0,  # finding the other ranks
    "network": 10.0,  # weights, optimizer, warm-up steps and the remaining initialization
    "kernels": 6.0,  # measuring the implementations of operators and optimizers
    "compile": 10.0,  # torch.compile, one rank per node at a time
    "capture": 8.0,  # CUDA graphs and their warm-up
    "connect": 4.0,  # opening the connections of all collectives
    "rest": 2.0,  # everything else, such as reading the manifest
}

_parts: Dict[str, float] = {}
_open: List[str] = []
_since = [0.0]


def reset() -> None:
    """Clear all phases and count the time since process start as imports."""
    _parts.clear()
    _open.clear()
    _parts["imports"] = _age()


@contextmanager
def part(name: str) -> Iterator[None]:
    """Add the time of the block to phase ``name`` of BUDGET."""
    _count()
    _open.append(name)
    try:
        yield
    finally:
        _count()
        _open.pop()


def seconds_by_part() -> Dict[str, float]:
    """Return the seconds per phase; their sum is the age of the process."""
    seconds = {**_parts, "rest": _age() - sum(_parts.values())}
    return {name: round(seconds[name], 3) for name in BUDGET if name in seconds}


def _count() -> None:
    now = time.perf_counter()
    if _open:
        _parts[_open[-1]] = _parts.get(_open[-1], 0.0) + now - _since[0]
    _since[0] = now


# Process age in seconds from /proc/self/stat (proc(5))
def _age() -> float:
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    clock: int = getattr(time, "CLOCK_BOOTTIME", 7)  # missing in Python 3.6
    return time.clock_gettime(clock) - ticks / os.sysconf("SC_CLK_TCK")
