"""Measure one point of the study: a network on some devices by one way of communication.

    $ python -m benchmarks.study.mxnet.measure --config config.json --output OUT
    $ horovodrun -np 2 python -m benchmarks.study.mxnet.measure --config config.json --output OUT

Rank 0 writes OUT/measurement.json when all is measured, whole or not at all. Exit code 0: measured; 2: the
configuration cannot be measured here; else: failed."""

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
_FULL = ("out of memory", "memalloc failed", "alloc failed")  # what MXNet's allocators write into the error
_MOST_STEPS = 1000  # of a block
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
            step(training._replace(config=resized), synthetic(resized, training.process))
        mx.nd.waitall()
    except mx.base.MXNetError as error:
        if any(marker in str(error).lower() for marker in _FULL):
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
    stages = {"fp": 0.0, "bp": 0.0, "wu": 0.0}
    for name, totals in operators.items():
        stages[stage_of(name)] += totals["Total"] / 1000 / _PROFILED / len(training.process.contexts)
    return stages


def train_step(training: Training, batch: Batch) -> None:
    """Forward, backward and update, which nobody has waited for."""
    forward_backward(training, batch)
    weight_update(training)


def staged_step(training: Training, batch: Batch) -> Dict[str, float]:
    """Do one step with a wait after each stage; return seconds of the stages and of the whole, each by its own clock.

    The wait keeps the update from beginning while the backward propagation runs: such a step may last longer than a
    plain one, and the difference is what the overlap of the two hides.
    """
    mx.nd.waitall()
    began = time.perf_counter()
    fp_bp = seconds_of(lambda: forward_backward(training, batch), 1, mx.nd.waitall)
    wu = seconds_of(lambda: weight_update(training), 1, mx.nd.waitall)
    step = time.perf_counter() - began
    after = seconds_of(lambda: metric(training, batch), 1, mx.nd.waitall)
    return {"fp_bp": fp_bp, "wu": wu, "step": step, "metric": after}


def time_steps(training: Training, next_batch: Callable[[], Batch]) -> Dict[str, Any]:
    """Return the times of steps: first step, blocks without waits, and steps with a wait after each stage."""
    config, process = training.config, training.process

    def block_of_steps(steps: int) -> float:
        return seconds_of(lambda: train_step(training, next_batch()), steps, mx.nd.waitall)

    first, warm = block_of_steps(1), block_of_steps(1)
    # Rank 0 decides: a rank with more steps than the others would wait for them for ever.
    steps = int(process.first_from_all(float(min(_MOST_STEPS, max(1, math.ceil(config.block_seconds / warm))))))
    blocks, staged = [], []
    for _ in range(config.blocks):
        blocks.append(block_of_steps(steps))
        staged.append([staged_step(training, next_batch()) for _ in range(min(steps, 3))])
    # One value a block, as for the steps: those within a block are alike, those of two blocks see the machine drift.
    stages = {name: [sum(times[name] for times in block) / len(block) for block in staged] for name in staged[0][0]}
    return {"first_step_seconds": first, "steps_per_block": steps, "step_seconds": blocks, "stages": stages}


def gather_values(values: List[float], training: Training) -> List[float]:
    """Return a value of each device, on every rank: of one process its own, of several one of each by rank."""
    process = training.process
    if process.processes == 1:
        return values
    from benchmarks.common.frameworks import mxnet

    row = [0.0] * process.processes
    row[process.rank] = values[0]
    return mxnet.total(row)


def measure(config: Config) -> Tuple[int, Dict[str, Any]]:
    """The rank, and what goes into the file."""
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
