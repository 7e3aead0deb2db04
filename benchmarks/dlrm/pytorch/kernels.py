"""operators.py in Triton. Compiled for GPUs, run in Triton's interpreter and on an H200."""

from typing import Any, Dict, List, Tuple

import torch
import triton
import triton.language as tl

from benchmarks.common.torch.kernels import OPTIONS, Specification, power_of_two
from benchmarks.dlrm.pytorch.operators import ALIGNMENT, Layout

# Rows of a table per program: 16 numbers a thread at the submitted width, four loads of 16 bytes.
LOOKUP_ROWS, LOOKUP_WARPS = 16, 4
INTERACTION_WARPS = 4  # with 2 the backward pass has no register left of 255


# Where each vector of ``row`` begins in what the ranks sent, and which of them are a table's; see Layout.
@triton.jit
def _places(places, row, rows, TABLES: tl.constexpr, VECTORS: tl.constexpr):
    vector = tl.arange(0, VECTORS)
    is_table = (vector > 0) & (vector <= TABLES)
    place = places + vector - 1
    before = tl.load(place, mask=is_table, other=0)
    inside = tl.load(place + TABLES, mask=is_table, other=0)
    stride = tl.load(place + 2 * TABLES, mask=is_table, other=0)
    return before * rows + inside + stride * row, is_table


