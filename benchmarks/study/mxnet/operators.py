"""Seconds that the operators of a step take, by stage, from MXNet's own profiler.

    from benchmarks.study.mxnet.operators import seconds_by_stage
    print(seconds_by_stage(training, lambda: train_step(training, batch)))

Operators are summed, so that those which run at the same time count each, and what the host does between them counts
nowhere: the sum is not the step. It parts FP from BP, which waits cannot do.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict

import mxnet as mx

from benchmarks.study.mxnet.training import Training

STEPS = 2
"""That are profiled."""
_UPDATE = re.compile(r"sgd|kvstore|copy[cg]pu2[cg]pu|nccl|horovod|allreduce", re.IGNORECASE)
"""A copy between devices is a gradient's or a weight's; with records on GPUs, that of the images is among them."""
_BACKWARD = re.compile(r"backward|setvalueop")
"""The value that is set is the gradient with which the backward propagation begins."""


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
        for _ in range(STEPS):
            step()
        mx.nd.waitall()
        mx.profiler.set_state("stop")
        operators = json.loads(mx.profiler.dumps(reset=True, format="json"))["Time"].get("operator", {})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = {"fp": 0.0, "bp": 0.0, "wu": 0.0}
    for name, each in operators.items():
        found[stage_of(name)] += each["Total"] / 1000 / STEPS / len(training.place.contexts)
    return found
