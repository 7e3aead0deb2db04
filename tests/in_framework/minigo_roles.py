"""Three ranks of Minigo, of which the first two train and the last two play: what they find, of each rank, as JSON.

The gradients of the training ranks are averaged among them while the votes and sums of all ranks are under way, and all
ranks play their games of matches between; the models of two generations are evaluated by one compiled pass.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.common.frameworks import tensorflow
from benchmarks.common.run import configuration
from benchmarks.minigo.tensorflow import evaluator, generations, train
from benchmarks.minigo.tensorflow.config import Config
from benchmarks.minigo.tensorflow.generations import Generations

import tensorflow as tf  # isort: skip

STEPS = 20
config = replace(configuration.load(Config, Path(sys.argv[1])), train_ranks=2, selfplay_ranks=2)
output = Path(sys.argv[2])
ranks = tensorflow.start(config)
mine = train.build(config, ranks, {})
average = tf.function(mine.average)
compiled: list[Any] = []


class Counted(evaluator.Evaluator):
    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        compiled.append(self._pass)


generations.Evaluator = evaluator.Evaluator = Counted  # type: ignore[misc]


def watch(batches: Any) -> Any:
    """As Run.watch: after each part all ranks vote on whether to stop."""
    votes = tensorflow.LaggedSums(ranks, "votes")
    for batch in batches:
        yield batch
        votes.send(None, False)
    votes.drain()


def total(values: Any, expected: int) -> list[float]:
    sums = tensorflow.total(values)
    assert sums[1] == expected
    return sums


run = SimpleNamespace(
    config=config, ranks=ranks, output=output, saved={}, watch=watch, total=total, interrupted=False,
    open=lambda call: call(), keep=lambda *_: None,
)  # fmt: skip
state = Generations(mine, lambda *_: None, run)  # type: ignore[arg-type]
if ranks.rank == 0:
    state.models.mkdir(exist_ok=True)
wrong = 0
wins: list[float] = []
for generation in (1, 2):
    for step in watch(range(STEPS)):
        if mine.trains:
            own = [tf.fill((64,), float(step + 10 * ranks.rank)), tf.fill((8, 8), float(ranks.rank))]
            means = [float(each.numpy().mean()) for each in average(own)]
            wrong += means != [step + 5.0, 0.5]
    # What a trainer learned, and the others have not.
    shift = 0.01 * generation if mine.trains else 9.0
    for variable in mine.network.trained.values():
        variable.assign_add(tf.fill(variable.shape, shift))
    mine.share()
    assert state._promote(generation)
    if ranks.rank == 0:
        mine.save_model(state._model(generation))
    tensorflow.barrier()
    wins.append((state._evaluate_model(generation, state.evaluate) or {})["win_rate"])
largest = max(float(np.abs(each.numpy()).max()) for each in mine.network.trained.values())
facts = [float(mine.trains), float(mine.plays), float(wrong), largest, *wins]
everyone = [facts if rank == ranks.rank else [0.0] * len(facts) for rank in range(ranks.size)]
found = np.reshape(tensorflow.total(np.ravel(everyone)), (ranks.size, -1)).tolist()
if ranks.rank == 0:
    graphs = [each.experimental_get_tracing_count() for each in compiled]
    print(json.dumps({"ranks": found, "graphs": graphs}))
tensorflow.finish()
