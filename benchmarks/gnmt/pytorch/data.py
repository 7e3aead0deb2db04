"""Which sentences make which batches, how those are laid out, and a batch of noise.

What builds the batches is in benchmarks/translation/pytorch/batches.py.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Callable, Iterator

import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.gnmt.pytorch.config import Config
from benchmarks.translation import orders
from benchmarks.translation.arrays import DataSet
from benchmarks.translation.orders import Order
from benchmarks.translation.pytorch.batches import Batch, Shape, SourceBatch, TrainingInput, evaluation_batches
from benchmarks.translation.vocabulary import BOS, EOS

MULTIPLES = {"fp16": 8, "bf16": 8}
"""Of the positions of a batch, as tensor cores want it."""


def order_of(config: Config, data: DataSet, ranks: Ranks) -> Callable[[int], Order]:
    """Return what makes the order of an epoch."""
    rule: Callable[..., Order] = partial(orders.by_sentences, buckets=config.buckets)
    if config.batching == "shards":
        rule = partial(orders.by_shards, shard_size=config.shard_size)
    size = {"batch_size": config.batch_size, "ranks": ranks.size, "longest": config.max_length_train}

    @lru_cache(maxsize=2)
    def of_epoch(epoch: int) -> Order:
        return rule(data.train.source.lengths, data.train.target.lengths, **size, seed=config.seed, epoch=epoch)

    return of_epoch


def training_input(
    config: Config, data: DataSet, order_of_epoch: Callable[[int], Order], ranks: Ranks, position: int
) -> TrainingInput:
    """Return this rank's batches from the step ``position`` on."""
    return TrainingInput(data.train, order_of_epoch, ranks, position, shape(config), config.prefetch)


def evaluation_input(config: Config, data: DataSet, ranks: Ranks) -> Iterator[SourceBatch]:
    """Yield this rank's share of the test sentences."""
    order = orders.for_evaluation(data.test.source.lengths, batch_size=config.eval_batch_size, ranks=ranks.size)
    return evaluation_batches(data.test.source, order, ranks, shape(config))


def shape(config: Config) -> Shape:
    """Return how batches are laid out: GNMT's source has a BOS."""
    return Shape(source_bos=True, multiple=MULTIPLES.get(config.precision, 1))


def synthetic_batch(config: Config, vocabulary: int, device: torch.device, length: int, sentences: int = 0) -> Batch:
    """One batch of noise with sides of ``length`` without padding, by default of a training step."""
    count = sentences or config.batch_size
    tokens = torch.randint(EOS + 1, vocabulary, (2, count, length), device=device)
    source, target = tokens.unbind()
    target_in = torch.cat((torch.full_like(target[:, :1], BOS), target[:, :-1]), 1)
    rows = torch.arange(target.numel(), device=device)
    lengths = torch.full((count,), length, device=device)
    return Batch(source, lengths, target_in, target, rows, target.numel(), target.numel(), count)
