"""Triton kernel for the FP8 copies of a matrix; see operators.py."""

from typing import Any, Dict, List, Tuple

import torch
import triton
import triton.language as tl

from benchmarks.common.torch.kernels import OPTIONS, Specification

# A tile's rows are 128 bytes in both FP8 copies, a full cache line.
TILE = 128
WARPS = 8


@triton.jit
def cast_tile(
    values, scale, rows, columns, height, width, LIMIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    # values, rows: (height, width); columns: (width, height); scale: one fp32. Each program casts one tile.
    tiles = tl.cdiv(width, TILE)
    # int64: 262,144 tokens of 28,672 values are more than 2^31.
    row = (tl.program_id(0) // tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = (row < height)[:, None] & (column < width)[None, :]
    offsets = row[:, None] * width + column[None, :]
    scaled = tl.load(values + offsets, mask=mask, other=0.0).to(tl.float32) * tl.load(scale)
    cast = tl.clamp(scaled, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if ROWS:
        tl.store(rows + offsets, cast.to(rows.dtype.element_ty), mask=mask)
    if COLUMNS:
        transposed = tl.trans(cast.to(columns.dtype.element_ty))
        tl.store(columns + column[:, None] * height + row[None, :], transposed, mask=tl.trans(mask))


def _cast_copies(
    values: torch.Tensor, scale: torch.Tensor, kind: torch.dtype, rows: bool, columns: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    values = values.contiguous()
    height, width = values.shape
    by_rows = values.new_empty((height, width) if rows else 0, dtype=kind)
    by_columns = values.new_empty((width, height) if columns else 0, dtype=kind)
    cast_tile[(triton.cdiv(height, TILE) * triton.cdiv(width, TILE),)](
        values, scale, by_rows, by_columns, height, width, torch.finfo(kind).max, rows, columns, TILE,
        num_warps=WARPS, **OPTIONS,
    )  # fmt: skip
    return by_rows, by_columns


# Opaque to torch.compile since PyTorch 2.4; earlier releases cannot compile it.
cast_copies: Any = _cast_copies
if hasattr(torch.library, "custom_op"):
    cast_copies = torch.library.custom_op("encore::cast_fp8", mutates_args=())(_cast_copies)

    @cast_copies.register_fake
    def _(values: Any, scale: Any, kind: Any, rows: Any, columns: Any) -> Any:
        height, width = values.shape
        return (
            values.new_empty((height, width) if rows else 0, dtype=kind),
            values.new_empty((width, height) if columns else 0, dtype=kind),
        )


def specifications() -> List[Specification]:
    """Return the kernel for the types of weights, activations, and weights stored in FP8."""
    specs = []
    for variant, kind in (("bf16", "fp8e4nv"), ("bf16", "fp8e5"), ("fp32", "fp8e4nv"), ("fp8e4nv", "fp8e4nv")):
        limit = 448.0 if kind == "fp8e4nv" else 57344.0
        arguments: Dict[str, Any] = {
            "values": f"*{variant}", "scale": "*fp32", "rows": f"*{kind}", "columns": f"*{kind}", "height": "i32",
            "width": "i32", "LIMIT": limit, "ROWS": True, "COLUMNS": True, "TILE": TILE,
        }  # fmt: skip
        # E4M3 needs sm_89 in Triton, FP8 GEMMs need it in cuBLAS.
        specs.append(Specification(cast_tile, variant, arguments, WARPS, ("height", "width"), 89))
    return specs
