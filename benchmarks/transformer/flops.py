"""Model FLOPs of the Transformer: benchmarks/common/flops.py. Attention counts all pairs, also masked ones."""

from typing import Any

from benchmarks.common.flops import TRAINING, product


def training_flops(config: Any, words: int, sentences: int, source: Any, target: Any) -> float:
    """FLOPs of a training step on pairs of ``source`` and ``target`` positions each, with a vocabulary of ``words``."""
    width = config.width
    own = [product(length, width, 4 * width) + 2 * product(length, width, length) for length in (source, target)]
    inner = [2 * product(length, width, config.inner_width) for length in (source, target)]
    across = product(target, width, 2 * width) + product(source, width, 2 * width) + 2 * product(target, width, source)
    layers = config.layers * (sum(own) + sum(inner) + across)
    return TRAINING * sentences * (layers + product(target, width, words))
