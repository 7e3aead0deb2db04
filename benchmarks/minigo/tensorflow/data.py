"""TensorFlow's end of the input: batches of positions as tensors, and the data set's held-out moves."""

from typing import Any, Iterator, NamedTuple, Tuple

import numpy as np
import tensorflow as tf

from benchmarks.common.run.ranks import Ranks
from benchmarks.minigo import examples, models
from benchmarks.minigo.examples import Examples, GoGames
from benchmarks.minigo.schedule import share
from benchmarks.minigo.tensorflow.config import Config

Batch = Tuple[tf.Tensor, tf.Tensor, tf.Tensor]  # Planes (batch, N, N, planes), policy (batch, moves) and value (batch,)


class Positions(NamedTuple):
    local: Examples  # Empty on a rank that does not train
    steps: int  # The same on every rank


def batches(config: Config, positions: Positions, generator: Any) -> Iterator[Batch]:
    """Yield the batches of all steps, with random symmetries from ``generator``."""
    for first in range(0, positions.steps * config.batch_size, config.batch_size):
        part = Examples(*(array[first : first + config.batch_size] for array in positions.local))
        yield as_tensors(examples.turned(part, generator))


def as_tensors(part: Examples) -> Batch:
    return tf.constant(part.planes), tf.constant(part.policy), tf.constant(part.value)


def supervised(config: Config, games: GoGames, part: int, parts: int) -> Iterator[Batch]:
    """Yield endless random batches of the data set's games for one of ``parts`` ranks, for the supervised start."""
    positions, generator = games.positions(held_out=False), np.random.RandomState((config.seed + 1) % 2**32)
    while True:
        batch = positions[generator.randint(0, len(positions), config.batch_size * parts)]
        yield as_tensors(examples.turned(examples.build(games, batch[part::parts], config), generator))


def held_out(config: Config, games: GoGames, ranks: Ranks) -> Tuple[Iterator[Tuple[tf.Tensor, Any, int]], int]:
    """Return this rank's batches of held-out positions with played moves and number of valid positions, and the total.

    All ranks have the same number of batches; the last batches may be padded.
    """
    positions = games.positions(held_out=True)
    part_range = share(len(positions), ranks.rank, ranks.size)
    local = positions[part_range.start : part_range.stop]
    longest = -(-len(positions) // ranks.size)

    def one_pass() -> Iterator[Tuple[tf.Tensor, Any, int]]:
        for first in range(0, longest, config.eval_batch_size):
            part = local[first : first + config.eval_batch_size]
            filled = np.resize(part if len(part) else positions[:1], (config.eval_batch_size, 2))
            filled[: len(part)] = part
            batch = examples.build(games, filled, config)
            yield tf.constant(batch.planes), batch.policy.argmax(axis=1), len(part)

    return one_pass(), len(positions)


def synthetic_batch(config: Config) -> Tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    generator, size = np.random.RandomState(config.seed % 2**32), config.board_size
    planes = generator.randint(0, 2, (config.batch_size, size, size, models.PLANES[config.features]))
    policy = generator.dirichlet(np.ones(size**2 + 1), config.batch_size)
    value = generator.choice([-1.0, 1.0], config.batch_size)
    return tf.constant(planes, tf.uint8), tf.constant(policy, tf.float32), tf.constant(value, tf.float32)
