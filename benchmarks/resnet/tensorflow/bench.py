"""Training speed with synthetic and real data, input speed, and a bare loop for comparison, in one process.

    $ python -m benchmarks.resnet.tensorflow.bench --config config.json --data DATA

The bare loop follows Keras's tutorials: keras.applications.ResNet50 (or 101, 152), Keras's cross-entropy and SGD,
gradients in a tf.function, compiled by XLA if the step is; no Horovod, no reports. Keras does not have ResNet-18 and
34: the network of this project is used with the same loss and optimizer. The last line of the output is the result
as JSON.
"""

from functools import partial
from pathlib import Path
from typing import Any, Callable, List, Tuple

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import tensorflow
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.tensorflow.layers import use_keras_policy
from benchmarks.resnet.architecture import bench_title, input_shape
from benchmarks.resnet.inputs import bench_subject
from benchmarks.resnet.tensorflow import data as tensors
from benchmarks.resnet.tensorflow import model
from benchmarks.resnet.tensorflow.config import Config
from benchmarks.resnet.tensorflow.data import Batch
from benchmarks.resnet.tensorflow.train import build, count_hits, train_step

import tensorflow as tf  # isort: skip  # after frameworks.tensorflow, which settles what it prints and takes

KERAS_DEPTHS = (50, 101, 152)


def bare_network(config: Config) -> Tuple[Callable[[tf.Tensor], tf.Tensor], List[Any]]:
    if config.depth not in KERAS_DEPTHS:
        network = model.build(config)
        return (lambda images: network(images, training=True)), list(network.trained.values())
    use_keras_policy(config.precision)
    make = getattr(tf.keras.applications, f"ResNet{config.depth}")
    shape = input_shape(config)[1:]
    keras = make(weights=None, input_shape=shape, classes=config.num_classes, classifier_activation=None)
    return (lambda images: tf.cast(keras(images, training=True), tf.float32)), keras.trainable_variables


def bare_step(config: Config, batch: Batch) -> Callable[[], Any]:
    network, variables = bare_network(config)
    sgd = tf.keras.optimizers.SGD(0.01, momentum=config.momentum)
    loss_function = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    sgd.build(variables)

    @tf.function(jit_compile=config.compiles)
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_function(labels, network(images))
        sgd.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    return partial(step, *batch)


def prepare(config: Config, ranks: Ranks, data: Path) -> bench.Subject:
    batch, evaluated = (tensors.synthetic_batch(config, size) for size in (0, config.eval_batch_size))
    training = build(config, {})
    name = f"keras.applications.ResNet{config.depth}" if config.depth in KERAS_DEPTHS else "the same network"
    return bench_subject(
        tensorflow,
        tensors,
        config,
        ranks,
        data,
        batch=batch,
        bare=bare_step(config, batch),
        step=partial(tf.function(partial(train_step, training), autograph=False), rate=tf.constant(bench.RATE)),
        evaluation=partial(training.compiled, count_hits, *evaluated, tf.constant(len(evaluated[1]))),
        titles=(
            bench_title(config, "XLA" if config.compiles else "no XLA"),
            f"bare loop over {name}, synthetic data",
        ),
    )


if __name__ == "__main__":
    bench.main(__doc__, Config, tensorflow, prepare)
