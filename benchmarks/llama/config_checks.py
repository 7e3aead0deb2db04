"""Derived values and checks of the Llama configurations; standard library only."""

from typing import Any, Dict, List, Tuple

from benchmarks.common.config_checks import Manifest, Mismatch


class Derived:
    """Properties of the three configurations, from their fields, and values of fields that one of them lacks."""

    tensor_parallelism = context_parallelism = expert_parallelism = 1
    fp8, attention = "none", "default"
    eod_mask_loss = False
    lower_is_better = True  # a loss reaches its target from above

    @property
    def group(self: Any) -> int:
        # Ranks that share a sample: a data-parallel rank.
        return int(self.tensor_parallelism * self.context_parallelism)

    @property
    def micro_batch_size(self: Any) -> int:
        # Samples per micro-batch: a divisor of the samples per step.
        most = min(self.micro_batch, self.batch_size)
        return next(size for size in range(most, 0, -1) if self.batch_size % size == 0)

    @property
    def accumulation(self: Any) -> int:
        # Micro-batches of a step.
        return int(self.batch_size // self.micro_batch_size)

    @property
    def recomputed_layers(self: Any) -> int:
        # Layers with activation checkpointing, from the first on.
        return int(self.layers if self.recompute else self.recompute_layers)

    def global_batch(self: Any, ranks: int) -> int:
        # Samples per step of all ranks.
        return int(self.batch_size * (ranks // self.group))

    @property
    def communicates(self: Any) -> str:
        # The lowest precision between ranks: FSDP gathers the weights in that of the GEMMs.
        return "bf16" if "bf16" in (self.precision, self.gradient_reduction) else "fp32"

    @property
    def targets(self: Any) -> Dict[str, float]:
        # Target of each quality, by the names of benchmark.toml.
        return {"log_perplexity": self.quality_target}


def problems(config: Any) -> List[Tuple[str, bool]]:
    """Return problems of the shape, the schedule and the parallelism, with a flag for each."""
    shape, parts = config.shape(1), 2 * config.context_parallelism
    uneven = not shape.head_size and config.width % config.heads != 0
    has_cudnn = config.device == "gpu" and config.precision == "bf16"
    return [
        (f"width={config.width} must be a multiple of heads={config.heads}", uneven),
        (f"a head of {shape.size} values has no pairs: they must be even", shape.size % 2 != 0),
        (
            f"heads={config.heads} must be a multiple of key_value_heads={config.key_value_heads}",
            config.heads % config.key_value_heads != 0,
        ),
        (
            "attention=cudnn requires device=gpu and precision=bf16: set attention=auto",
            config.attention == "cudnn" and not has_cudnn,
        ),
        ("warmup_steps must be below max_steps", config.warmup_steps >= config.max_steps),
        ("end_learning_rate must not be above learning_rate", config.end_learning_rate > config.learning_rate),
        (
            f"tensor_parallelism={config.tensor_parallelism} must divide key_value_heads={config.key_value_heads} and "
            f"inner_width={config.inner_width}",
            any(size % config.tensor_parallelism for size in (config.key_value_heads, config.inner_width)),
        ),
        (
            f"sequence_length={config.sequence_length} must be a multiple of 2 * context_parallelism * "
            f"tensor_parallelism = {parts * config.tensor_parallelism}",
            config.group > 1 and config.sequence_length % (parts * config.tensor_parallelism) != 0,
        ),
        ("beta1 and beta2 must be in 0..1", not (0 <= config.beta1 < 1 and 0 <= config.beta2 < 1)),
    ]


def problems_of_fp8(config: Any) -> List[Tuple[str, bool]]:
    """Return shapes that FP8 GEMMs do not support, with a flag for each."""
    keys, fp8 = config.shape(1).keys, config.fp8 != "none"
    shares = (
        config.sequence_length % (16 * config.context_parallelism),
        config.inner_width % (16 * config.tensor_parallelism),
        keys % (16 * config.tensor_parallelism),
    )
    return [
        ("fp8 requires precision=bf16 outside the GEMMs", fp8 and config.precision != "bf16"),
        (
            f"fp8 needs shares of 16: sequence_length={config.sequence_length} a multiple of 16 * context_parallelism, "
            f"inner_width={config.inner_width} and the width of all key_value_heads, {keys}, of 16 * "
            f"tensor_parallelism",
            fp8 and any(shares),
        ),
        (
            f"fp8=scaled_mm_head needs loss_rows={config.loss_rows} to be a multiple of 16",
            config.fp8 == "scaled_mm_head" and config.loss_rows % 16 != 0,
        ),
    ]


def text_mismatches(config: Any, manifest: Manifest) -> List[Mismatch]:
    """Return a data set's parts that are shorter than a sample."""
    expected, hint = f"more than {config.sequence_length:,}", "set a shorter sequence_length, or take more text"
    tokens = manifest["facts"]["tokens"]
    short = [part for part in ("train", "test") if tokens[part] <= config.sequence_length]
    return [(f"{tokens[part]:,} tokens in the {part} part", expected, hint) for part in short]


def rank_mismatches(config: Any, ranks: int) -> List[Mismatch]:
    """Return why the number of ranks does not fit; empty if it does."""
    expected = f"a multiple of the {config.group} that share a sample (tensor_parallelism * context_parallelism)"
    hint = "use another number of ranks, or set these keys"
    return [(f"{ranks} ranks", expected, hint)] if ranks % config.group else []
