"""What is read of a point besides the times of steps: memory, the largest batch that fits, operators.

    from benchmarks.study.mxnet.readings import used_mib, seconds_by_stage
    print(used_mib(place.contexts), seconds_by_stage(training, lambda: train_step(training, batch)))

Memory of a GPU is what CUDA has in use on it (cudaMemGetInfo): that of the whole device, as NVML's is, with contexts
and other programs in it. That of a CPU is the process's resident memory.

Operators are timed by MXNet's own profiler and summed, so that those which run at the same time count each, and what
the host does between them counts nowhere: the sum is not the step. It parts FP from BP, which waits cannot do.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, List

import mxnet as mx

from benchmarks.study.mxnet.training import Batch, Training, synthetic

_MIB = 2**20
_LARGEST = 1 << 16
_FULL = ("out of memory", "memalloc failed", "alloc failed")  # what MXNet's allocators write into the error
_PROFILED = 2  # steps
# A copy between devices is a gradient's or a weight's; with records on GPUs, that of the images is among them.
_UPDATE = re.compile(r"sgd|kvstore|copy[cg]pu2[cg]pu|nccl|horovod|allreduce", re.IGNORECASE)
# The value that is set is the gradient with which the backward propagation begins.
_BACKWARD = re.compile(r"backward|setvalueop")


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


def largest_batch(training: Training, step: Callable[[Training, Batch], None]) -> Dict[str, Any]:
    """Return the largest batch of a device that trains a step, and the one that does not (None: none was tried)."""
    config, fits = training.config, 0
    batch = config.batch_size
    while batch <= _LARGEST:
        if not _fits(training, batch, step):
            return {"fits": fits, "does_not": batch}
        fits, batch = batch, 2 * batch
    return {"fits": fits, "does_not": None}


def _fits(training: Training, batch: int, step: Callable[[Training, Batch], None]) -> bool:
    config = training.config
    resized = replace(config, batch_size=batch)
    try:
        for _ in range(2):
            step(training._replace(config=resized), synthetic(resized, training.place))
        mx.nd.waitall()
    except mx.base.MXNetError as error:
        if any(each in str(error).lower() for each in _FULL):
            return False
        raise
    return config.device == "gpu" or resident_mib() <= config.memory_limit_mib


def stage_of(name: str) -> str:
    """Return fp, bp or wu for the name of an operator, or of several that MXNet runs as one, joined by commas."""
    if _UPDATE.search(name):
        return "wu"
    return "bp" if _BACKWARD.search(name.lower()) else "fp"


def seconds_by_stage(training: Training, step: Callable[[], Any]) -> Dict[str, float]:
    """Profile a few steps; return seconds of a step on one device of this process: fp, bp, wu."""
    mx.nd.waitall()
    # MXNet removes the file that it is given, whatever it is, before it writes the trace: a name of our own, never a
    # device such as /dev/null. It may still be writing it when the folder is removed.
    folder = tempfile.mkdtemp(prefix="encore-profile-")
    try:
        trace = str(Path(folder, "trace.json"))
        mx.profiler.set_config(profile_symbolic=True, profile_imperative=True, aggregate_stats=True, filename=trace)
        mx.profiler.set_state("run")
        for _ in range(_PROFILED):
            step()
        mx.nd.waitall()
        mx.profiler.set_state("stop")
        operators = json.loads(mx.profiler.dumps(reset=True, format="json"))["Time"].get("operator", {})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = {"fp": 0.0, "bp": 0.0, "wu": 0.0}
    for name, each in operators.items():
        found[stage_of(name)] += each["Total"] / 1000 / _PROFILED / len(training.place.contexts)
    return found
