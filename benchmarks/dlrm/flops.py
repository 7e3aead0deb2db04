"""Model FLOPs of DLRM: benchmarks/common/flops.py."""

from typing import Any, Sequence

from benchmarks.common.flops import TRAINING, product
from benchmarks.dlrm.blocks import NUMBERS


def training_flops(config: Any, tables: int) -> float:
    """FLOPs of forward and backward pass per row with ``tables`` categories. The gradient of the numbers is not
    computed.
    """
    width, vectors = config.bottom_mlp[-1], tables + 1
    bottom = (NUMBERS, *config.bottom_mlp)
    top = (width + vectors * (vectors - 1) // 2, *config.top_mlp)
    # The interaction is a full product of all vectors; half is used.
    forward = _layers(bottom) + product(vectors, width, vectors) + _layers(top)
    return TRAINING * forward - product(1, *bottom[:2])


def _layers(widths: Sequence[int]) -> float:
    return sum(product(1, inputs, outputs) for outputs, inputs in zip(widths[1:], widths))
