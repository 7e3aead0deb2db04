"""Batch order of the Transformer; benchmarks/translation/pytorch/batches.py builds the batches."""

from functools import lru_cache
from typing import Callable, Iterator

from benchmarks.common.run.ranks import Ranks
from benchmarks.transformer.pytorch.config import Config
from benchmarks.translation.arrays import DataSet
from benchmarks.translation.orders import Order, by_tokens, for_evaluation
from benchmarks.translation.pytorch.batches import SourceBatch, evaluation_batches


def order_of(config: Config, data: DataSet, ranks: Ranks) -> Callable[[int], Order]:
    # Return the function that creates an epoch's order.

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


def evaluation_input(config: Config, data: DataSet, ranks: Ranks) -> Iterator[SourceBatch]:
    order = for_evaluation(data.test.source.lengths, batch_size=config.eval_batch_size, ranks=ranks.size)
    return evaluation_batches(data.test.source, order, ranks)
