"""Speed of training step and self-play compared with a bare loop and with inference, in one process.

    $ python -m benchmarks.minigo.tensorflow.bench --config config.json --data DATA

The bare loop follows Keras's tutorials: the same tower with Keras layers, gradients and SGD in a tf.function,
compiled by XLA if the step is; no Horovod, no reports. Self-play is measured in evaluated positions, and compared
with inference on full batches. The last line of the output is the result as JSON.
"""

import itertools
from functools import partial
from pathlib import Path
from typing import Any, Callable, List

import numpy as np

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import tensorflow
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.tensorflow.layers import use_keras_policy
from benchmarks.minigo import models
from benchmarks.minigo.engine import Games
from benchmarks.minigo.examples import GoGames
from benchmarks.minigo.flops import training_flops
from benchmarks.minigo.schedule import rules_of, search_of
from benchmarks.minigo.selfplay import batch_of, match_turn
from benchmarks.minigo.tensorflow import data as tensors
from benchmarks.minigo.tensorflow.config import Config
from benchmarks.minigo.tensorflow.data import Batch, synthetic_batch
from benchmarks.minigo.tensorflow.networks import Evaluator
from benchmarks.minigo.tensorflow.train import build, train_step

import tensorflow as tf  # isort: skip  # after frameworks.tensorflow, which settles what it prints and takes


def bare_network(config: Config) -> Any:
    layers = tf.keras.layers
    use_keras_policy(config.precision)

    def conv_norm(x: Any, filters: int, size: int) -> Any:
        x = layers.Conv2D(filters, size, padding="same", use_bias=False)(x)
        return layers.BatchNormalization(momentum=0.95, epsilon=1e-5)(x)

    size = config.board_size
    start = layers.Input((size, size, models.PLANES[config.features]))
    x = layers.ReLU()(conv_norm(start, config.conv_width, 3))
    for _ in range(config.trunk_layers):
        inner = layers.ReLU()(conv_norm(x, config.conv_width, 3))
        x = layers.ReLU()(x + conv_norm(inner, config.conv_width, 3))
    policy = layers.Flatten()(layers.ReLU()(conv_norm(x, models.POLICY_CHANNELS, 1)))
    value = layers.Flatten()(layers.ReLU()(conv_norm(x, models.VALUE_CHANNELS, 1)))
    hidden = layers.Dense(config.fc_width, activation="relu")(value)
    heads = [layers.Dense(size**2 + 1, dtype="float32")(policy), layers.Dense(1, "tanh", dtype="float32")(hidden)]
    return tf.keras.Model(start, heads)


def bare_step(config: Config, batch: Batch) -> Callable[[], Any]:
    network = bare_network(config)
    variables: List[Any] = network.trainable_variables
    sgd = tf.keras.optimizers.SGD(0.01, momentum=config.momentum)
    sgd.build(variables)
    regular = [variable for variable in variables if variable.shape.rank > 1]

    @tf.function(jit_compile=config.compiles)
    def step(planes: tf.Tensor, policy: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits, expected = network(tf.cast(planes, tf.float32), training=True)
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(policy, logits))
            loss += config.value_cost_weight * tf.reduce_mean(tf.square(expected[:, 0] - value))
            loss += config.l2_strength * tf.add_n([tf.nn.l2_loss(variable) for variable in regular])
        sgd.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    return partial(step, *batch)


def self_play(config: Config, evaluate: Evaluator) -> Callable[[], Any]:
    """Return a function that evaluates a full batch of positions in endless self-play."""
    games = Games(
        rules_of(config),
        [search_of(config)],
        config.concurrent_games,
        config.seed,
        threads=config.selfplay_threads,
    )
    evaluated = 0

    def count_evaluated(planes: Any) -> Any:
        nonlocal evaluated
        evaluated += len(planes)
        return evaluate(planes)

    turn: Callable[[], Any] = partial(match_turn, games, [count_evaluated], batch_of(config))

    def play() -> None:
        nonlocal evaluated
        evaluated = 0
        while evaluated < config.inference_batch:
            list(turn())

    return play


def prepare(config: Config, ranks: Ranks, data: Path) -> bench.Subject:
    batch, training = synthetic_batch(config), build(config, ranks, {})
    real = tensors.supervised(config, GoGames(data, config.board_size), 0, 1)
    graph = tf.function(partial(train_step, training), autograph=False)

    def step(batch: Batch) -> Any:
        return graph(*batch, tf.constant(bench.RATE))[0]

    evaluate = Evaluator(training.network, config.inference_batch)
    planes = np.resize(batch[0].numpy(), (config.inference_batch, *batch[0].shape[1:]))
    loops = {
        "bare": bench.repeated(bare_step(config, batch)),
        "synthetic": bench.training_loop(tensorflow, config, ranks, step, itertools.repeat(batch).__next__),
        "real": bench.training_loop(tensorflow, config, ranks, step, real.__next__),
        "input": bench.repeated(real.__next__),
        "evaluation": bench.repeated(partial(evaluate, planes)),
        "selfplay": bench.repeated(self_play(config, evaluate)),
    }
    titles = {"evaluation": "the network alone, full batches", "selfplay": "self-play, positions evaluated"}
    compiled = "XLA" if config.compiles else "no XLA"
    size = f"{config.board_size} x {config.board_size}, {config.trunk_layers} blocks of {config.conv_width}"
    title = f"Minigo {size}, {config.precision}, {compiled}, batch {config.batch_size}"
    samples = {"evaluation": config.inference_batch, "selfplay": config.inference_batch}
    flops = dict.fromkeys(("bare", "synthetic", "real"), config.batch_size * training_flops(config))
    return bench.Subject(title, config.batch_size, loops, titles, samples, {"selfplay": "evaluation"}, flops=flops)


if __name__ == "__main__":
    bench.main(__doc__, Config, tensorflow, prepare)
