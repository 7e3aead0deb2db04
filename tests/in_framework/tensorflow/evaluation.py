"""ResNet's evaluation in TensorFlow counts each image once on any number of ranks, all with the mean statistics."""

import numpy as np
import pytest

from benchmarks.common.frameworks import tensorflow
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet.inputs import EvaluationInput
from benchmarks.resnet.tensorflow import data, train
from benchmarks.resnet.tensorflow.config import Config
from tests.in_framework import resnet

RANKS = (1, 2)


def test_all_images_are_evaluated_with_the_mean_statistics(digits, together):
    # One of two ranks has 149 images, which are a batch more than the other's 148.
    config = resnet.config_of(Config, "NHWC", batch_size=37)
    run = resnet.run_of(config, tensorflow, digits, together)
    training = train.build(config, {})
    statistics = training.network.statistics
    fresh = [variable.numpy() for variable in statistics]
    # Ranks that saw other images have other statistics.
    for variable in statistics:
        variable.assign_add(0.5 * (2 * run.ranks.rank - run.ranks.size + 1) + 0.0 * variable)
    first, second = (
        train.evaluate(training, EvaluationInput(data, config, digits, run.ranks), run)["accuracy"] for _ in range(2)
    )
    for mine, new in zip(statistics, fresh):
        np.testing.assert_allclose(mine.numpy(), new, atol=1e-6)
    hits, whole = 0, EvaluationInput(data, config, digits, Ranks(0, 1, 0, 1, "/CPU:0"))
    for images, labels, valid in whole.one_pass():
        found = training.network(images, training=False).numpy().argmax(1)
        hits += int((found == labels.numpy())[:valid].sum())
    run.finish()
    assert whole.total == 297
    assert first == second == pytest.approx(hits / 297, abs=1 / 297)
