"""Model FLOPs of Llama: benchmarks/common/flops.py."""

from typing import Any, Tuple

from benchmarks.common.flops import TRAINING, product


def training_flops(config: Any, vocabulary: int, length: int) -> float:
    """FLOPs of a training step on a sequence of ``length`` tokens.

    A token attends to itself and to those before it: of both products of the attention, half a square counts.
    """
    return TRAINING * sum(forward_flops(config, vocabulary, length))


def forward_flops(config: Any, vocabulary: int, length: int) -> Tuple[float, float]:
    """FLOPs of a forward pass on a sequence: of products with weights, and of the attentions."""
    width, keys = config.width, config.width // config.heads * config.key_value_heads
    projections = product(length, width, width + 2 * keys) + product(length, width, width)
    inner = 3 * product(length, width, config.inner_width)
    products = config.layers * (projections + inner) + product(length, width, vocabulary)
    return products, config.layers * product(length, width, length)


def adapter_flops(config: Any, vocabulary: int, length: int) -> float:
    """FLOPs of a training step of LoRA on a sequence of ``length`` tokens.

    The weights are frozen: of a product's gradients only that by its input counts, and none before the first adapter.
    An attention and an adapter have both of theirs; no gradient reaches an adapter's input in the first layer.
    """
    products, attentions = forward_flops(config, vocabulary, length)
    width, keys = config.width, config.width // config.heads * config.key_value_heads
    first = product(length, width, width + 2 * keys)
    down = product(length, width, config.lora_rank)
    adapters = 2 * down + product(length, config.lora_rank, 2 * width + 2 * keys)
    return 2 * products - first + TRAINING * (attentions + config.layers * adapters) - down
