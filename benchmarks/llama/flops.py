"""Model FLOPs of Llama: benchmarks/common/flops.py."""

from typing import Any, Tuple

from benchmarks.common.flops import TRAINING, product


def training_flops(config: Any, vocabulary: int, length: int) -> float:
    """FLOPs of a training step on a sequence of ``length`` tokens.

    A token attends to itself and to those before it: of both products of the attention, half a square counts, and in a
    layer with a window the positions that are in it. Of the experts those count that a token is computed by.
    """
    return TRAINING * sum(forward_flops(config, vocabulary, length))


def forward_flops(config: Any, vocabulary: int, length: int) -> Tuple[float, float]:
    """FLOPs of a forward pass on a sequence: of products with weights, and of the attentions."""
    shape = config.shape(vocabulary)
    width = shape.width
    projections = product(length, width, shape.queries + 2 * shape.keys) + product(length, shape.queries, width)
    inner = max(1, shape.chosen) * 3 * product(length, width, shape.inner_width)
    products = shape.layers * (projections + inner + product(length, width, shape.experts))
    pairs = sum(attended(length, shape.window_of(layer)) for layer in range(shape.layers))
    return products + product(length, width, shape.vocabulary), 2 * product(pairs, shape.queries, 1)


def attended(length: int, window: int) -> float:
    """Return the pairs of positions that attend to each other, half of a square or of a window's first one."""
    keys_per_query = min(window or length, length)
    return keys_per_query * length - keys_per_query * keys_per_query / 2


def adapter_flops(config: Any, vocabulary: int, length: int) -> float:
    """FLOPs of a training step of LoRA on a sequence of ``length`` tokens.

    The weights are frozen: of a product's gradients only that by its input counts, and none before the first adapter.
    An attention and an adapter have both of theirs; no gradient reaches an adapter's input in the first layer.
    """
    products, attentions = forward_flops(config, vocabulary, length)
    shape = config.shape(vocabulary)
    width, keys = shape.width, shape.keys
    first = product(length, width, width + 2 * keys)
    down = product(length, width, config.lora_rank)
    adapters = 2 * down + product(length, config.lora_rank, 2 * width + 2 * keys)
    return 2 * products - first + TRAINING * (attentions + config.layers * adapters) - down
