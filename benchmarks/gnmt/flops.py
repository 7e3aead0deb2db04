"""Model FLOPs of GNMT: benchmarks/common/flops.py."""

from typing import Any

from benchmarks.common.flops import TRAINING, product

GATES = 4


def training_flops(config: Any, vocabulary_size: int, sentences: int, source: Any, target: Any) -> float:
    """Training step FLOPs for sentence pairs with ``source`` and ``target`` positions each."""
    width = config.width

    def lstm(positions: int, inputs: int) -> float:
        return product(positions, inputs + width, GATES * width)

    encoder = 2 * lstm(source, width) + lstm(source, 2 * width) + (config.layers - 2) * lstm(source, width)
    decoder = lstm(target, width) + (config.layers - 1) * lstm(target, 2 * width)
    projections = product(source, width, width) + product(target, width, width)
    # The normalized vector times the tanh of all pairs of positions, and the weighted sum of the context.
    attention = product(source * target, width, 1) + product(target, source, width)
    return (
        TRAINING * sentences * (encoder + decoder + projections + attention + product(target, width, vocabulary_size))
    )
