"""Model FLOPs of Llama: benchmarks/common/flops.py."""

from typing import Any, Tuple

from benchmarks.common.flops import TRAINING, product


def training_flops(config: Any, vocabulary: int, length: int) -> float:
    """FLOPs per training step on a sequence of ``length`` tokens.

    Causal attention counts half of the square of positions, or the positions in the window. Only the experts that
    are selected for a token are counted.
    """
    return TRAINING * sum(forward_flops(config, vocabulary, length))


def forward_flops(config: Any, vocabulary: int, length: int) -> Tuple[float, float]:
    """FLOPs per forward pass on a sequence: GEMMs and attention."""
    shape = config.shape(vocabulary)
    width = shape.width
    projections = product(length, width, shape.queries + 2 * shape.keys) + product(length, shape.queries, width)
    inner = max(1, shape.chosen) * 3 * product(length, width, shape.inner_width)
    products = shape.layers * (projections + inner + product(length, width, shape.experts))
    pairs = sum(attended(length, shape.window_of(layer)) for layer in range(shape.layers))
    return products + product(length, width, shape.vocabulary), 2 * product(pairs, shape.queries, 1)


def attended(length: int, window: int) -> float:
    """Return the number of (query, key) pairs: half of the square, also within the first window."""
    keys_per_query = min(window or length, length)
    return keys_per_query * length - keys_per_query * keys_per_query / 2


def adapter_flops(config: Any, vocabulary: int, length: int) -> float:
    """FLOPs per LoRA training step on a sequence of ``length`` tokens.

    Frozen weights need only the gradient of the GEMM's input, from the first adapter on. Attention and adapters need
    both gradients; in the first layer, no gradient of the adapter's input.
    """
    products, attentions = forward_flops(config, vocabulary, length)
    shape = config.shape(vocabulary)
    width, keys = shape.width, shape.keys
    first = product(length, width, width + 2 * keys)
    down = product(length, width, config.lora_rank)
    adapters = 2 * down + product(length, config.lora_rank, 2 * width + 2 * keys)
    return 2 * products - first + TRAINING * (attentions + config.layers * adapters) - down
