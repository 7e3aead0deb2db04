"""Model FLOPs of training on a data set's pairs of sentences, in the mean: benchmarks/common/flops.py."""

from typing import Any, Callable

import numpy as np

from benchmarks.common.flops import evenly
from benchmarks.translation.arrays import DataSet
from benchmarks.translation.orders import Order


def of_pair(training_flops: Callable[..., Any], config: Any, data: DataSet, order: Order) -> float:
    """Mean FLOPs per sentence pair with the formula ``training_flops``, estimated from a subset of the pairs in
    ``order``.
    """
    indices = order.sentences[evenly(len(order.sentences))]
    source, target = (side.lengths[indices].astype(np.float64) for side in (data.train.source, data.train.target))
    return float(np.mean(training_flops(config, data.vocabulary.size, 1, source, target)))


def of_position(training_flops: Callable[..., Any], config: Any, data: DataSet, order: Order, ranks: int) -> float:
    """An epoch's FLOPs per token position in the batches, with ``batch_size`` positions per rank and step."""
    pairs = len(order.sentences) * of_pair(training_flops, config, data, order)
    return pairs / (order.steps * config.batch_size * ranks)