# (VECTORS, BLOCK): the bottom MLP's vector of ``row``, those of the tables, zeros.
@triton.jit
def _vectors(hidden, flat, start, is_table, row, WIDTH: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    of_tables = tl.load(flat + start[:, None] + column[None, :], mask=is_table[:, None] & inside[None, :], other=0.0)
    of_hidden = tl.load(hidden + row * WIDTH + column, mask=inside, other=0.0)
    is_first = tl.arange(0, VECTORS) == 0
    return tl.where(is_first[:, None], of_hidden[None, :], of_tables)


@triton.jit
def interaction_forward(
    hidden, flat, places, features, rows, TABLES: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    VECTORS: tl.constexpr, BLOCK: tl.constexpr, TF32: tl.constexpr, WIDE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One row: copy the bottom MLP's vector, multiply all pairs, clear the padding."""
    row = tl.program_id(0).to(tl.int64)
    start, is_table = _places(places, row, rows, TABLES, VECTORS)
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
    behind = WIDTH + TABLES * (TABLES + 1) // 2 + tl.arange(0, PADDED)
    tl.store(out + behind, tl.zeros([PADDED], features.dtype.element_ty), mask=behind < COLUMNS)


@triton.jit
def interaction_backward(
    hidden, flat, places, gradient, of_hidden, of_flat, rows, TABLES: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr, TF32: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row: with S the symmetric matrix of the pairs' gradients, d(X X^T) gives S X; the copy adds its own."""
    row = tl.program_id(0).to(tl.int64)
    start, is_table = _places(places, row, rows, TABLES, VECTORS)
    vectors = _vectors(hidden, flat, start, is_table, row, WIDTH, VECTORS, BLOCK)
    one = tl.arange(0, VECTORS)[:, None]
    other = tl.arange(0, VECTORS)[None, :]
    first = tl.maximum(one, other)
    pair = WIDTH + first * (first - 1) // 2 + tl.minimum(one, other)
    given = gradient + row * COLUMNS
    symmetric = tl.load(given + pair, mask=(one != other) & (first <= TABLES), other=0.0)
    if WIDE:
        vectors = vectors.to(tl.float32)
        symmetric = symmetric.to(tl.float32)
    found = tl.dot(symmetric, vectors, input_precision="tf32" if TF32 else "tf32x3")
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    # Two stores of the whole block would keep twice its addresses in registers.
    of_first = tl.sum(tl.where(one == 0, found, 0.0), axis=0)
    of_first += tl.load(given + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(of_hidden + row * WIDTH + column, of_first.to(of_hidden.dtype.element_ty), mask=inside)
    found = found.to(of_flat.dtype.element_ty)
    tl.store(of_flat + start[:, None] + column[None, :], found, mask=is_table[:, None] & inside[None, :])


@triton.jit
def gather_rows(weight, rows, found, lookups, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """found[n] = weight[rows[n]] in the type of ``found``."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    row = tl.load(rows + place, mask=place < lookups, other=0).to(tl.int64)
    mask = (place < lookups)[:, None] & (column < WIDTH)
    values = tl.load(weight + row[:, None] * WIDTH + column, mask=mask)
    tl.store(found + place[:, None] * WIDTH + column, values.to(found.dtype.element_ty), mask=mask)


@triton.jit
def scatter_rows(weight, rows, gradient, rate, lookups, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """weight[rows[n]] -= rate * gradient[n], in fp32 and in any order."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    row = tl.load(rows + place, mask=place < lookups, other=0).to(tl.int64)
    mask = (place < lookups)[:, None] & (column < WIDTH)
    step = tl.load(gradient + place[:, None] * WIDTH + column, mask=mask, other=0.0).to(tl.float32) * -tl.load(rate)
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
    def forward(ctx: Any, hidden: torch.Tensor, flat: torch.Tensor, where: Layout) -> torch.Tensor:
        hidden, flat = hidden.contiguous(), flat.contiguous()
        # Triton's interpreter, which alone takes tensors of a CPU, would multiply the bits of bf16 as whole numbers.
        types = (torch.backends.cuda.matmul.allow_tf32, hidden.dtype is torch.bfloat16 and not hidden.is_cuda)
        ctx.constants = _interaction_constants(where.places.shape[1], hidden.shape[1], where.padding, *types)
        ctx.save_for_backward(hidden, flat, where.places)
        rows = len(hidden)
        features = hidden.new_empty(rows, ctx.constants["COLUMNS"])
        interaction_forward[(rows,)](
            hidden, flat, where.places, features, rows,
            **ctx.constants, PADDED=ALIGNMENT, num_warps=INTERACTION_WARPS, **OPTIONS,
        )  # fmt: skip
        return features

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, None]:
        hidden, flat, places = ctx.saved_tensors
        of_hidden, of_flat = torch.empty_like(hidden), torch.empty_like(flat)
        rows = len(hidden)
        interaction_backward[(rows,)](
            hidden, flat, places, gradients[0].contiguous(), of_hidden, of_flat, rows,
            **ctx.constants, num_warps=INTERACTION_WARPS, **OPTIONS,
        )  # fmt: skip
        return of_hidden, of_flat, None


interact = _Interaction.apply


def _lookup(kernel: Any, weight: torch.Tensor, rows: torch.Tensor, *others: torch.Tensor) -> None:
    constants = _lookup_constants(weight.shape[1])
    grid = (triton.cdiv(len(rows), LOOKUP_ROWS),)
    # A rank without tables has nothing to launch, which CUDA refuses.
    if len(rows):
        kernel[grid](weight, rows, *others, len(rows), **constants, num_warps=LOOKUP_WARPS, **OPTIONS)


def gather(weight: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    found = weight.new_empty(len(rows) * weight.shape[1], dtype=dtype)
    _lookup(gather_rows, weight, rows, found)
    return found


def scatter(weight: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor, rate: torch.Tensor) -> None:
    _lookup(scatter_rows, weight, rows, gradient.contiguous(), rate)


def specifications() -> List[Specification]:
    """Every kernel at the sizes of the submissions, in each type of the activations."""
    found = []
    for variant in ("fp16", "bf16", "tf32", "fp32"):
        pointer = "*fp32" if variant == "tf32" else f"*{variant}"
        constants = _interaction_constants(26, 128, 1, variant != "fp32", False)
        inputs = {"hidden": pointer, "flat": pointer, "places": "*i64"}
        forward = {**inputs, "features": pointer, "rows": "i32", **constants, "PADDED": ALIGNMENT}
        given = {"gradient": pointer, "of_hidden": pointer, "of_flat": pointer}
        found += [
            Specification(interaction_forward, variant, forward, INTERACTION_WARPS),
            Specification(
                interaction_backward, variant, {**inputs, **given, "rows": "i32", **constants}, INTERACTION_WARPS
            ),
        ]
        if variant != "tf32":
            table = {"weight": "*fp32", "rows": "*i64"}
            lookups = {"lookups": "i32", **_lookup_constants(128)}
            update = {**table, "gradient": pointer, "rate": "*fp32", **lookups}
            found += [
                Specification(gather_rows, variant, {**table, "found": pointer, **lookups}, LOOKUP_WARPS),
                Specification(scatter_rows, variant, update, LOOKUP_WARPS),
            ]
    return found
