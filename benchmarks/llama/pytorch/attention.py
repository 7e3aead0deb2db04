"""Causal attention of a sequence: to all positions before, or to a window of them, and with a sink.

All of it is by scaled_dot_product_attention, so that its fused kernels serve. Of those that take a mask on a GPU only
cuDNN's takes fewer heads of keys than of queries (PyTorch, sdp_utils.cpp): with a mask keys and values are repeated.
"""

from functools import partial
from typing import Callable, Optional

import torch
from torch.nn import functional

# Takes queries (B, heads, L, size), keys and values (B, key_value_heads, L, size); returns as queries. Those of this
# module take one key and value more, before the others: all positions attend to it.
Attend = Callable[..., torch.Tensor]
ALIGNED = 8  # values of a head by which fused kernels go


def within(window: int) -> Attend:
    return partial(windowed, window) if window else causal


def causal(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: Optional[float] = None
) -> torch.Tensor:
    # Let each position attend to itself and to all before it, whatever documents they are of, as the reference does.
    extra = keys.shape[2] - queries.shape[2]
    if extra:
        # As many queries as keys need no mask, which not each fused kernel takes.
        queries = functional.pad(queries, (0, 0, extra, 0))
    attn_out = functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=scale, enable_gqa=True
    )
    return attn_out[:, :, extra:] if extra else attn_out


def windowed(
    window: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: Optional[float] = None
) -> torch.Tensor:
    """Let each position attend to itself and to the ``window`` - 1 before it.

    The sequence is cut into blocks of at least so many positions: a block attends to itself and to the one before.
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
        # What each block attends to: (B * blocks, heads, more + 2 * block, size)
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
    """Attend to all positions before, of which there may be more than queries, and always to the first ``extra``."""
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
    """Attend with a logit more in the softmax of each head, ``sinks`` (heads,), whose value is 0.

    It is that of a key more, which has 1 where all others have 0: a value more in each head, which in queries is the
    logit.
    """
    size = queries.shape[-1]
    logits = (sinks * size**0.5).to(queries.dtype)[None, :, None, None].expand(*queries.shape[:3], 1)
    queries = torch.cat([queries, functional.pad(logits, (0, ALIGNED - 1))], dim=-1)
    keys, values = (functional.pad(tensor, (0, ALIGNED, 1, 0)) for tensor in (keys, values))
    keys[:, :, 0, size] = 1.0
    return attend(queries, keys, values, size**-0.5)[..., :size]
