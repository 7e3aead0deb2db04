"""Attention on packed rows: the tokens of all sentences without padding.

Queries are (tokens, heads, size), keys and values (source tokens, heads, size). Implementations, measured on a GPU with
attention=auto:

    padded  sentences are padded to the longest, then scaled_dot_product_attention or separate operators
    flash   PyTorch's flash attention for sequences of different lengths (arXiv 2205.14135): GPUs, fp16 and bf16
"""

from functools import partial
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch
from torch.nn import functional

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.transformer.pytorch.config import Config
from benchmarks.translation.vocabulary import PAD

# Fraction of non-padding positions up to which packing saves more than it costs, with padding in attention; measured on
# a CPU.
MAX_DENSITY = 0.9
# (query, key, value, packing of the queries, packing of the keys, dropout rate, causal) -> (tokens, heads, size)
PackedAttention = Callable[..., torch.Tensor]


class Packing(NamedTuple):
    # Location of a batch's tokens in the padded table of sentences.

    indices: torch.Tensor  # int64 (tokens,), of sentences * length
    mask: torch.Tensor  # bool (sentences, 1, 1, length): True for tokens, False for padding
    offsets: torch.Tensor  # int32 (sentences + 1,): first tokens of the sentences, and the number of tokens

    @classmethod
    def of(cls, ids: torch.Tensor, indices: torch.Tensor) -> "Packing":
        # ``ids`` int64 (sentences, length); ``indices``: positions of the tokens, whose search would synchronize a GPU.
        is_token = ids != PAD
        offsets = functional.pad(is_token.sum(1).cumsum(0), (1, 0)).int()
        return cls(indices, is_token[:, None, None], offsets)

    @property
    def length(self) -> int:
        return self.mask.shape[-1]

    def scatter(self, tokens: torch.Tensor) -> torch.Tensor:
        # (sentences, heads, length, size) of (tokens, heads, size), with zeros for padding.
        table = _Scatter.apply(tokens, self.indices, len(self.mask) * self.length)
        return table.unflatten(0, (-1, self.length)).transpose(1, 2)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        # (tokens, heads, size) of (sentences, heads, length, size).
        return _Gather.apply(values.transpose(1, 2).flatten(0, 1), self.indices)


# The two are each other's gradient. PyTorch's index gradients would accumulate, for duplicate indices.
class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, indices: torch.Tensor, count: int) -> torch.Tensor:
        ctx.save_for_backward(indices)
        return tokens.new_zeros(count, *tokens.shape[1:]).index_copy_(0, indices, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[torch.Tensor, None, None]:
        return gradients[0].index_select(0, *ctx.saved_tensors), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.count = len(values)
        return values.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[torch.Tensor, None]:
        (indices,), (gradient,) = ctx.saved_tensors, gradients
        return gradient.new_zeros(ctx.count, *gradient.shape[1:]).index_copy_(0, indices, gradient), None


def padded(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    key_packing: Packing,
    dropout: float,
    causal: bool,
) -> torch.Tensor:
    # Attention of padded sentences by ``attend``, with the signature of scaled_dot_product_attention. No mask is needed
    # if it is causal: a token precedes the padding of its sentence.
    mask = None if causal else key_packing.mask
    heads = packing.scatter(query), key_packing.scatter(key), key_packing.scatter(value)
    return packing.gather(attend(*heads, mask, dropout, causal))


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    key_packing: Packing,
    dropout: float,
    causal: bool,
) -> torch.Tensor:
    offsets, lengths = (packing.offsets, key_packing.offsets), (packing.length, key_packing.length)
    return torch.ops.aten._flash_attention_forward(query, key, value, *offsets, *lengths, dropout, causal, False)[0]


def _call_on_noise(
    attend: PackedAttention,
    device: torch.device,
    dtype: torch.dtype,
    sentences: int,
    shortest: int,
    longest: int,
    heads: int,
    size: int,
) -> kernels.Call:
    # The three attentions of an encoder and a decoder layer, forward and backward.
    generator = torch.Generator(device).manual_seed(0)

    def draw_packing() -> Packing:
        lengths = torch.randint(shortest, longest + 1, (sentences, 1), generator=generator, device=device)
        is_token = torch.arange(longest, device=device) < lengths
        return Packing.of(torch.where(is_token, PAD + 1, PAD), is_token.flatten().nonzero().flatten())

    def draw_heads(packing: Packing) -> torch.Tensor:
        shape = len(packing.indices), heads, size
        return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()

    source, target = draw_packing(), draw_packing()
    calls = [
        ([draw_heads(rows), draw_heads(keys), draw_heads(keys)], draw_heads(rows).detach(), (rows, keys, 0.0, causal))
        for rows, keys, causal in ((source, source, False), (target, target, True), (target, source, False))
    ]

    def call() -> kernels.Results:
        results: kernels.Results = []
        for inputs, gradient, options in calls:
            attn_out = attend(*inputs, *options)
            results += [attn_out.detach(), *torch.autograd.grad(attn_out, inputs, gradient)]
        return results

    return call


FUSED = partial(padded, functional.scaled_dot_product_attention)
OPERATOR = kernels.Operator(
    FUSED, "", _call_on_noise, ({"sentences": 5, "shortest": 1, "longest": 40, "heads": 2, "size": 64},)
)


def choose(config: Config, ranks: Ranks) -> Optional[PackedAttention]:
    """Return ``flash`` if requested, or with attention=auto if it is correct and faster on this GPU; otherwise None.

    "auto" measures a batch of the longest sentences, as full as batches that are packed for padded attention can be,
    forward and backward. Raises UnavailableError if flash attention is requested and does not run on all ranks.
    """
    longest = config.max_length
    name: str = config.attention
    if name == "auto" and not config.supports_flash:
        name = "fused"
    if name in ("auto", "flash"):
        sizes = {
            "sentences": config.batch_size // longest,
            "shortest": max(1, round((2 * MAX_DENSITY - 1) * longest)),  # lengths are uniformly distributed
            "longest": longest,
            "heads": config.heads,
            "size": config.width // config.heads,
        }
        candidates: Dict[str, Callable[[], Any]] = {"flash": lambda: flash}
        if name == "auto":
            candidates["fused"] = lambda: FUSED
        dtype = pytorch.DTYPES[config.precision]
        try:
            name, timings = kernels.fastest_correct(OPERATOR, candidates, ranks.context, dtype, sizes, kernels.seconds)
        except ValueError as problem:
            raise choices.UnavailableError(f"attention={name}: {problem}; use attention=auto") from problem
        kernels.report(ranks, [f"attention {name} ({timings})"])
    choices.record("attention", name)
    return flash if name == "flash" else None
