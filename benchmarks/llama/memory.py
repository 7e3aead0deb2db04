"""Formula for the memory that a rank needs at least, to reject configurations that cannot fit; standard library only.

Tests compare it with the memory that PyTorch allocates.
"""

from typing import Any, List, NamedTuple

from benchmarks.common.config_checks import Misfit


class Weights(NamedTuple):
    """Number of weights per layer, per layer's experts, and outside the layers."""

    layer: int
    outside: int
    experts: int = 0


def weights_of(config: Any, vocabulary: int) -> Weights:
    shape = config.shape(vocabulary)
    inner = shape.width * 3 * shape.inner_width * max(1, shape.experts)
    attention = shape.width * 2 * (shape.queries + shape.keys) + (shape.heads if shape.sinks else 0)
    attention += 2 * shape.size if shape.qk_norm else 0
    layer = attention + inner + shape.width * (shape.experts + 2)
    return Weights(layer, shape.width * (2 * vocabulary + 1), inner if shape.experts else 0)


def size_of(config: Any) -> int:
    """Return the bytes per element in GEMMs and between GEMMs."""
    return 2 if config.precision == "bf16" else 4


def needed(
    config: Any, vocabulary: int, ranks: int, weight_bytes: float, activation_bytes: float, share_of: int = 1
) -> float:
    """Return the bytes that a rank needs at least in the backward pass of the head or of the last layer.

    Args:
        config: of either benchmark.
        vocabulary: rows of the embedding.
        ranks: of the run.
        weight_bytes: bytes of weights and optimizer state on the rank.
        activation_bytes: bytes per position that a layer saves for the backward pass.
        share_of: ranks that share a layer's experts.
    """
    size, weights = size_of(config), weights_of(config, vocabulary)
    positions = config.micro_batch_size * config.sequence_length / config.context_parallelism
    begins = config.layers * (config.width * size if config.recompute else activation_bytes)
    again = activation_bytes - config.width * size if config.recompute else 0
    # Logits and their gradients, in fp32
    logits = 2 * 4 * min(config.loss_rows or positions, positions) * vocabulary
    # FSDP prefetches the previous layer during a layer's backward pass, and keeps the weights outside the layers.
    gathered = (weights.layer - weights.experts * (1 - 1 / share_of)) * size if ranks > 1 else 0
    outside = weights.outside * size if ranks > 1 else 0
    head = gathered + positions * begins + logits
    last = 2 * gathered + positions * (begins + again)
    return weight_bytes + (outside + max(head, last)) / config.tensor_parallelism


def misfits(config: Any, needed: float, memory: float) -> List[Misfit]:
    """Return the misfit if ``memory`` bytes per rank are not sufficient, else an empty list."""
    if needed <= memory:
        return []
    smaller = ["recompute=true"] if not config.recompute else []
    smaller += ["a smaller micro_batch"] if config.micro_batch_size > 1 else []
    hint = f"take more ranks, or set {', '.join([*smaller, 'more tensor_parallelism'])}"
    return [(f"a rank needs {needed / 1e9:,.1f} GB at least", f"its memory, {memory / 1e9:,.1f} GB", hint)]
