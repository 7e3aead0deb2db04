"""Measure one point of the study: a network on some devices by one way of communication.

    $ python -m benchmarks.study.mxnet.measure --config config.json --output OUT
    $ horovodrun -np 2 python -m benchmarks.study.mxnet.measure --config config.json --output OUT

Rank 0 writes OUT/measurement.json when all is measured, whole or not at all. Exit code 0: measured; 2: the
configuration cannot be measured here; else: failed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import mxnet as mx

from benchmarks.common.data.problem import Problem
from benchmarks.common.run import configuration
from benchmarks.common.run.stopping import end_process
from benchmarks.common.run.timing import seconds_of
from benchmarks.study.mxnet import data, readings
from benchmarks.study.mxnet.config import Config
from benchmarks.study.mxnet.training import (
    Batch,
    Training,
    build,
    finish,
    forward_backward,
    metric,
    start,
    weight_update,
)

_MOST_STEPS = 1000  # of a block
Next = Callable[[], Batch]


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


def timed(training: Training, batches: Next) -> Dict[str, Any]:
    """Return the times of steps: first step, blocks without waits, and steps with a wait after each stage."""
    config, place = training.config, training.place

    def block_of_steps(steps: int) -> float:
        """Return seconds per step of a block without waits."""
        return seconds_of(lambda: train_step(training, batches()), steps, mx.nd.waitall)

    first, warm = block_of_steps(1), block_of_steps(1)
    # Rank 0 decides: a rank with more steps than the others would wait for them for ever.
    steps = int(place.first_from_all(float(min(_MOST_STEPS, max(1, math.ceil(config.block_seconds / warm))))))
    blocks, staged = [], []
    for _ in range(config.blocks):
        blocks.append(block_of_steps(steps))
        staged.append([staged_step(training, batches()) for _ in range(min(steps, 3))])
    # One value a block, as for the steps: those within a block are alike, those of two blocks see the machine drift.
    stages = {name: [sum(each[name] for each in block) / len(block) for block in staged] for name in staged[0][0]}
    return {"first_step_seconds": first, "steps_per_block": steps, "step_seconds": blocks, "stages": stages}


def gathered(values: List[float], training: Training) -> List[float]:
    """Return a value of each device, on every rank: of one process its own, of several one of each by rank."""
    place = training.place
    if place.processes == 1:
        return values
    from benchmarks.common.frameworks import mxnet

    row = [0.0] * place.processes
    row[place.rank] = values[0]
    return mxnet.total(row)


def measured(config: Config) -> Dict[str, Any]:
    """Measure; return what goes into the file."""
    place = start(config)
    before = readings.used_mib(place.contexts)
    training = build(config, place)
    batches = data.batches(config, place)
    built = readings.used_mib(place.contexts)
    found: Dict[str, Any] = {"schema": 1, "config": vars(config), "network": training.facts}
    if config.largest_batch:
        found["largest_batch"] = readings.largest_batch(training, train_step)
    else:
        found.update(timed(training, batches))
        found["operators"] = readings.seconds_by_stage(training, lambda: train_step(training, batches()))
        found["memory_read_by"] = readings.read_by(place.contexts)
        found["memory_mib"] = {
            "empty": gathered(before, training),
            "before_training": gathered(built, training),
            "training": gathered(readings.used_mib(place.contexts), training),
        }
    found["software"] = {"mxnet": mx.__version__, "python": sys.version.split()[0]}
    found["rank"] = place.rank
    finish(config)
    return found


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the point (JSON)")
    parser.add_argument("--output", type=Path, required=True, help="folder for measurement.json")
    arguments = parser.parse_args(argv)
    try:
        found = measured(configuration.load(Config, arguments.config))
    except (Problem, ValueError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if found.pop("rank") == 0:
        temporary = arguments.output / ".measurement.json.writing"
        temporary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        temporary.replace(arguments.output / "measurement.json")
    return 0


if __name__ == "__main__":
    end_process(main)
