"""The memory that a rank needs at least, by formula, so that what cannot fit is refused; standard library only.

Tests compare the formulas with what PyTorch keeps.
"""

from typing import Any, List, NamedTuple

from benchmarks.common.config_checks import Misfit


class Weights(NamedTuple):
    """How many weights a layer has, those of its experts among them, and all that is outside the layers."""

    layer: int
    outside: int
    experts: int = 0


def weights_of(config: Any, vocabulary: int) -> Weights:
    shape = config.shape(vocabulary)
    inner = shape.width * 3 * shape.inner_width * max(1, shape.experts)
    attention = shape.width * 2 * (shape.queries + shape.keys) + (shape.heads if shape.sinks else 0)
    layer = attention + inner + shape.width * (shape.experts + 2)
    return Weights(layer, shape.width * (2 * vocabulary + 1), inner if shape.experts else 0)


def size_of(config: Any) -> int:
    """Return the bytes of a number in GEMMs and between them."""
    return 2 if config.precision == "bf16" else 4


def needed(
    config: Any, vocabulary: int, ranks: int, weight_bytes: float, activation_bytes: float, share_of: int = 1
) -> float:
    """Return the bytes that a rank needs at least in a backward pass: in that of the head, or of the last layer.

    Args:
        config: Of either benchmark.
        vocabulary: Rows of the embedding.
        ranks: Of the whole run.
        held: Bytes of weights and of the optimizer's state on the rank.
        kept: Bytes that a layer keeps of a position for the backward pass.
        share_of: Ranks that have a layer's experts together.
    """
    size, weights = size_of(config), weights_of(config, vocabulary)
    positions = config.micro_batch_size * config.sequence_length / config.context_parallelism
    begins = config.layers * (config.width * size if config.recompute else activation_bytes)
    again = activation_bytes - config.width * size if config.recompute else 0
    # Logits and their gradients, in fp32
    logits = 2 * 4 * min(config.loss_rows or positions, positions) * vocabulary
    # FSDP gathers a layer while the one before is computed, and holds what is outside the layers.
    gathered = (weights.layer - weights.experts * (1 - 1 / share_of)) * size if ranks > 1 else 0
    outside = weights.outside * size if ranks > 1 else 0
    head = gathered + positions * begins + logits
    last = 2 * gathered + positions * (begins + again)
    return weight_bytes + (outside + max(head, last)) / config.tensor_parallelism


def misfits(config: Any, needed: float, memory: float) -> List[Misfit]:
    """Return why ``memory``, in bytes of a rank, does not do; empty if it does."""
    if needed <= memory:
        return []
    smaller = ["recompute=true"] if not config.recompute else []
    smaller += ["a smaller micro_batch"] if config.micro_batch_size > 1 else []
    hint = f"take more ranks, or set {', '.join([*smaller, 'more tensor_parallelism'])}"
    return [(f"a rank needs {needed / 1e9:,.1f} GB at least", f"its memory, {memory / 1e9:,.1f} GB", hint)]
