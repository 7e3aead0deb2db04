"""Three ranks of Minigo, of which the first two train and the last two play.

The gradients of the training ranks are averaged among them while the votes and sums of all ranks are under way, and all
ranks play their games of matches between; the models of two generations are evaluated by one compiled pass.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.common.frameworks import tensorflow
from benchmarks.minigo.tensorflow import generations, networks, train
from tests.in_framework.minigo import TINY, config_of

import tensorflow as tf  # isort: skip

LONG = True
RANKS = (3,)
STEPS = 20
CONFIG = config_of(**TINY, train_ranks=2, selfplay_ranks=2)
ranks = tensorflow.start(CONFIG)


def interruptible(batches):
    # As Run.interruptible: after each part all ranks vote on whether to stop
    votes = tensorflow.LaggedSums(ranks, "votes")
    for batch in batches:
        yield batch
        votes.send(None, False)
    votes.drain()


def total(values, expected):
    sums = tensorflow.total(values)
    assert sums[1] == expected
    return sums


def test_ranks_of_different_roles_train_and_evaluate_together(together, monkeypatch):
    compiled = []

    class Counted(networks.Evaluator):
        def __init__(self, *values):
            super().__init__(*values)
            compiled.append(self._pass)

    for module in (generations, networks):
        monkeypatch.setattr(module, "Evaluator", Counted)
    mine = train.build(CONFIG, ranks, {})
    assert (mine.trains, mine.plays) == (ranks.rank < 2, ranks.rank > 0)
    average = tf.function(mine.average)
    run = SimpleNamespace(
        config=CONFIG, ranks=ranks, output=together, saved={}, interruptible=interruptible, interrupted=False,
        total=total, open=lambda call: call(),
        register_state=lambda *_: None,
    )  # fmt: skip
    state = generations.Generations(mine, lambda *_: None, run)
    state.models.mkdir(exist_ok=True)
    for generation in (1, 2):
        for step in interruptible(range(STEPS)):
            if mine.trains:
                own = [tf.fill((64,), float(step + 10 * ranks.rank)), tf.fill((8, 8), float(ranks.rank))]
                assert [float(each.numpy().mean()) for each in average(own)] == [step + 5.0, 0.5]
        # What a trainer learned, and the others have not.
        for variable in mine.network.trained.values():
            variable.assign_add(tf.fill(variable.shape, 0.01 * generation if mine.trains else 9.0))
        mine.share()
        assert state._promote(generation)
        if ranks.rank == 0:
            mine.save_model(state._model(generation))
        tensorflow.barrier()
        rate = state._evaluate_model(generation, state.evaluate)["win_rate"]
        assert tensorflow.total([rate])[0] == pytest.approx(3 * rate), "every rank has the same result of a match"
    largest = max(float(np.abs(each.numpy()).max()) for each in mine.network.trained.values())
    assert largest < 9, "the weights of rank 0, not of the rank that does not train"
    assert tensorflow.total([largest])[0] == pytest.approx(3 * largest)
    graphs = [each.experimental_get_tracing_count() for each in compiled]
    assert graphs == [1, 1, 1], "the player, the network in training, and all saved models"
    tensorflow.finish()
