"""Causal attention, optionally with a sliding window and attention sinks.

Everything uses the fused kernels of scaled_dot_product_attention. With a mask on a GPU, only cuDNN's kernel supports
fewer key heads than query heads (PyTorch, sdp_utils.cpp); therefore keys and values are repeated if a mask is used.
"""

from functools import partial
from typing import Callable, Optional

import torch
from torch.nn import functional

# (queries (B, heads, L, size), keys, values (B, key_value_heads, L, size)) -> (B, heads, L, size). The functions in
# this module accept one more key and value, at position 0, that all positions attend to.
Attend = Callable[..., torch.Tensor]
ALIGNED = 8  # head size granularity of the fused kernels


def within(window: int) -> Attend:
    return partial(windowed, window) if window else causal


def causal(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: Optional[float] = None
) -> torch.Tensor:
    # Causal across document boundaries, as in the reference.
    extra = keys.shape[2] - queries.shape[2]
    if extra:
        # With equal lengths no mask is needed; some fused kernels support none.
        queries = functional.pad(queries, (0, 0, extra, 0))
    attn_out = functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=scale, enable_gqa=True
    )
    return attn_out[:, :, extra:] if extra else attn_out


def windowed(
    window: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: Optional[float] = None
) -> torch.Tensor:
    """Attend to the last ``window`` positions, including the current one.

    The sequence is split into blocks of at least ``window`` - 1 positions; a block attends to itself and the
    previous block.
    """
    length, extra = queries.shape[2], keys.shape[2] - queries.shape[2]
    if length <= window:
        return causal(queries, keys, values, scale)
    block = next(size for size in range(max(1, window - 1), length + 1) if length % size == 0)
    count = length // block

    def parts(tensor: torch.Tensor) -> torch.Tensor:
        # (B, heads, L, size) to (B * blocks, heads, block, size)
        return tensor.unflatten(2, (count, block)).transpose(1, 2).flatten(0, 1)

    def keys_of_blocks(tensor: torch.Tensor) -> torch.Tensor:
        # Keys of the blocks: (B * blocks, heads, extra + 2 * block, size)
        first, regular = tensor[:, :, :extra], tensor[:, :, extra:]
        previous = functional.pad(regular[:, :, :-block], (0, 0, block, 0))
        always = first.repeat_interleave(count, dim=0)
        return torch.cat([always, parts(previous), parts(regular)], dim=2)

    indices = torch.arange(block, device=queries.device)
    distance = block + indices[:, None] - torch.arange(2 * block, device=queries.device)
    is_visible = ((distance >= 0) & (distance < window)).repeat(count, 1, 1)
    is_visible[0, :, :block] = False
    mask = functional.pad(is_visible, (extra, 0), value=True)[:, None].repeat(queries.shape[0], 1, 1, 1)
    attn_out = with_mask(parts(queries), keys_of_blocks(keys), keys_of_blocks(values), mask, scale)
    return attn_out.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)


def masked(
    window: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: Optional[float] = None,
    extra: int = 0,
) -> torch.Tensor:
    """Masked causal attention. There may be more keys than queries; the first ``extra`` keys are always visible."""
    length, key_count = queries.shape[2], keys.shape[2] - extra
    indices = torch.arange(key_count, device=queries.device)
    distance = indices[key_count - length :, None] - indices
    is_visible = distance >= 0 if not window else (distance >= 0) & (distance < window)
    mask = functional.pad(is_visible, (extra, 0), value=True)
    return with_mask(queries, keys, values, mask, scale)


def with_mask(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: Optional[float]
) -> torch.Tensor:
    times = queries.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(times, dim=1) for tensor in (keys, values))
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)


def with_sinks(
    attend: Attend, sinks: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attend with an additional logit per head in the softmax, ``sinks`` (heads,), whose value vector is 0.

    The logit is produced by one more key and one more feature: the feature is the logit in the queries, 1 in the
    additional key and 0 in all other keys.
    """
    size = queries.shape[-1]
    logits = (sinks * size**0.5).to(queries.dtype)[None, :, None, None].expand(*queries.shape[:3], 1)
    queries = torch.cat([queries, functional.pad(logits, (0, ALIGNED - 1))], dim=-1)
    keys, values = (functional.pad(tensor, (0, ALIGNED, 1, 0)) for tensor in (keys, values))
    keys[:, :, 0, size] = 1.0
    return attend(queries, keys, values, size**-0.5)[..., :size]
