"""Which sentences make which batches, how long they get, and a batch of noise.

What builds the batches is in benchmarks/translation/pytorch/batches.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Callable

import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.transformer.pytorch.config import Config
from benchmarks.translation.arrays import DataSet
from benchmarks.translation.orders import Order, by_tokens, for_evaluation
from benchmarks.translation.pytorch.batches import Batch
from benchmarks.translation.vocabulary import BOS, EOS


def order_of(config: Config, data: DataSet, ranks: Ranks) -> Callable[[int], Order]:
    """Return what gives the training batches of an epoch."""

    @lru_cache(maxsize=2)
    def of_epoch(epoch: int) -> Order:
        return by_tokens(
            data.train.source.lengths,
            data.train.target.lengths,
            tokens=config.batch_size,
            ranks=ranks.size,
            seed=config.seed,
            epoch=epoch,
            longest=config.max_length,
            length_multiple=config.length_multiple,
        )

    return of_epoch


def evaluation_order(config: Config, data: DataSet, ranks: Ranks) -> Order:
    """Return the batches of the test part."""
    return for_evaluation(data.test.source.lengths, batch_size=config.eval_batch_size, ranks=ranks.size)


def limit(config: Config, length: int) -> int:
    """Return the most tokens of a translation, EOS included, of a source of ``length`` tokens, EOS included."""
    return int(config.longest_factor * length) + config.longest_offset


def noise(config: Config, vocabulary: int, ranks: Ranks) -> Batch:
    """A batch as full as they come, of pairs of half the longest length."""
    length = max(2, config.max_length // 2)
    sentences = max(1, config.batch_size // length)
    generator = torch.Generator().manual_seed(config.seed)
    tokens = torch.randint(EOS + 1, vocabulary, (2, sentences, length), generator=generator)
    tokens[:, :, -1] = EOS
    target_in = tokens[1].roll(1, dims=1)
    target_in[:, 0] = BOS
    lengths = torch.full((sentences,), length)
    count = sentences * length
    arrays = (tokens[0], lengths, target_in, tokens[1], torch.arange(count))
    source, source_lengths, target_in, target_out, rows = (each.to(ranks.context) for each in arrays)
    places = (count, count * ranks.size, sentences * ranks.size)
    return Batch(source, source_lengths, target_in, target_out, rows, *places)
