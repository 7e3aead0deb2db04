"""Three ranks of Minigo, of which the first two train and the last two play: gradients, and the weights of all."""

import numpy as np
import pytest

from benchmarks.common.frameworks import tensorflow
from benchmarks.minigo.tensorflow import train
from tests.in_framework.minigo import TINY, config_of

import tensorflow as tf  # isort: skip

LONG = True
RANKS = (3,)
CONFIG = config_of(**TINY, train_ranks=2, selfplay_ranks=2)
ranks = tensorflow.start(CONFIG)


def test_training_ranks_average_their_gradients_and_share_their_weights():
    mine = train.build(CONFIG, ranks, {})
    assert (mine.trains, mine.plays) == (ranks.rank < 2, ranks.rank > 0)
    # Votes of all ranks are under way at the same time, as in Run.interruptible.
    average, votes = tf.function(mine.average), tensorflow.LaggedSums(ranks, "votes")
    for step in range(20):
        if mine.trains:
            own = [tf.fill((64,), float(step + 10 * ranks.rank)), tf.fill((8, 8), float(ranks.rank))]
            assert [float(each.numpy().mean()) for each in average(own)] == [step + 5.0, 0.5]
        votes.send(None, False)
    votes.drain()
    # What a trainer learned, and the others have not.
    for variable in mine.network.trained.values():
        variable.assign_add(tf.fill(variable.shape, 0.01 if mine.trains else 9.0))
    mine.share()
    largest = max(float(np.abs(each.numpy()).max()) for each in mine.network.trained.values())
    assert largest < 9, "the weights of rank 0, not of the rank that does not train"
    assert tensorflow.total([largest])[0] == pytest.approx(3 * largest)
    tensorflow.finish()
