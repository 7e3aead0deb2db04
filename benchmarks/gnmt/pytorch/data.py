"""Batch order and layout of GNMT; benchmarks/translation/pytorch/batches.py builds the batches."""

from functools import lru_cache, partial
from typing import Callable, Iterator

from benchmarks.common.run.ranks import Ranks
from benchmarks.gnmt.pytorch.config import Config
from benchmarks.translation import orders
from benchmarks.translation.arrays import DataSet
from benchmarks.translation.pytorch.batches import Shape, SourceBatch, evaluation_batches

MULTIPLES = {"fp16": 8, "bf16": 8}  # batch positions are padded to a multiple, for tensor cores


def order_of(config: Config, data: DataSet, ranks: Ranks) -> Callable[[int], orders.Order]:
    rule: Callable[..., orders.Order] = partial(orders.by_sentences, buckets=config.buckets)
    if config.batching != "buckets":
        rule = partial(orders.by_shards, shard_size=config.shard_size if config.batching == "shards" else 0)
    size = {"batch_size": config.batch_size, "ranks": ranks.size, "longest": config.max_length_train}

    @lru_cache(maxsize=2)
    def of_epoch(epoch: int) -> orders.Order:
        return rule(data.train.source.lengths, data.train.target.lengths, **size, seed=config.seed, epoch=epoch)

    return of_epoch


def evaluation_input(config: Config, data: DataSet, ranks: Ranks) -> Iterator[SourceBatch]:
    order = orders.for_evaluation(data.test.source.lengths, batch_size=config.eval_batch_size, ranks=ranks.size)
    return evaluation_batches(data.test.source, order, ranks, shape(config))


def shape(config: Config) -> Shape:
    # Return how batches are laid out: GNMT's source has a BOS.
    return Shape(source_bos=True, multiple=config.length_multiple or MULTIPLES.get(config.precision, 1))
