"""Model FLOPs of NeuMF: benchmarks/common/flops.py."""

from typing import Any

from benchmarks.common.flops import TRAINING, product


def training_flops(config: Any) -> float:
    """FLOPs of forward and backward pass per pair of user and item; embeddings have a gradient."""
    layers = sum(product(1, inputs, outputs) for outputs, inputs in zip(config.layers[1:], config.layers))
    return TRAINING * (layers + product(1, config.factors + config.layers[-1], 1))
