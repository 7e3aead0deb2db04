"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, an untied head (Grattafiori et al. 2024).

With experts, windows and sinks the same is gpt-oss (OpenAI 2025, arXiv 2508.10925). Parameters have Hugging Face's
names (LlamaForCausalLM), see ``published_name``. Nothing here knows how the network is split over ranks:
benchmarks/llama/pytorch/parallel.py does that to its modules.
"""

import math
from functools import partial
from typing import Any, List, NamedTuple, Optional, Tuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.llama.pytorch import attention
from benchmarks.llama.pytorch.experts import Mixture
from benchmarks.llama.shapes import Scaling, Shape

IGNORED = -100  # label of a position that is not counted, which PyTorch's cross-entropy leaves out
Rotation = Tuple[torch.Tensor, torch.Tensor]  # cosines and sines of positions, fp32 (length, size of a head / 2)


class How(NamedTuple):
    """How a network is computed, with the same result but for rounding."""

    recompute: bool = False  # the activations within a layer in the backward pass
    loss_rows: int = 0  # positions whose logits exist at a time; 0: all


def frequencies(size: int, base: float, scaling: Scaling, device: Optional[torch.device] = None) -> torch.Tensor:
    """Return the angle of a position of each pair of values of a head, fp32 (size / 2,).

    As apply_rope_scaling of NeMo and ``_compute_llama3_parameters`` of transformers have it.
    """
    found = 1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size))
    turns = scaling.context * found / (2 * math.pi)
    smooth = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - smooth) * found / scaling.factor + smooth * found


def rotation(positions: torch.Tensor, shape: Shape) -> Rotation:
    # Where they are: a copy from the host would wait for all that a GPU has to do.
    of_values = frequencies(shape.size, shape.rope_base, shape.scaling, positions.device)
    angles = positions.float()[:, None] * of_values
    return angles.cos(), angles.sin()


def rotated(values: torch.Tensor, by: Rotation) -> torch.Tensor:
    # Rotate each pair of values that are half a head apart; (B, heads, L, size), computed in fp32 at least.
    cosines, sines = by
    first, second = values.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1).to(values.dtype)


def linear(before: int, after: int) -> nn.Linear:
    return nn.Linear(before, after, bias=False)


class Attention(nn.Module):
    def __init__(self, shape: Shape, window: int) -> None:
        super().__init__()
        self.size, self.attend = shape.size, attention.within(window)  # type: Tuple[int, attention.Attend]
        self.q_proj, self.k_proj = linear(shape.width, shape.queries), linear(shape.width, shape.keys)
        self.v_proj, self.o_proj = linear(shape.width, shape.keys), linear(shape.queries, shape.width)
        self.sinks = nn.Parameter(torch.empty(shape.heads)) if shape.sinks else None
        self.qkv_lora = self.o_lora = None  # type: Any  # benchmarks/llama/pytorch/adapters.py

    def forward(self, hidden: torch.Tensor, by: Rotation) -> torch.Tensor:
        return self.found(self.attend, *self.projected(hidden, by))

    def projected(self, hidden: torch.Tensor, by: Rotation) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries (B, heads, L, size), keys and values (B, key_value_heads, L, size), rotated."""
        projected = [project(hidden) for project in (self.q_proj, self.k_proj, self.v_proj)]
        if self.qkv_lora is not None:
            projected = [each + more for each, more in zip(projected, self.qkv_lora(hidden))]
        queries, keys, values = (each.unflatten(-1, (-1, self.size)).transpose(1, 2) for each in projected)
        return rotated(queries, by), rotated(keys, by), values

    def found(
        self, attend: attention.Attend, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        if self.sinks is not None:
            attend = partial(attention.with_sinks, attend, self.sinks)
        found = attend(queries, keys, values).transpose(1, 2).flatten(2)
        return self.o_proj(found) if self.o_lora is None else self.o_proj(found) + self.o_lora(found)[0]


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (linear(shape.width, shape.inner_width) for _ in range(2))
        self.down_proj = linear(shape.inner_width, shape.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    def __init__(self, shape: Shape, recompute: bool, window: int) -> None:
        super().__init__()
        self.recompute = recompute
        self.input_layernorm, self.post_attention_layernorm = (norm(shape) for _ in range(2))
        self.self_attn, self.mlp = Attention(shape, window), Mixture(shape) if shape.experts else FeedForward(shape)

    def forward(self, hidden: torch.Tensor, by: Rotation) -> torch.Tensor:
        # Here and not around the module, whose weights FSDP gathers before it and frees behind it.
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.computed, hidden, by, use_reentrant=False, preserve_rng_state=False)
        return self.computed(hidden, by)

    def computed(self, hidden: torch.Tensor, by: Rotation) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), by)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Head(nn.Module):
    """Hidden values to logits, and to the sum of the losses."""

    def __init__(self, shape: Shape, rows: int) -> None:
        super().__init__()
        self.rows, self.lm_head = rows, linear(shape.width, shape.vocabulary)

    def forward(self, hidden: torch.Tensor, labels: Any = None) -> torch.Tensor:
        if labels is None:
            return self.lm_head(hidden)
        hidden, labels = hidden.flatten(0, 1), labels.flatten()
        rows = self.rows or len(labels)
        parts = zip(hidden.split(rows), labels.split(rows))
        # Logits of 128,256 entries in fp32 take 4 GB for 8,192 positions: those of a part exist, twice.
        keep = len(labels) <= rows or not torch.is_grad_enabled()
        losses: List[torch.Tensor] = [
            self.loss(*part) if keep else checkpoint(self.loss, *part, use_reentrant=False, preserve_rng_state=False)
            for part in parts
        ]
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def norm(shape: Shape) -> nn.RMSNorm:
    return nn.RMSNorm(shape.width, eps=shape.epsilon)


class Network(nn.Module):
    def __init__(self, shape: Shape, how: How = How()) -> None:  # noqa: B008
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(
            Layer(shape, how.recompute, shape.window_of(number)) for number in range(shape.layers)
        )
        self.norm = norm(shape)
        self.head = Head(shape, how.loss_rows)

    def forward(self, tokens: torch.Tensor, labels: Any = None, positions: Any = None) -> torch.Tensor:
        """Return the logits (B, L, vocabulary) of tokens (B, L); with ``labels`` (B, L) the sum of their losses.

        ``positions`` (L,) of the tokens in their sequences are 0, 1, 2 ... by default.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden, by = self.embed_tokens(tokens), rotation(positions, self.shape)
        for layer in self.layers:
            hidden = layer(hidden, by)
        return self.head(self.norm(hidden), labels)


def published_name(name: str) -> str:
    """Return Hugging Face's name of a parameter."""
    return name[len("head.") :] if name.startswith("head.") else f"model.{name}"


def deviation(name: str, shape: Shape, initial: float) -> float:
    """Return the standard deviation of a matrix's initial values; 0 for a norm's, which are 1, and for sinks.

    As Megatron initializes: ``init_method_std``, and for what a layer adds to its input that by the root of twice the
    number of layers (scaled_init_method_normal).
    """
    if "norm" in name or name.endswith("sinks"):
        return 0.0
    adds = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
    return initial / math.sqrt(2 * shape.layers) if adds else initial
