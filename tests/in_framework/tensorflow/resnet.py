"""ResNet in TensorFlow: network, precisions, warm-up, micro-batches, overflow."""

import functools
import os
from functools import partial

import numpy as np
import pytest

from benchmarks.common.frameworks import tensorflow
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet.tensorflow import model, optimizer, train
from benchmarks.resnet.tensorflow.config import Config
from tests.in_framework import resnet
from tests.in_framework.waves import waves

import tensorflow as tf  # isort: skip

ALONE = Ranks(0, 1, 0, 1, "/CPU:0")
config_of = partial(resnet.config_of, Config, "NHWC")
tensorflow.start(config_of())


def batch_of():
    return tf.constant(2 * waves(8, 32, 32, 3), tf.float32), tf.constant(np.arange(8) * 3 % 10, tf.int32)


def built(factor=1.0, **changes):
    # A fresh training whose first convolution is multiplied by ``factor``, and its step as a graph.
    config = config_of(**changes)
    network = model.build(config)
    network.variables["stem.conv.weight"].assign(factor * network.variables["stem.conv.weight"])
    training = train.Training(network, optimizer.build(network.trained, config), config)
    return training, tf.function(partial(train.train_step, training), autograph=False)


def losses_of(step, *rates):
    return [float(step(*batch_of(), tf.constant(rate))) for rate in rates]


@functools.cache
def first_losses(**changes):
    return losses_of(built(**changes)[1], 0.01, 0.01, 0.01)


def relative_difference(losses):
    return max(abs(a - b) / b for a, b in zip(losses, first_losses()))


@pytest.mark.parametrize(
    ("changes", "low", "high"),
    [
        ({"seed": 2}, 1e-3, 1.0),
        ({"loss_scale": 128.0}, 0.0, 1e-5),
        ({"precision": "bf16"}, 1e-6, 0.05),
    ],
)
def test_effect_of_a_setting_on_the_losses(changes, low, high):
    assert low <= relative_difference(first_losses(**changes)) <= high


def test_a_warm_up_leaves_no_trace():
    # Nor does one in the middle of a run; steps with other rates are not traced again.
    training, step = built(warm_up_steps=2, optimizer="lars")
    train.warm_up(training, step)
    assert losses_of(step, 0.1, 0.2) == losses_of(built(optimizer="lars")[1], 0.1, 0.2)
    before = {name: variable.numpy() for name, variable in train._variables(training).items()}
    assert before["momenta/stem.conv.weight"].any()
    train.warm_up(training, step)
    assert all(np.array_equal(variable, before[name]) for name, variable in train._variables(training).items())
    assert step.experimental_get_tracing_count() == 1


class Frozen:
    # A network whose batch-norm has the running statistics.
    def __init__(self, network):
        self.network, self.trained = network, network.trained

    def __call__(self, images, training):
        return self.network(images, training=False)


def loss_and_gradients(**changes):
    training, _ = built(**changes)
    training.network = Frozen(training.network)
    loss, gradients = training.compiled(train.forward_backward, *batch_of())
    return np.concatenate([[loss.numpy()], *(gradient.numpy().ravel() for gradient in gradients)])


def check_micro_batches(**changes):
    changed, reference = loss_and_gradients(accumulation_steps=4, **changes), loss_and_gradients()
    assert np.linalg.norm(changed - reference) < 1e-5 * np.linalg.norm(reference)
    assert changed[0] == pytest.approx(reference[0], abs=1e-5)


def test_micro_batches_have_the_gradients_of_the_batch():
    check_micro_batches()


def test_an_overflow_ends_the_run():
    # It shows in what the step reports, which is read two steps later.
    _, step = built(loss_scale=float("inf"))
    losses = (step(*batch_of(), tf.constant(0.1)) for _ in range(10))
    assert resnet.end_of_overflow(tensorflow, ALONE, losses) == (3, "the loss is not finite at step 1: found nan")


@pytest.mark.parametrize(("visible", "expected"), [("3,5", "5"), ("3", "3")])
def test_a_rank_sees_one_gpu(monkeypatch, visible, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    tensorflow._show_one_gpu(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_zero_init_residual():
    variables = model.build(config_of(zero_init_residual=True)).variables
    zeroed = [name for name, variable in variables.items() if "gamma" in name and not variable.numpy().any()]
    assert zeroed == [f"stage{stage}.block{block}.norm2.gamma" for stage in (1, 2, 3, 4) for block in (1, 2)]
