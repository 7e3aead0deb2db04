"""Model FLOPs of Llama: benchmarks/common/flops.py."""

from typing import Any

from benchmarks.common.flops import TRAINING, product


def training_flops(config: Any, vocabulary: int, length: int) -> float:
    """FLOPs of a training step on a sequence of ``length`` tokens.

    A token attends to itself and to those before it: of both products of the attention, half a square counts.
    """
    width, size = config.width, config.width // config.heads
    keys = size * config.key_value_heads
    projections = product(length, width, width + 2 * keys) + product(length, width, width)
    attention = product(length, width, length)
    inner = 3 * product(length, width, config.inner_width)
    return TRAINING * (config.layers * (projections + attention + inner) + product(length, width, vocabulary))
