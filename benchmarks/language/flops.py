"""Model FLOPs of BERT's encoder and of its heads: benchmarks/common/flops.py."""

from typing import Any, Iterable

from benchmarks.common.flops import TRAINING, product


def pretraining_flops(config: Any, vocabulary: int, lengths: Iterable[int], masked: int) -> float:
    """FLOPs of a training step on sequences of ``lengths`` tokens, of which ``masked`` words in all are predicted."""
    lengths = list(lengths)
    words = product(masked, config.width, config.width) + product(masked, config.width, vocabulary)
    follows = product(len(lengths), config.width, config.width) + product(len(lengths), config.width, 2)
    return TRAINING * (sum(_encoder(config, length) for length in lengths) + words + follows)


def answering_flops(config: Any, lengths: Iterable[int]) -> float:
    """FLOPs of a training step that finds an answer's start and end in each of the windows of ``lengths`` tokens."""
    return TRAINING * sum(_encoder(config, length) + product(length, config.width, 2) for length in lengths)


def _encoder(config: Any, length: int) -> float:
    width = config.width
    projections = product(length, width, 4 * width)  # queries, keys, values, output
    attention = 2 * product(length, width, length)  # scores, and the sum of the values
    return float(config.layers * (projections + attention + 2 * product(length, width, config.inner_width)))
