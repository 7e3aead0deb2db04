"""What is between BERT's products in Triton: bias and GELU, dropout and residual sum and layer norm, with gradients.

Compiled for GPUs and run in Triton's interpreter. The kernels keep no mask of a dropout: its random numbers are a
function of a seed, which PyTorch's generator draws on the device at each call, also in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from benchmarks.common.torch.kernels import OPTIONS, Specification, power_of_two
from benchmarks.language.pytorch.pieces import NORM_EPSILON

COLUMNS, ROWS = 512, 2
"""Of a tile of bias and GELU: 8 values a thread; of 16 the gradient's do not fit into registers."""
PROGRAMS = 256
"""Rows of programs of a gradient, each with sums of its own: with 8 of 512 columns they fill a GPU."""
NORM_PROGRAMS = 512
"""The same of the layer norm's, which take whole rows."""
WARPS = 4
ROUNDS = 7
"""Of Philox: the least that passes all tests of randomness (Salmon et al. 2011, table 2)."""


@triton.jit
def _gelu(value, TANH: tl.constexpr):
    if TANH:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        return value * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))


@triton.jit
def _slope_of_gelu(value, TANH: tl.constexpr):
    if TANH:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        share = 1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0)
        of_inner = 0.7978845608028654 * (1.0 + 0.134145 * value * value)
        return share + 2.0 * value * share * (1.0 - share) * of_inner
    share = 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
    return share + value * 0.3989422804014327 * tl.exp(-0.5 * value * value)


