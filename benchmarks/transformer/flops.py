"""Model FLOPs of the Transformer, see benchmarks/common/flops.py. Attention counts all pairs, including masked ones."""

from typing import Any

from benchmarks.common.flops import TRAINING, product


def training_flops(config: Any, vocabulary_size: int, sentences: int, source: Any, target: Any) -> float:
    """Training step FLOPs for sentence pairs with ``source`` and ``target`` positions each."""
    width = config.width
    self_attention = [
        product(length, width, 4 * width) + 2 * product(length, width, length) for length in (source, target)
    ]
    inner = [2 * product(length, width, config.inner_width) for length in (source, target)]
    across = product(target, width, 2 * width) + product(source, width, 2 * width) + 2 * product(target, width, source)
    layers = config.layers * (sum(self_attention) + sum(inner) + across)
    return TRAINING * sentences * (layers + product(target, width, vocabulary_size))
