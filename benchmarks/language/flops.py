"""Model FLOPs of BERT's encoder and heads, see benchmarks/common/flops.py."""

from typing import Any, Iterable, List

import numpy as np

from benchmarks.common.flops import TRAINING, evenly, product


def pretraining_flops(config: Any, vocabulary: int, lengths: Iterable[int], masked: int) -> float:
    """FLOPs per training step on sequences of ``lengths`` tokens with ``masked`` predicted tokens in total."""
    lengths = list(lengths)
    mlm_head = product(masked, config.width, config.width) + product(masked, config.width, vocabulary)
    follows = product(len(lengths), config.width, config.width) + product(len(lengths), config.width, 2)
    return TRAINING * (sum(_encoder(config, length) for length in lengths) + mlm_head + follows)


def answering_flops(config: Any, lengths: Iterable[int]) -> float:
    """FLOPs per training step that predicts answer spans in windows of ``lengths`` tokens."""
    return TRAINING * sum(_encoder(config, length) + product(length, config.width, 2) for length in lengths)


def of_sample(config: Any, vocabulary: int, samples: Any) -> float:
    """Mean FLOPs of training on one of ``samples`` (arrays.Samples), estimated from a subset."""
    lengths, masked = _lengths(samples.offsets), _lengths(samples.masked_offsets)
    return pretraining_flops(config, vocabulary, lengths, sum(masked)) / len(lengths)


def of_window(config: Any, windows: Any) -> float:
    """Mean FLOPs of training on one of SQuAD's ``windows``, estimated from a subset."""
    lengths = _lengths(windows.offsets)
    return answering_flops(config, lengths) / len(lengths)


# Lengths for a subset of the sequences.
def _lengths(offsets: np.ndarray) -> List[int]:
    indices = evenly(len(offsets) - 1)
    return (offsets[1:][indices] - offsets[:-1][indices]).tolist()


def _encoder(config: Any, length: int) -> float:
    width = config.width
    projections = product(length, width, 4 * width)  # queries, keys, values, output
    attention = 2 * product(length, width, length)  # scores, and the sum of the values
    return float(config.layers * (projections + attention + 2 * product(length, width, config.inner_width)))
