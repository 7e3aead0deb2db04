"""How fast the step is: synthetic data, real data, the input alone, beside a bare Gluon loop, in one run.

    $ python -m benchmarks.resnet.mxnet.bench --config config.json --data DATA

The bare loop is what MXNet's own tutorial would write: the same network and batch, mx.optimizer.SGD in a
gluon.Trainer, no Horovod, no reports. The kinds are measured in turn, several times; the median counts.
The last line of the output is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import mxnet as mx
from mxnet import autograd, gluon

from benchmarks.common import configuration, horovod_mxnet
from benchmarks.common.metrics import MetricsStream
from benchmarks.common.ranks import Ranks
from benchmarks.resnet.mxnet import model, optimizer
from benchmarks.resnet.mxnet.config import Config
from benchmarks.resnet.mxnet.data import Batch, TrainingInput
from benchmarks.resnet.mxnet.progress import StepReports

TITLES = {
    "bare": "bare Gluon loop, synthetic data",
    "synthetic": "training step, synthetic data",
    "real": "training step, real data",
    "input": "input pipeline alone",
}
Loop = Callable[[int], float]
"""Does so many steps and returns the share of the time that it waited for data."""


def synthetic_batch(config: Config, context: mx.Context) -> Batch:
    """One batch of noise on the device."""
    dtype = "float16" if config.precision == "fp16" else "float32"
    images = mx.nd.random.uniform(shape=model.input_shape(config), ctx=context).astype(dtype)
    labels = mx.nd.random.randint(0, config.num_classes, shape=(config.batch_size,), ctx=context)
    return images, labels.astype("float32")


def bare_loop(config: Config, context: mx.Context, batch: Batch) -> Loop:
    """The same network and batch in a plain Gluon loop."""
    network = model.build(config)
    model.initialize(network, config, context)
    loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
    loss_function.hybridize(static_alloc=True, static_shape=True)
    arguments = {"learning_rate": 0.01, "momentum": config.momentum, "wd": config.weight_decay}
    arguments["multi_precision"] = config.precision == "fp16"
    trainer = gluon.Trainer(network.collect_params(), "sgd", arguments, kvstore=None)

    def steps(count: int) -> float:
        for _ in range(count):
            with autograd.record():
                loss = loss_function(network(batch[0]), batch[1])
            loss.backward()
            trainer.step(config.batch_size)
        mx.nd.waitall()
        return 0.0

    return steps


def training_loop(config: Config, ranks: Ranks, next_batch: Callable[[], Batch]) -> Loop:
    """The step of train.py with its reports, on batches of ``next_batch``."""
    network = model.build(config)
    model.initialize(network, config, ranks.context)
    loss_function = model.SmoothedLoss(config.label_smoothing)
    loss_function.hybridize(static_alloc=True, static_shape=True)
    trainer = optimizer.build_trainer(network.collect_params(), config)
    loss_scale = mx.nd.full((config.batch_size,), config.loss_scale, ctx=ranks.context)
    reports = StepReports(MetricsStream(Path("/dev/null"), 0), config, ranks.size, 1 << 30)

    def steps(count: int) -> float:
        started = time.time()
        waited = 0.0
        for step in range(count):
            trainer.set_learning_rate(0.01)
            before = time.time()
            images, labels = next_batch()
            waited += time.time() - before
            with autograd.record():
                loss = loss_function(network(images), labels)
            loss.backward(loss_scale)
            trainer.step(config.batch_size * config.loss_scale)
            reports.add(step, loss, False, 0.01)
        mx.nd.waitall()
        return waited / (time.time() - started)

    return steps


def input_loop(next_batch: Callable[[], Batch]) -> Loop:
    """The input without a network."""

    def steps(count: int) -> float:
        for _ in range(count):
            next_batch()
        mx.nd.waitall()
        return 1.0

    return steps


def measure(loops: Dict[str, Loop], config: Config, steps: int, repeats: int) -> Tuple[Dict[str, Any], float]:
    """Samples per second of each loop, measured in turn, and the share of waiting with real data."""
    speeds: Dict[str, List[float]] = {name: [] for name in loops}
    shares = []
    for loop in loops.values():
        loop(3)  # compile, fill the pipelines
    for number in range(repeats):
        for name, loop in loops.items():
            started = time.time()
            share = loop(steps)
            speeds[name].append(steps * config.batch_size / (time.time() - started))
            if name == "real":
                shares.append(share)
        print(f"measurement {number + 1} of {repeats} done", file=sys.stderr)
    measured = {}
    for name, values in speeds.items():
        # Each against the bare loop of its own turn: the machine's speed drifts.
        ratios = [value / bare for value, bare in zip(values, speeds["bare"])]
        measured[name] = {
            "title": TITLES[name],
            "median": statistics.median(values),
            "least": min(values),
            "most": max(values),
            "ratio": statistics.median(ratios),
        }
    return measured, statistics.median(shares)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (JSON)")
    parser.add_argument("--data", type=Path, required=True, help="folder of train.rec and train.idx")
    parser.add_argument("--steps", type=int, default=20, help="steps of a measurement")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each kind")
    arguments = parser.parse_args()
    config = configuration.load(Config, arguments.config)
    ranks = horovod_mxnet.start(config.device)
    batch = synthetic_batch(config, ranks.context)
    real = TrainingInput(config, arguments.data, ranks)
    loops = {
        "bare": bare_loop(config, ranks.context, batch),
        "synthetic": training_loop(config, ranks, lambda: batch),
        "real": training_loop(config, ranks, real.next),
        "input": input_loop(real.next),
    }
    measured, input_share = measure(loops, config, arguments.steps, arguments.repeats)
    title = (
        f"ResNet-{config.depth}, {config.image_size} x {config.image_size}, batch {config.batch_size}, "
        f"{config.precision}, {config.layout}, one {config.device}"
    )
    result = {"title": title, "measured": measured, "input_share": input_share, "device": config.device}
    horovod_mxnet.finish()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
