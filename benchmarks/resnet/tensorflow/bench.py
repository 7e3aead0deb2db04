"""How fast the step is: synthetic data, real data, the input alone, beside a bare loop, in one run.

    $ python -m benchmarks.resnet.tensorflow.bench --config config.json --data DATA

The bare loop is what a tutorial would write: keras.applications.ResNet50 (or 101, 152), Keras's cross-entropy and
SGD, gradients in one tf.function, compiled by XLA if config.xla; no Horovod, no reports. Keras has no ResNet-18
and 34: there it is this project's network with the same loss and optimizer. The kinds are measured in turn,
several times; the median counts. The last line of the output is the result as JSON.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Callable, List, Tuple

from benchmarks.common import configuration, horovod_tensorflow
from benchmarks.common.benching import Loop, measure, parse_arguments
from benchmarks.common.metrics import MetricsStream
from benchmarks.common.progress import StepReports
from benchmarks.resnet.architecture import input_shape
from benchmarks.resnet.tensorflow import model, optimizer, train
from benchmarks.resnet.tensorflow.config import Config
from benchmarks.resnet.tensorflow.data import Batch, training_input
from benchmarks.resnet.tensorflow.progress import LossSums

import tensorflow as tf  # isort: skip  # after horovod_tensorflow, which settles what it prints

KERAS_DEPTHS = (50, 101, 152)
KERAS_POLICIES = {"fp32": "float32", "tf32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


def synthetic_batch(config: Config) -> Batch:
    """One batch of noise on the device."""
    images = tf.random.uniform(input_shape(config), dtype=tf.float32)
    labels = tf.random.uniform((config.batch_size,), maxval=config.num_classes, dtype=tf.int32)
    return tf.cast(images, tf.float16 if config.precision == "fp16" else tf.float32), labels


def bare_network(config: Config) -> Tuple[Callable[[tf.Tensor], tf.Tensor], List[Any]]:
    """A network with its trained variables."""
    if config.depth not in KERAS_DEPTHS:
        network = model.build(config)
        return (lambda images: network(images, training=True)), list(network.trained.values())
    tf.keras.mixed_precision.set_global_policy(KERAS_POLICIES[config.precision])
    make = getattr(tf.keras.applications, f"ResNet{config.depth}")
    shape = input_shape(config)[1:]
    keras = make(weights=None, input_shape=shape, classes=config.num_classes, classifier_activation=None)
    return (lambda images: tf.cast(keras(images, training=True), tf.float32)), keras.trainable_variables


def bare_loop(config: Config, batch: Batch) -> Loop:
    """A plain loop over one batch."""
    network, variables = bare_network(config)
    sgd = tf.keras.optimizers.SGD(0.01, momentum=config.momentum)
    loss_function = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    sgd.build(variables)

    @tf.function(jit_compile=config.xla)
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_function(labels, network(images))
        sgd.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    def steps(count: int) -> float:
        for _ in range(count):
            loss = step(*batch)
        loss.numpy()
        return 0.0

    return steps


def training_loop(config: Config, ranks: int, next_batch: Callable[[], Batch]) -> Loop:
    """The step of train.py with its reports, on batches of ``next_batch``."""
    network = model.build(config)
    train_step = train.compile_step(network, optimizer.build(network.trained, config), config)
    reports = StepReports(MetricsStream(Path("/dev/null"), 0), config, ranks, 1 << 30, LossSums())

    def steps(count: int) -> float:
        started = time.time()
        waited = 0.0
        for step in range(count):
            before = time.time()
            images, labels = next_batch()
            waited += time.time() - before
            loss = train_step(images, labels, tf.constant(0.01))
            reports.add(step, loss, False, 0.01)
        loss.numpy()
        return waited / (time.time() - started)

    return steps


def input_loop(next_batch: Callable[[], Batch]) -> Loop:
    """The input without a network."""

    def steps(count: int) -> float:
        for _ in range(count):
            images, _ = next_batch()
        images.numpy()
        return 1.0

    return steps


def main() -> int:
    arguments = parse_arguments(__doc__)
    config = configuration.load(Config, arguments.config)
    ranks = horovod_tensorflow.start(config.device)
    tf.config.experimental.enable_tensor_float_32_execution(config.precision == "tf32")
    batch = synthetic_batch(config)
    real = training_input(config, arguments.data, ranks)
    loops = {
        "bare": bare_loop(config, batch),
        "synthetic": training_loop(config, ranks.size, lambda: batch),
        "real": training_loop(config, ranks.size, real.next),
        "input": input_loop(real.next),
    }
    name = f"keras.applications.ResNet{config.depth}" if config.depth in KERAS_DEPTHS else "the same network"
    measured, input_share = measure(
        loops,
        config.batch_size,
        arguments.steps,
        arguments.repeats,
        f"bare loop over {name}, synthetic data",
    )
    title = (
        f"ResNet-{config.depth}, {config.image_size} x {config.image_size}, batch {config.batch_size}, "
        f"{config.precision}, {config.layout}, {'XLA' if config.xla else 'no XLA'}, one {config.device}"
    )
    result = {"title": title, "measured": measured, "input_share": input_share, "device": config.device}
    horovod_tensorflow.finish()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
