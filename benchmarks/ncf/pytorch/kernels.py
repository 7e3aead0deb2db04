"""operators.py in Triton. Compiled for GPUs, run in Triton's interpreter and on an H200."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import torch
import triton
import triton.language as tl

from benchmarks.common.torch.kernels import OPTIONS, Specification, power_of_two

PAIRS, WARPS = 16, 4
"""Pairs per program of 128 threads: 8 numbers a thread at width 64, 32 at width 256."""


@triton.jit
def _index(users, items, pairs, WIDTH: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """Places of a program's pairs, of their rows in both tables, and the mask of those that exist."""
    place = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    column = tl.arange(0, BLOCK)[None, :]
    user = tl.load(users + place, mask=place < pairs, other=0).to(tl.int64)[:, None] * WIDTH + column
    item = tl.load(items + place, mask=place < pairs, other=0).to(tl.int64)[:, None] * WIDTH + column
    return place, user, item, (place < pairs)[:, None] & (column < WIDTH)


@triton.jit
def factors_forward(
    of_users, of_items, weight, users, items, scores, pairs,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """scores[n] = weight . (of_users[users[n]] * of_items[items[n]]), without writing the product."""
    place, user, item, mask = _index(users, items, pairs, WIDTH, PAIRS, BLOCK)
    column = tl.arange(0, BLOCK)
    weights = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    product = tl.load(of_users + user, mask=mask, other=0.0) * tl.load(of_items + item, mask=mask, other=0.0)
    tl.store(scores + place, tl.sum(product * weights[None, :], axis=1), mask=place < pairs)


@triton.jit
def factors_backward(
    of_users, of_items, weight, users, items, gradient, to_users, to_items, to_weight, pairs,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of both tables, in fp32 and in any order; each program has a row of ``to_weight``."""
    place, user, item, mask = _index(users, items, pairs, WIDTH, PAIRS, BLOCK)
    column = tl.arange(0, BLOCK)
    weights = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    given = tl.load(gradient + place, mask=place < pairs, other=0.0)[:, None]
    user_rows = tl.load(of_users + user, mask=mask, other=0.0)
    item_rows = tl.load(of_items + item, mask=mask, other=0.0)
    tl.atomic_add(to_users + user, given * weights[None, :] * item_rows, mask=mask, sem="relaxed")
    tl.atomic_add(to_items + item, given * weights[None, :] * user_rows, mask=mask, sem="relaxed")
    of_weight = tl.sum(given * user_rows * item_rows, axis=0)
    tl.store(to_weight + tl.program_id(0).to(tl.int64) * WIDTH + column, of_weight, mask=column < WIDTH)


@triton.jit
def first_layer_forward(
    of_users, of_items, users, items, hidden, pairs, WIDTH: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """hidden[n] = ReLU(of_users[users[n]] + of_items[items[n]])."""
    place, user, item, mask = _index(users, items, pairs, WIDTH, PAIRS, BLOCK)
    both = tl.load(of_users + user, mask=mask, other=0.0).to(tl.float32)
    both += tl.load(of_items + item, mask=mask, other=0.0).to(tl.float32)
    # Not maximum, which would turn NaN into 0 and hide a diverged training.
    both = tl.where(both < 0.0, 0.0, both)
    out = hidden + place[:, None] * WIDTH + tl.arange(0, BLOCK)[None, :]
    tl.store(out, both.to(hidden.dtype.element_ty), mask=mask)


@triton.jit
def first_layer_backward(
    hidden, gradient, users, items, to_users, to_items, pairs,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the gradient where ReLU let it pass to both tables', in fp32 and in any order."""
    place, user, item, mask = _index(users, items, pairs, WIDTH, PAIRS, BLOCK)
    at = place[:, None] * WIDTH + tl.arange(0, BLOCK)[None, :]
    passed = tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32) > 0.0
    given = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
    tl.atomic_add(to_users + user, given, mask=mask & passed, sem="relaxed")
    tl.atomic_add(to_items + item, given, mask=mask & passed, sem="relaxed")


# -- launched -----------------------------------------------------------------------------------------


def _constants(width: int) -> Dict[str, Any]:
    return {"WIDTH": width, "PAIRS": PAIRS, "BLOCK": power_of_two(width)}


def _launch(kernel: Any, width: int, index: torch.Tensor, *tensors: torch.Tensor) -> None:
    grid = (triton.cdiv(len(index), PAIRS),)
    if len(index):
        kernel[grid](*tensors, len(index), **_constants(width), num_warps=WARPS, **OPTIONS)


class _Factors(torch.autograd.Function):
    """See operators.factors."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        of_users, users = tensors[0], tensors[3]
        scores = of_users.new_empty(len(users))
        _launch(factors_forward, of_users.shape[1], users, *tensors, scores)
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[Any, ...]:
        of_users, of_items, weight, users, items = ctx.saved_tensors
        to_users, to_items = torch.zeros_like(of_users), torch.zeros_like(of_items)
        to_weight = weight.new_empty(triton.cdiv(len(users), PAIRS), len(weight))
        given = (gradients[0].contiguous(), to_users, to_items, to_weight)
        _launch(factors_backward, len(weight), users, of_users, of_items, weight, users, items, *given)
        return to_users, to_items, to_weight.sum(0), None, None


class _FirstLayer(torch.autograd.Function):
    """See operators.first_layer."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        of_users, of_items, users, items = tensors
        hidden = of_users.new_empty(len(users), of_users.shape[1])
        _launch(first_layer_forward, of_users.shape[1], users, *tensors, hidden)
        ctx.save_for_backward(hidden, users, items)
        ctx.shapes = (of_users.shape, of_items.shape)
        return hidden

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[Any, ...]:
        hidden, users, items = ctx.saved_tensors
        to_users, to_items = (hidden.new_zeros(shape, dtype=torch.float32) for shape in ctx.shapes)
        tensors = (hidden, gradients[0].contiguous(), users, items, to_users, to_items)
        _launch(first_layer_backward, hidden.shape[1], users, *tensors)
        return to_users.to(hidden.dtype), to_items.to(hidden.dtype), None, None


factors = _Factors.apply
first_layer = _FirstLayer.apply


def specifications() -> List[Specification]:
    """Every kernel at the sizes of the submissions, in each type of the activations."""
    index = {"users": "*i64", "items": "*i64"}
    tables = {"of_users": "*fp32", "of_items": "*fp32", "weight": "*fp32", **index}
    gradients = {"gradient": "*fp32", "to_users": "*fp32", "to_items": "*fp32", "to_weight": "*fp32"}
    end: Dict[str, Any] = {"pairs": "i32", **_constants(64)}
    found = [
        Specification(factors_forward, "fp32", {**tables, "scores": "*fp32", **end}, WARPS),
        Specification(factors_backward, "fp32", {**tables, **gradients, **end}, WARPS),
    ]
    end = {"pairs": "i32", **_constants(256)}
    for variant in ("fp16", "bf16", "fp32"):
        pointer = f"*{variant}"
        forward = {"of_users": pointer, "of_items": pointer, **index, "hidden": pointer, **end}
        totals = {"to_users": "*fp32", "to_items": "*fp32"}
        backward = {"hidden": pointer, "gradient": pointer, **index, **totals, **end}
        found += [
            Specification(first_layer_forward, variant, forward, WARPS),
            Specification(first_layer_backward, variant, backward, WARPS),
        ]
    return found
