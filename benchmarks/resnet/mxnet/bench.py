"""How fast the step is: synthetic data, real data, the input alone, beside a bare Gluon loop, in one run.

    $ python -m benchmarks.resnet.mxnet.bench --config config.json --data DATA

The bare loop is what MXNet's own tutorial would write: the same network and batch, mx.optimizer.SGD in a
gluon.Trainer, no Horovod, no reports. The kinds are measured in turn, several times; the median counts.
The last line of the output is the result as JSON.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Callable

import mxnet as mx
from mxnet import autograd, gluon

from benchmarks.common import configuration, horovod_mxnet
from benchmarks.common.benching import Loop, measure, parse_arguments
from benchmarks.common.metrics import MetricsStream
from benchmarks.common.progress import StepReports
from benchmarks.common.ranks import Ranks
from benchmarks.resnet.architecture import input_shape
from benchmarks.resnet.mxnet import model, optimizer
from benchmarks.resnet.mxnet.config import Config
from benchmarks.resnet.mxnet.data import Batch, training_input
from benchmarks.resnet.mxnet.progress import LossSums


def synthetic_batch(config: Config, context: mx.Context) -> Batch:
    """One batch of noise on the device."""
    dtype = "float16" if config.precision == "fp16" else "float32"
    images = mx.nd.random.uniform(shape=input_shape(config), ctx=context).astype(dtype)
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
    reports = StepReports(MetricsStream(Path("/dev/null"), 0), config, ranks.size, 1 << 30, LossSums())

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
            reports.add(step, loss.mean(), False, 0.01)
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


def main() -> int:
    arguments = parse_arguments(__doc__)
    config = configuration.load(Config, arguments.config)
    ranks = horovod_mxnet.start(config.device)
    batch = synthetic_batch(config, ranks.context)
    real = training_input(config, arguments.data, ranks)
    loops = {
        "bare": bare_loop(config, ranks.context, batch),
        "synthetic": training_loop(config, ranks, lambda: batch),
        "real": training_loop(config, ranks, real.next),
        "input": input_loop(real.next),
    }
    measured, input_share = measure(
        loops,
        config.batch_size,
        arguments.steps,
        arguments.repeats,
        "bare Gluon loop, synthetic data",
    )
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
