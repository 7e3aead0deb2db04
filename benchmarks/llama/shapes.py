"""Sizes of the network, derived from the configuration; standard library only."""

from typing import NamedTuple


class Scaling(NamedTuple):
    """Llama 3.1's scaling of the rotary frequencies; factor 1: no scaling."""

    factor: float = 1.0
    low: float = 1.0  # turns in the old context below which a frequency is divided by the factor
    high: float = 4.0  # turns above which it stays
    context: int = 8192  # positions that were trained on before


class Shape(NamedTuple):
    """Network sizes."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    key_value_heads: int
    inner_width: int  # hidden size in the feed-forward network or in an expert
    rope_base: float
    scaling: Scaling
    epsilon: float  # of the norms
    head_size: int = 0  # 0: width / heads
    experts: int = 0  # per layer; 0: one feed-forward network
    chosen: int = 0  # experts per token
    gate: str = "silu"  # of the experts: a key of GATES in benchmarks/llama/pytorch/experts.py
    window: int = 0  # positions that every second layer attends to, from the first one on; 0: all
    qk_norm: bool = False  # RMSNorm of each head's queries and keys before RoPE, qk_layernorm of Megatron
    router_dtype: str = "fp32"  # of the router's GEMM: fp32 or bf16
    sinks: bool = False  # learnable attention sink per head: an additional logit in the softmax

    @property
    def size(self) -> int:
        """Return the head size."""
        return self.head_size or self.width // self.heads

    @property
    def queries(self) -> int:
        """Return the values of all heads' queries."""
        return self.size * self.heads

    @property
    def keys(self) -> int:
        """Return the values of all keys."""
        return self.size * self.key_value_heads

    def window_of(self, layer: int) -> int:
        """Return the positions that a layer attends to; 0: all."""
        return self.window if layer % 2 == 0 else 0
