"""Memory of each device: of a GPU what CUDA has in use on it; of a CPU the process's resident memory.

CUDA's figure (cudaMemGetInfo) is that of the whole device, as NVML's is: contexts and other programs are in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import mxnet as mx

_MIB = 2**20


def used_mib(contexts: List[Any]) -> List[float]:
    """Return what is in use on each device, in MiB; processes on CPUs have one value, whatever their contexts."""
    mx.nd.waitall()
    if contexts[0].device_type != "gpu":
        return [resident_mib()]
    found = []
    for context in contexts:
        free, total = mx.context.gpu_memory_info(context.device_id)
        found.append((total - free) / _MIB)
    return found


def read_by(contexts: List[Any]) -> str:
    """Return the name of what gives the figures."""
    return "cudaMemGetInfo" if contexts[0].device_type == "gpu" else "VmRSS"


def resident_mib() -> float:
    """Return the resident memory of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0