@triton.jit
def gelu_forward(product, bias, result, rows, columns, TANH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of ROWS x BLOCK."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    added = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    value = tl.load(product + place, mask=there, other=0.0).to(tl.float32) + added[None, :]
    tl.store(result + place, _gelu(value, TANH).to(result.dtype.element_ty), mask=there)


@triton.jit
def gelu_backward(
    product, bias, gradient, of_product, sums, rows, columns,
    TANH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every so many tiles of BLOCK columns: the product's gradient, and its sum over these rows."""
    first, step = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    added = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in range(first * ROWS, rows, step * ROWS):
        row = begin + tl.arange(0, ROWS)
        there = (row < rows)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        value = tl.load(product + place, mask=there, other=0.0).to(tl.float32) + added[None, :]
        slope = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32) * _slope_of_gelu(value, TANH)
        tl.store(of_product + place, slope.to(of_product.dtype.element_ty), mask=there)
        total += slope
    tl.store(sums + first.to(tl.int64) * columns + column, tl.sum(total, axis=0), mask=inside)


@triton.jit
def _kept(seed, row, THRESHOLD: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """Return which values of a row dropout leaves: four from each call of Philox."""
    QUARTER: tl.constexpr = BLOCK // 4
    number = row * QUARTER + tl.arange(0, QUARTER)
    a, b, c, d = tl.randint4x(seed, number, ROUNDS)
    bits = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (BLOCK,))
    # 31 of the bits: comparing has no sign to mind.
    return (bits.to(tl.uint32, bitcast=True) >> 1).to(tl.int32) >= THRESHOLD


@triton.jit
def norm_forward(
    update, residual, weight, bias, seed, summed, result, means, scales, columns, keep, epsilon,
    THRESHOLD: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: what dropout leaves of the update, times 1 / keep, plus the residual, normed."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    there = column < columns
    place = row.to(tl.int64) * columns + column
    value = tl.load(update + place, mask=there, other=0.0).to(tl.float32)
    if THRESHOLD > 0:
        value = tl.where(_kept(tl.load(seed), row, THRESHOLD, ROUNDS, BLOCK), value / keep, 0.0)
    value += tl.load(residual + place, mask=there, other=0.0).to(tl.float32)
    tl.store(summed + place, value.to(summed.dtype.element_ty), mask=there)
    mean = tl.sum(value, axis=0) / columns
    centred = tl.where(there, value - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / columns + epsilon)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)
    w = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    tl.store(result + place, (centred * scale * w + b).to(result.dtype.element_ty), mask=there)


@triton.jit
def norm_backward(
    gradient, summed, weight, means, scales, seed, of_update, of_residual, of_weight, of_bias, rows, columns, keep,
    THRESHOLD: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every so many rows: both gradients, and those of weight and bias, summed over these rows."""
    first, step = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    there = column < columns
    w = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    by_weight = tl.zeros((BLOCK,), tl.float32)
    by_bias = tl.zeros((BLOCK,), tl.float32)
    for row in range(first, rows, step):
        # Hidden states of 2 ** 31 values are 2 million tokens of BERT-Large.
        place = row * columns + column
        slope = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
        value = tl.load(summed + place, mask=there, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        normed = tl.where(there, (value - tl.load(means + row)) * scale, 0.0)
        by_weight += slope * normed
        by_bias += slope
        slope = slope * w
        along = tl.sum(slope * normed, axis=0) / columns
        found = (slope - tl.sum(slope, axis=0) / columns - normed * along) * scale
        tl.store(of_residual + place, found.to(of_residual.dtype.element_ty), mask=there)
        if THRESHOLD > 0:
            found = tl.where(_kept(tl.load(seed), row, THRESHOLD, ROUNDS, BLOCK), found / keep, 0.0)
        tl.store(of_update + place, found.to(of_update.dtype.element_ty), mask=there)
    place = first.to(tl.int64) * columns + column
    tl.store(of_weight + place, by_weight, mask=there)
    tl.store(of_bias + place, by_bias, mask=there)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: torch.Tensor, bias: torch.Tensor, tanh: bool) -> torch.Tensor:
        product = product.contiguous()
        result = torch.empty_like(product)
        rows, columns = product.shape
        if rows:
            grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
            gelu_forward[grid](
                product, bias, result, rows, columns, TANH=tanh, ROWS=ROWS, BLOCK=COLUMNS, num_warps=WARPS, **OPTIONS
            )
        ctx.save_for_backward(product, bias)
        ctx.tanh = tanh
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        product, bias = ctx.saved_tensors
        rows, columns = product.shape
        programs = max(1, min(PROGRAMS, triton.cdiv(rows, ROWS)))
        of_product = torch.empty_like(product)
        sums = torch.empty(programs, columns, dtype=torch.float32, device=product.device)
        gelu_backward[(programs, triton.cdiv(columns, COLUMNS))](
            product, bias, gradient.contiguous(), of_product, sums, rows, columns,
            TANH=ctx.tanh, ROWS=ROWS, BLOCK=COLUMNS, num_warps=WARPS, **OPTIONS,
        )  # fmt: skip
        return of_product, sums.sum(0).to(bias.dtype), None


def bias_gelu(product: torch.Tensor, bias: torch.Tensor, kind: str) -> torch.Tensor:
    """See pieces.bias_gelu."""
    found: torch.Tensor = _BiasGelu.apply(product, bias, kind == "tanh")
    return found


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        update: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        dropout: float,
    ) -> torch.Tensor:
        update, residual = update.contiguous(), residual.contiguous()
        rows, columns = update.shape
        # Weights have nothing to say about a seed that nobody reads.
        seed = torch.randint(1 << 31, (1,), device=update.device) if dropout else weight
        summed, result = torch.empty_like(update), torch.empty_like(update)
        means, scales = (torch.empty(rows, dtype=torch.float32, device=update.device) for _ in range(2))
        ctx.options = {
            "THRESHOLD": int(dropout * (1 << 31)), "ROUNDS": ROUNDS, "BLOCK": power_of_two(columns),
            "num_warps": WARPS, **OPTIONS,
        }  # fmt: skip
        if rows:
            norm_forward[(rows,)](
                update, residual, weight, bias, seed, summed, result, means, scales, columns, 1.0 - dropout,
                NORM_EPSILON, **ctx.options,
            )  # fmt: skip
        ctx.save_for_backward(summed, weight, means, scales, seed)
        ctx.keep, ctx.residual_type, ctx.bias_type = 1.0 - dropout, residual.dtype, bias.dtype
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        summed, weight, means, scales, seed = ctx.saved_tensors
        rows, columns = summed.shape
        programs = max(1, min(NORM_PROGRAMS, rows))
        of_update, of_residual = torch.empty_like(summed), torch.empty_like(summed, dtype=ctx.residual_type)
        of_weight, of_bias = (
            torch.empty(programs, columns, dtype=torch.float32, device=summed.device) for _ in range(2)
        )
        norm_backward[(programs,)](
            gradient.contiguous(), summed, weight, means, scales, seed, of_update, of_residual, of_weight, of_bias,
            rows, columns, ctx.keep, **ctx.options,
        )  # fmt: skip
        return of_update, of_residual, of_weight.sum(0).to(weight.dtype), of_bias.sum(0).to(ctx.bias_type), None


def add_norm(
    update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dropout: float
) -> torch.Tensor:
    """See pieces.add_norm."""
    found: torch.Tensor = _AddNorm.apply(update, residual, weight, bias, dropout)
    return found


def specifications() -> List[Specification]:
    """Each kernel at BERT-Large's sizes, in each type, with both kinds of GELU, with and without dropout."""
    found = []
    for dtype in ("fp32", "fp16", "bf16"):
        halves, fp32 = f"*{dtype}", "*fp32"
        tile = {"rows": "i32", "columns": "i32", "ROWS": ROWS, "BLOCK": COLUMNS}
        for tanh in (True, False):
            variant = f"{dtype}, {'tanh' if tanh else 'erf'}"
            given = {"product": halves, "bias": fp32}
            arguments = {**given, "result": halves, **tile, "TANH": tanh}
            found.append(Specification(gelu_forward, variant, arguments, WARPS, divisible=("columns",)))
            arguments = {**given, "gradient": halves, "of_product": halves, "sums": fp32, **tile, "TANH": tanh}
            found.append(Specification(gelu_backward, variant, arguments, WARPS, divisible=("columns",)))
        for dropout in (0.1, 0.0):
            variant = f"{dtype}, dropout {dropout}"
            constants = {"THRESHOLD": int(dropout * (1 << 31)), "ROUNDS": ROUNDS, "BLOCK": power_of_two(1024)}
            row = {"means": fp32, "scales": fp32, "seed": "*i64" if dropout else fp32, "weight": fp32}
            sums = {"of_weight": fp32, "of_bias": fp32, "rows": "i32", "columns": "i32", "keep": "fp32"}
            arguments = {"update": halves, "residual": halves, "bias": fp32, "summed": halves, "result": halves}
            arguments = {**arguments, **row, "columns": "i32", "keep": "fp32", "epsilon": "fp32", **constants}
            found.append(Specification(norm_forward, variant, arguments, WARPS, divisible=("columns",)))
            arguments = {"gradient": halves, "summed": halves, "of_update": halves, "of_residual": halves}
            arguments = {**arguments, **row, **sums, **constants}
            found.append(Specification(norm_backward, variant, arguments, WARPS, divisible=("columns",)))
    return found
