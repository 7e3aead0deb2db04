"""Measure one point of the study: a network on a number of devices with one communication method.

    $ python -m benchmarks.study.mxnet.measure --config config.json --output OUT
    $ horovodrun -np 2 python -m benchmarks.study.mxnet.measure --config config.json --output OUT

Rank 0 writes OUT/measurement.json atomically. Exit code 0: measured; 2: the configuration cannot be measured here;
otherwise failed.
"""

import argparse
import json
import math
import re
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import mxnet as mx

from benchmarks.common.data.problem import Problem
from benchmarks.common.run import configuration
from benchmarks.common.run.stopping import end_process
from benchmarks.common.run.timing import seconds_of
from benchmarks.study.mxnet.config import Config
from benchmarks.study.mxnet.training import (
    Batch,
    Training,
    batches,
    build,
    finish,
    forward_backward,
    metric,
    start,
    synthetic,
    weight_update,
)

_MIB = 2**20
_LARGEST = 1 << 16
_FULL = ("out of memory", "memalloc failed", "alloc failed")  # error messages of MXNet's allocators
_MOST_STEPS = 1000  # per block
_PROFILED = 2  # steps
# Copies between devices are gradients or weights; with records on GPUs, also images.
_UPDATE = re.compile(r"sgd|kvstore|copy[cg]pu2[cg]pu|nccl|horovod|allreduce", re.IGNORECASE)
# Sets the initial gradient of the backward pass.
_BACKWARD = re.compile(r"backward|setvalueop")


def used_mib(contexts: List[Any]) -> List[float]:
    """Return the used memory per device in MiB; a CPU process has one value for all contexts."""
    mx.nd.waitall()
    if contexts[0].device_type != "gpu":
        return [resident_mib()]
    used = []
    for context in contexts:
        free, total = mx.context.gpu_memory_info(context.device_id)
        used.append((total - free) / _MIB)
    return used


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def largest_batch(training: Training, step: Callable[[Training, Batch], None]) -> Dict[str, Any]:
    """Return the largest tested batch that fits, and the smallest that does not (None: limit not reached)."""
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
            step(training._replace(config=resized), synthetic(resized, training.process))
        mx.nd.waitall()
    except mx.base.MXNetError as error:
        if any(marker in str(error).lower() for marker in _FULL):
            return False
        raise
    return config.device == "gpu" or resident_mib() <= config.memory_limit_mib


def stage_of(name: str) -> str:
    """Return fp, bp or wu for an operator, or several fused ones joined by commas."""
    if _UPDATE.search(name):
        return "wu"
    return "bp" if _BACKWARD.search(name.lower()) else "fp"


def seconds_by_stage(training: Training, step: Callable[[], Any]) -> Dict[str, float]:
    """Profile a few steps; return seconds per step on one device of this process: fp, bp, wu."""
    mx.nd.waitall()
    # MXNet deletes an existing file before it writes the trace: use a new name, never a device such as /dev/null. It
    # may still be writing when the folder is removed.
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
    stages = {"fp": 0.0, "bp": 0.0, "wu": 0.0}
    for name, totals in operators.items():
        stages[stage_of(name)] += totals["Total"] / 1000 / _PROFILED / len(training.process.contexts)
    return stages


def train_step(training: Training, batch: Batch) -> None:
    """Forward, backward and update, asynchronous."""
    forward_backward(training, batch)
    weight_update(training)


def staged_step(training: Training, batch: Batch) -> Dict[str, float]:
    """Run one step with a wait after each stage; return seconds of the stages and of the step.

    The waits keep the update from overlapping with the backward pass: the difference to a plain step is the time
    hidden by this overlap.
    """
    mx.nd.waitall()
    began = time.perf_counter()
    fp_bp = seconds_of(lambda: forward_backward(training, batch), 1, mx.nd.waitall)
    wu = seconds_of(lambda: weight_update(training), 1, mx.nd.waitall)
    step = time.perf_counter() - began
    after = seconds_of(lambda: metric(training, batch), 1, mx.nd.waitall)
    return {"fp_bp": fp_bp, "wu": wu, "step": step, "metric": after}


def time_steps(training: Training, next_batch: Callable[[], Batch]) -> Dict[str, Any]:
    """Return step times: first step, blocks without waits, and steps with a wait after each stage."""
    config, process = training.config, training.process

    def block_of_steps(steps: int) -> float:
        return seconds_of(lambda: train_step(training, next_batch()), steps, mx.nd.waitall)

    first, warm = block_of_steps(1), block_of_steps(1)
    # Rank 0 decides: a rank with more steps would wait for the others forever.
    steps = int(process.first_from_all(float(min(_MOST_STEPS, max(1, math.ceil(config.block_seconds / warm))))))
    blocks, staged = [], []
    for _ in range(config.blocks):
        blocks.append(block_of_steps(steps))
        staged.append([staged_step(training, next_batch()) for _ in range(min(steps, 3))])
    # One value per block, as for the steps: values in a block are similar, different blocks show the drift of the
    # machine.
    stages = {name: [sum(times[name] for times in block) / len(block) for block in staged] for name in staged[0][0]}
    return {"first_step_seconds": first, "steps_per_block": steps, "step_seconds": blocks, "stages": stages}


def gather_values(values: List[float], training: Training) -> List[float]:
    """Return one value per device, on every rank: from one process, or one per rank."""
    process = training.process
    if process.processes == 1:
        return values
    from benchmarks.common.frameworks import mxnet

    row = [0.0] * process.processes
    row[process.rank] = values[0]
    return mxnet.total(row)


def measure(config: Config) -> Tuple[int, Dict[str, Any]]:
    """Return the rank and the measurement."""
    process = start(config)
    empty = used_mib(process.contexts)
    training = build(config, process)
    next_batch = batches(config, process)
    built = used_mib(process.contexts)
    result: Dict[str, Any] = {"schema": 1, "config": vars(config), "network": training.facts}
    if config.largest_batch:
        result["largest_batch"] = largest_batch(training, train_step)
    else:
        result.update(time_steps(training, next_batch))
        result["operators"] = seconds_by_stage(training, lambda: train_step(training, next_batch()))
        result["memory_read_by"] = "cudaMemGetInfo" if config.device == "gpu" else "VmRSS"
        result["memory_mib"] = {
            "empty": gather_values(empty, training),
            "before_training": gather_values(built, training),
            "training": gather_values(used_mib(process.contexts), training),
        }
    result["software"] = {"mxnet": mx.__version__, "python": sys.version.split()[0]}
    finish(config)
    return process.rank, result


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the point (JSON)")
    parser.add_argument("--output", type=Path, required=True, help="folder for measurement.json")
    arguments = parser.parse_args(argv)
    try:
        rank, result = measure(configuration.load(Config, arguments.config))
    except (Problem, ValueError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if rank == 0:
        temporary = arguments.output / ".measurement.json.writing"
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        temporary.replace(arguments.output / "measurement.json")
    return 0


if __name__ == "__main__":
    end_process(main)
