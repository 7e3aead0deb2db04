"""operators.py in Triton. Compiled for GPUs, run in Triton's interpreter and on an H200."""

from typing import Any, Dict, List, Tuple

import torch
import triton
import triton.language as tl

from benchmarks.common.torch.kernels import OPTIONS, Specification, power_of_two
from benchmarks.dlrm.pytorch.operators import ALIGNMENT, Layout

# Table rows per program: 16 numbers per thread at the submitted width, four loads of 16 bytes
LOOKUP_ROWS, LOOKUP_WARPS = 16, 4
INTERACTION_WARPS = 4  # with 2, the backward pass uses all 255 registers


# Start of the vectors of ``row`` in the data from the ranks, and which vectors belong to tables; see Layout
@triton.jit
def _vector_starts(positions, row, rows, TABLES: tl.constexpr, VECTORS: tl.constexpr):
    vector = tl.arange(0, VECTORS)
    is_table = (vector > 0) & (vector <= TABLES)
    pointer = positions + vector - 1
    rank_start = tl.load(pointer, mask=is_table, other=0)
    table_start = tl.load(pointer + TABLES, mask=is_table, other=0)
    stride = tl.load(pointer + 2 * TABLES, mask=is_table, other=0)
    return rank_start * rows + table_start + stride * row, is_table


