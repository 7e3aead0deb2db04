"""Formula for the memory of a rank, to reject configurations that do not fit; standard library only.

Tests compare what layers save with the memory that PyTorch allocates.
"""

from typing import Any, List, NamedTuple

from benchmarks.common.config_checks import Mismatch

# Ours, not measured on a GPU: CUDA's context, NCCL's buffers, and the fragments of PyTorch's allocator take the rest.
ALLOCATABLE = 0.95


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
    config: Any,
    vocabulary: int,
    ranks: int,
    *,
    state: float,
    gradients: float,
    activation_bytes: float,
    trains_weights: bool = True,
    share_of: int = 1,
) -> float:
    """Return the largest number of bytes that a rank allocates in a step, rounding and fragments left out.

    Largest are, in the order of the backward pass: the head, the last layer, the first layer, and the reduction of the
    weights outside the layers. Without accumulation the sums of gradients appear layer by layer, as activations vanish.

    Args:
        config: of either benchmark.
        vocabulary: rows of the embedding.
        ranks: of the run.
        state: bytes of weights and both moments, over all ranks.
        gradients: bytes of the sums of gradients in fp32, over all ranks.
        activation_bytes: bytes per position that a layer saves for the backward pass.
        trains_weights: not only adapters.
        share_of: ranks that share a layer's experts.
    """
    size, weights = size_of(config), weights_of(config, vocabulary)
    reduced = 2 if config.gradient_reduction == "bf16" else 4
    positions = config.micro_batch_size * config.sequence_length / config.context_parallelism
    recomputed = config.recomputed_layers
    input_bytes = config.width * size
    saved = positions * (recomputed * input_bytes + (config.layers - recomputed) * activation_bytes)
    last_layer = positions * (activation_bytes - input_bytes) if recomputed == config.layers else 0.0
    first_layer = positions * activation_bytes
    # Logits and their gradients, in fp32
    logits = 2 * 4 * min(config.loss_rows or positions, positions) * vocabulary
    # A single rank in fp32 is without FSDP, which casts, gathers and reduces.
    layer, outside, head = (
        weights.layer - weights.experts * (1 - 1 / share_of),
        weights.outside,
        vocabulary * config.width,
    )
    sharded = ranks > 1 or config.precision == "bf16"
    # FSDP prefetches the previous layer, keeps the weights outside the layers, and casts gradients to reduce them.
    gathered, local = (layer * size if sharded else 0, outside * size if sharded else 0)
    gradient, cast = (layer * size, layer * reduced) if trains_weights and sharded else (0, 0)
    head_gradient = head * size if trains_weights and sharded else 0
    reduction = outside * (size + reduced) if trains_weights and sharded else 0
    sums = gradients / ranks
    begin = (sums if config.accumulation > 1 else 0) + (local + saved) / config.tensor_parallelism
    moments = (
        begin + (head_gradient + gathered + logits) / config.tensor_parallelism,
        begin + (head_gradient + 2 * gathered + gradient + last_layer) / config.tensor_parallelism,
        sums + (local + head_gradient + gathered + gradient + cast + first_layer) / config.tensor_parallelism,
        sums + (local + reduction) / config.tensor_parallelism,
    )
    return state / ranks + max(moments)


def mismatches(config: Any, needed: float, memory: float) -> List[Mismatch]:
    """Return the mismatch if ``memory`` bytes per rank are not sufficient, else an empty list."""
    if needed <= ALLOCATABLE * memory:
        return []
    smaller = ["recompute=true or more recompute_layers"] if not config.recompute else []
    smaller += ["a smaller micro_batch"] if config.micro_batch_size > 1 else []
    hint = f"take more ranks, or set {', '.join([*smaller, 'more tensor_parallelism'])}"
    expected = f"{ALLOCATABLE:.0%} of its memory, {memory / 1e9:,.1f} GB"
    return [(f"a rank needs {needed / 1e9:,.1f} GB", expected, hint)]
