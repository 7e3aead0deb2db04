"""ResNet in TensorFlow on any number of ranks: weights that all of them have, and each image evaluated once."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from benchmarks.common.frameworks import tensorflow
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet.inputs import EvaluationInput
from benchmarks.resnet.tensorflow import data, train
from benchmarks.resnet.tensorflow.config import Config
from tests.in_framework import resnet

import tensorflow as tf  # isort: skip

LONG = True
RANKS = (1, 2)
# One of two ranks has 149 images, which are a batch more than the other's 148.
CONFIG = resnet.config_of(Config, "NHWC", batch_size=37)


@pytest.fixture(scope="module")
def run(digits, together):
    found = resnet.run_of(CONFIG, tensorflow, digits, together)
    yield found
    found.finish()


def test_ranks_have_the_same_weights_however_gradients_travel(run):
    # From rank 0's, whatever a rank drew; each gradient by itself, or in groups.
    found = []
    for settings in ({}, {"gradient_groups": 4}):
        config = dataclasses.replace(CONFIG, batch_size=8, seed=5 + run.ranks.rank, **settings)
        training, batch = train.build(config, {}), data.synthetic_batch(config)
        step = tf.function(partial(train.train_step, training))
        for _ in range(2):
            step(*batch, tf.constant(0.01))
        found.append(np.concatenate([each.numpy().ravel() for each in training.network.trained.values()]))
        assert tensorflow.total([float(found[-1][:100].sum())]) == [np.float32(found[-1][:100].sum()) * run.ranks.size]
    assert np.linalg.norm(found[1] - found[0]) < 1e-5 * np.linalg.norm(found[0])


def test_all_images_are_evaluated_with_the_mean_statistics(digits, run):
    training, ranks = train.build(CONFIG, {}), run.ranks
    fresh = [variable.numpy() for variable in training.network.statistics]
    # Ranks that saw other images have other statistics.
    for variable in training.network.statistics:
        variable.assign_add(0.5 * (2 * ranks.rank - ranks.size + 1) + 0.0 * variable)
    first, second = (
        train.evaluate(training, EvaluationInput(data, CONFIG, digits, ranks), run)["accuracy"] for _ in range(2)
    )
    for mine, new in zip(training.network.statistics, fresh):
        np.testing.assert_allclose(mine.numpy(), new, atol=1e-6)
    hits, whole = 0, EvaluationInput(data, CONFIG, digits, Ranks(0, 1, 0, 1, "/CPU:0"))
    for images, labels, valid in whole.one_pass():
        hits += int((training.network(images, training=False).numpy().argmax(1) == labels.numpy())[:valid].sum())
    assert whole.total == 297
    assert first == second == pytest.approx(hits / 297, abs=1 / 297)