# (VECTORS, BLOCK): the bottom MLP's vector of ``row``, the vectors of the tables, zeros.
@triton.jit
def _vectors(hidden, flat, start, is_table, row, WIDTH: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    in_width = column < WIDTH
    in_table = is_table[:, None] & in_width[None, :]
    table_vectors = tl.load(flat + start[:, None] + column[None, :], mask=in_table, other=0.0)
    hidden_vector = tl.load(hidden + row * WIDTH + column, mask=in_width, other=0.0)
    is_first = tl.arange(0, VECTORS) == 0
    return tl.where(is_first[:, None], hidden_vector[None, :], table_vectors)


@triton.jit
def interaction_forward(
    hidden, flat, positions, features, rows, TABLES: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    VECTORS: tl.constexpr, BLOCK: tl.constexpr, TF32: tl.constexpr, WIDE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One row: copy the bottom MLP's vector, multiply all pairs, clear the padding."""
    row = tl.program_id(0).to(tl.int64)
    start, is_table = _vector_starts(positions, row, rows, TABLES, VECTORS)
    vectors = _vectors(hidden, flat, start, is_table, row, WIDTH, VECTORS, BLOCK)
    if WIDE:
        vectors = vectors.to(tl.float32)
    products = tl.dot(vectors, tl.trans(vectors), input_precision="tf32" if TF32 else "tf32x3")
    first = tl.arange(0, VECTORS)[:, None]
    second = tl.arange(0, VECTORS)[None, :]
    out = features + row * COLUMNS
    pair = WIDTH + first * (first - 1) // 2 + second
    tl.store(out + pair, products.to(features.dtype.element_ty), mask=(second < first) & (first <= TABLES))
    column = tl.arange(0, BLOCK)
    tl.store(out + column, tl.load(hidden + row * WIDTH + column, mask=column < WIDTH), mask=column < WIDTH)
    padding_column = WIDTH + TABLES * (TABLES + 1) // 2 + tl.arange(0, PADDED)
    tl.store(out + padding_column, tl.zeros([PADDED], features.dtype.element_ty), mask=padding_column < COLUMNS)


@triton.jit
def interaction_backward(
    hidden, flat, positions, gradient, grad_hidden, grad_flat, rows, TABLES: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr, TF32: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Process a row: with the symmetric matrix S of the pairs' gradients, d(X X^T) is S X; add the gradient of the
    copy.
    """
    row = tl.program_id(0).to(tl.int64)
    start, is_table = _vector_starts(positions, row, rows, TABLES, VECTORS)
    vectors = _vectors(hidden, flat, start, is_table, row, WIDTH, VECTORS, BLOCK)
    i = tl.arange(0, VECTORS)[:, None]
    j = tl.arange(0, VECTORS)[None, :]
    first = tl.maximum(i, j)
    pair = WIDTH + first * (first - 1) // 2 + tl.minimum(i, j)
    upstream = gradient + row * COLUMNS
    symmetric = tl.load(upstream + pair, mask=(i != j) & (first <= TABLES), other=0.0)
    if WIDE:
        vectors = vectors.to(tl.float32)
        symmetric = symmetric.to(tl.float32)
    grad_vectors = tl.dot(symmetric, vectors, input_precision="tf32" if TF32 else "tf32x3")
    column = tl.arange(0, BLOCK)
    in_width = column < WIDTH
    # Two stores of the full block would need twice the registers for addresses.
    of_first = tl.sum(tl.where(i == 0, grad_vectors, 0.0), axis=0)
    of_first += tl.load(upstream + column, mask=in_width, other=0.0).to(tl.float32)
    tl.store(grad_hidden + row * WIDTH + column, of_first.to(grad_hidden.dtype.element_ty), mask=in_width)
    grad_vectors = grad_vectors.to(grad_flat.dtype.element_ty)
    tl.store(grad_flat + start[:, None] + column[None, :], grad_vectors, mask=is_table[:, None] & in_width[None, :])


@triton.jit
def gather_rows(weight, rows, vectors, lookups, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """vectors[n] = weight[rows[n]] in the type of ``vectors``."""
    lookup = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    row = tl.load(rows + lookup, mask=lookup < lookups, other=0).to(tl.int64)
    mask = (lookup < lookups)[:, None] & (column < WIDTH)
    values = tl.load(weight + row[:, None] * WIDTH + column, mask=mask)
    tl.store(vectors + lookup[:, None] * WIDTH + column, values.to(vectors.dtype.element_ty), mask=mask)


@triton.jit
def scatter_rows(weight, rows, gradient, rate, lookups, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """weight[rows[n]] -= rate * gradient[n], in fp32 and in any order."""
    lookup = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    row = tl.load(rows + lookup, mask=lookup < lookups, other=0).to(tl.int64)
    mask = (lookup < lookups)[:, None] & (column < WIDTH)
    step = tl.load(gradient + lookup[:, None] * WIDTH + column, mask=mask, other=0.0).to(tl.float32) * -tl.load(rate)
    tl.atomic_add(weight + row[:, None] * WIDTH + column, step, mask=mask, sem="relaxed")


# -- launched -----------------------------------------------------------------------------------------


def _interaction_constants(tables: int, width: int, padding: int, tf32: bool, wide: bool) -> Dict[str, Any]:
    columns = width + tables * (tables + 1) // 2 + padding
    blocks = {"VECTORS": power_of_two(1 + tables), "BLOCK": power_of_two(width)}
    return {"TABLES": tables, "WIDTH": width, "COLUMNS": columns, **blocks, "TF32": tf32, "WIDE": wide}


def _lookup_constants(width: int) -> Dict[str, Any]:
    return {"WIDTH": width, "ROWS": LOOKUP_ROWS, "BLOCK": power_of_two(width)}


# See operators.interact.
class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, flat: torch.Tensor, layout: Layout) -> torch.Tensor:
        hidden, flat = hidden.contiguous(), flat.contiguous()
        # Triton's interpreter, which is used for CPU tensors, would multiply the bits of bf16 as integers.
        types = (torch.backends.cuda.matmul.allow_tf32, hidden.dtype is torch.bfloat16 and not hidden.is_cuda)
        ctx.constants = _interaction_constants(layout.positions.shape[1], hidden.shape[1], layout.padding, *types)
        ctx.save_for_backward(hidden, flat, layout.positions)
        rows = len(hidden)
        features = hidden.new_empty(rows, ctx.constants["COLUMNS"])
        interaction_forward[(rows,)](
            hidden, flat, layout.positions, features, rows,
            **ctx.constants, PADDED=ALIGNMENT, num_warps=INTERACTION_WARPS, **OPTIONS,
        )  # fmt: skip
        return features

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, None]:
        hidden, flat, table_layout = ctx.saved_tensors
        grad_hidden, grad_flat = torch.empty_like(hidden), torch.empty_like(flat)
        rows = len(hidden)
        interaction_backward[(rows,)](
            hidden, flat, table_layout, gradients[0].contiguous(), grad_hidden, grad_flat, rows,
            **ctx.constants, num_warps=INTERACTION_WARPS, **OPTIONS,
        )  # fmt: skip
        return grad_hidden, grad_flat, None


interact = _Interaction.apply


def _lookup(kernel: Any, weight: torch.Tensor, rows: torch.Tensor, *arguments: torch.Tensor) -> None:
    constants = _lookup_constants(weight.shape[1])
    grid = (triton.cdiv(len(rows), LOOKUP_ROWS),)
    # A rank without tables must not launch: CUDA rejects empty grids.
    if len(rows):
        kernel[grid](weight, rows, *arguments, len(rows), **constants, num_warps=LOOKUP_WARPS, **OPTIONS)


def gather(weight: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    vectors = weight.new_empty(len(rows) * weight.shape[1], dtype=dtype)
    _lookup(gather_rows, weight, rows, vectors)
    return vectors


def scatter(weight: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor, rate: torch.Tensor) -> None:
    _lookup(scatter_rows, weight, rows, gradient.contiguous(), rate)


def specifications() -> List[Specification]:
    """Return all kernels at the sizes of the submissions, for all activation types."""
    specs = []
    for variant in ("fp16", "bf16", "tf32", "fp32"):
        pointer = "*fp32" if variant == "tf32" else f"*{variant}"
        constants = _interaction_constants(26, 128, 1, variant != "fp32", False)
        inputs = {"hidden": pointer, "flat": pointer, "positions": "*i64"}
        forward = {**inputs, "features": pointer, "rows": "i32", **constants, "PADDED": ALIGNMENT}
        gradients = {"gradient": pointer, "grad_hidden": pointer, "grad_flat": pointer}
        specs += [
            Specification(interaction_forward, variant, forward, INTERACTION_WARPS),
            Specification(
                interaction_backward, variant, {**inputs, **gradients, "rows": "i32", **constants}, INTERACTION_WARPS
            ),
        ]
        if variant != "tf32":
            table = {"weight": "*fp32", "rows": "*i64"}
            lookups = {"lookups": "i32", **_lookup_constants(128)}
            update = {**table, "gradient": pointer, "rate": "*fp32", **lookups}
            specs += [
                Specification(gather_rows, variant, {**table, "vectors": pointer, **lookups}, LOOKUP_WARPS),
                Specification(scatter_rows, variant, update, LOOKUP_WARPS),
            ]
    return specs
