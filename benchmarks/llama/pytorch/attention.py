"""Causal attention, optionally with a sliding window and attention sinks.

Without sinks and windows, the fused kernels of scaled_dot_product_attention are used. With a mask on a GPU, only
cuDNN's kernel supports fewer key heads than query heads (PyTorch, sdp_utils.cpp); therefore keys and values are
repeated if a mask is used.
"""

from functools import partial
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels

# (queries (B, heads, L, size), keys, values (B, key_value_heads, L, size)) -> (B, heads, L, size). With sinks
# (heads,), the softmax has an additional logit per head, whose value vector is 0.
Attend = Callable[..., torch.Tensor]
ALIGNED = 8  # head size granularity of the fused kernels


def within(window: int) -> Attend:
    return partial(windowed, window) if window else causal


def causal(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: Optional[torch.Tensor] = None
) -> torch.Tensor:
    # Causal across document boundaries, as in the reference.
    if sinks is not None:
        return with_sinks(0, queries, keys, values, sinks)
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


def cudnn(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """Causal attention with cuDNN's kernel; PyTorch's order of its kernels depends on the release."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return causal(queries, keys, values, sinks)


def _call_on_noise(
    attend: Attend, device: torch.device, dtype: torch.dtype, heads: int, key_value_heads: int, length: int, size: int
) -> kernels.Call:
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((1, count, length, size) for count in (heads, key_value_heads, key_value_heads, heads))
    *inputs, grad = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    inputs = [tensor.requires_grad_() for tensor in inputs]

    def call() -> kernels.Results:
        attn_out = attend(*inputs)
        return [attn_out.detach(), *torch.autograd.grad(attn_out, inputs, grad)]

    return call


_SMALL = {"heads": 4, "key_value_heads": 2, "length": 256, "size": 128}
OPERATOR = kernels.Operator(causal, "", _call_on_noise, (_SMALL,))


def choose(config: Any, ranks: Ranks) -> Optional[Attend]:
    """Return cuDNN's attention if requested, or with ``attention=auto`` if it is correct and faster; otherwise None.

    "auto" measures one sample forward and backward on a GPU. Context-parallel ranks use the default, also if they
    resume a run that chose cuDNN.
    """
    name, dtype = config.attention, pytorch.DTYPES[config.precision]
    if config.context_parallelism > 1 or (name == "auto" and ranks.context.type == "cpu"):
        name = "default"
    if name == "auto":
        shape, shards = config.shape(1), config.tensor_parallelism
        sizes = (config.heads // shards, config.key_value_heads // shards, config.sequence_length, shape.size)
        candidates: Dict[str, Callable[[], Any]] = {"default": lambda: causal, "cudnn": lambda: cudnn}
        name, timings = kernels.fastest_correct(
            OPERATOR, candidates, ranks.context, dtype, dict(zip(_SMALL, sizes)), kernels.seconds
        )
        kernels.report(ranks, [f"attention {name} ({timings})"])
    choices.record("attention", name)
    return cudnn if name == "cudnn" else None


def windowed(
    window: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """Attend to the last ``window`` positions, including the current one.

    Without flash attention, the sequence is split into blocks of at least ``window`` - 1 positions; a block attends to
    itself and the previous block.
    """
    length = queries.shape[2]
    if length <= window:
        return causal(queries, keys, values, sinks)
    if sinks is not None:
        return with_sinks(window, queries, keys, values, sinks)
    if queries.device.type != "cpu" and _supports_flash(queries):
        return _flash(window, queries, keys, values)[0].transpose(1, 2)
    block = next(size for size in range(max(1, window - 1), length + 1) if length % size == 0)
    count = length // block

    def parts(tensor: torch.Tensor) -> torch.Tensor:
        # (B, heads, L, size) to (B * blocks, heads, block, size)
        return tensor.unflatten(2, (count, block)).transpose(1, 2).flatten(0, 1)

    def keys_of_blocks(tensor: torch.Tensor) -> torch.Tensor:
        # Keys of the blocks: (B * blocks, heads, 2 * block, size)
        previous = functional.pad(tensor[:, :, :-block], (0, 0, block, 0))
        return torch.cat([parts(previous), parts(tensor)], dim=2)

    indices = torch.arange(block, device=queries.device)
    distance = block + indices[:, None] - torch.arange(2 * block, device=queries.device)
    is_visible = ((distance >= 0) & (distance < window)).repeat(count, 1, 1)
    is_visible[0, :, :block] = False
    mask = is_visible[:, None].repeat(queries.shape[0], 1, 1, 1)
    attn_out = with_mask(parts(queries), keys_of_blocks(keys), keys_of_blocks(values), mask)
    return attn_out.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)


def masked(
    window: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """Masked causal attention, for any device and for export. There may be more keys than queries."""
    mask, size = visible(window, queries, keys), queries.shape[-1]
    if sinks is None:
        return with_mask(queries, keys, values, mask)
    # One more key and one more feature: the feature is the logit in the queries, 1 in the additional key and 0 in the
    # other keys.
    logits = (sinks * size**0.5).to(queries.dtype)[None, :, None, None].expand(*queries.shape[:3], 1)
    queries = torch.cat([queries, functional.pad(logits, (0, ALIGNED - 1))], dim=-1)
    keys, values = (functional.pad(tensor, (0, ALIGNED, 1, 0)) for tensor in (keys, values))
    keys[:, :, 0, size] = 1.0
    mask = functional.pad(mask, (1, 0), value=True)
    return with_mask(queries, keys, values, mask, size**-0.5)[..., :size]


def visible(window: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    # The mask (L, positions of the keys); the last query is at the last key
    length, key_count = queries.shape[2], keys.shape[2]
    indices = torch.arange(key_count, device=queries.device)
    distance = indices[key_count - length :, None] - indices
    return distance >= 0 if not window else (distance >= 0) & (distance < window)


def with_mask(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: Optional[float] = None,
) -> torch.Tensor:
    times = queries.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(times, dim=1) for tensor in (keys, values))
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)


# -- flash attention -------------------------------------------------------------------------------------


def _supports_flash(queries: torch.Tensor) -> bool:
    return queries.dtype in (torch.float16, torch.bfloat16) and queries.shape[-1] % ALIGNED == 0


def _flash(window: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    # (B, L, heads, size), log-sum-exp (B, heads, L), and the random state for backward
    length, inputs = queries.shape[2], _by_position(queries, keys, values)
    attn_out, log_sum_exp, *state = torch.ops.aten._flash_attention_forward(
        *inputs, None, None, length, length, 0.0, not window, False, **_window_options(window)
    )
    return (attn_out, log_sum_exp, *state[:2])


def with_sinks(
    window: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    if queries.device.type != "cpu" and not _supports_flash(queries):
        return masked(window, queries, keys, values, sinks)
    return FlashWithSinks.apply(queries, keys, values, sinks, window)


class FlashWithSinks(torch.autograd.Function):
    """Flash attention whose softmax has an additional logit per head.

    The kernel returns the log-sum-exp of the logits per query. With the sink it is ``total``, and the output shrinks by
    exp(log-sum-exp - total). From a log-sum-exp and an output, the kernel's backward pass computes P = exp(logits -
    log-sum-exp) and the gradients of the logits, P * (dP - sum(dO * O)) (Dao 2023, arXiv 2307.08691, algorithm 2):
    with ``total`` and the shrunk output, these are the gradients of the softmax with the sink.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor, window: int
    ) -> torch.Tensor:
        if queries.device.type == "cpu":
            mask = _window_mask(queries, window)
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            attn_out, log_sum_exp, *state = kernel(queries, keys, values, 0.0, mask is None, attn_mask=mask)
        else:
            attn_out, log_sum_exp, *state = _flash(window, queries, keys, values)
            attn_out = attn_out.transpose(1, 2)
        total = torch.logaddexp(log_sum_exp, sinks.to(log_sum_exp.dtype)[:, None])
        attn_out = (attn_out * (log_sum_exp - total).exp()[..., None]).to(queries.dtype)
        ctx.save_for_backward(queries, keys, values, attn_out, total, sinks, *state)
        ctx.window = window
        return attn_out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        queries, keys, values, attn_out, total, sinks, *state = ctx.saved_tensors
        if queries.device.type == "cpu":
            mask = _window_mask(queries, ctx.window)
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, queries, keys, values, attn_out, total, 0.0, mask is None, attn_mask=mask
            )
        else:
            length, inputs = queries.shape[2], _by_position(grad, queries, keys, values, attn_out)
            gradients = _by_position(
                *torch.ops.aten._flash_attention_backward(
                    *inputs, total, None, None, length, length, 0.0, not ctx.window, *state,
                    **_window_options(ctx.window),
                )
            )  # fmt: skip
        probability = (sinks.to(total.dtype)[:, None] - total).exp()
        of_sinks = -(probability * (grad * attn_out).sum(-1, dtype=total.dtype)).sum((0, 2))
        return (*gradients, of_sinks.to(sinks.dtype), None)


def _window_mask(queries: torch.Tensor, window: int) -> Optional[torch.Tensor]:
    # Summand of the logits; None if the attention is only causal
    if not window:
        return None
    is_hidden = ~visible(window, queries, queries)
    return queries.new_zeros(is_hidden.shape).masked_fill(is_hidden, float("-inf"))


def _by_position(*tensors: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    # (B, heads, L, size) to (B, L, heads, size), the layout of flash attention
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _window_options(window: int) -> Dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}
