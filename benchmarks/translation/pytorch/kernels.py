"""Loss and gradient of rows of logits in Triton. Compiled for GPUs and run in Triton's interpreter."""

from typing import List, Optional, Tuple

import torch
import triton
import triton.language as tl

from benchmarks.common.torch.kernels import OPTIONS, Specification, power_of_two

BLOCK = 4096  # most columns that a program holds at a time
WARPS = 8


@triton.jit
def smoothed_rows(logits, targets, losses, columns, smoothing, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    # One row: its smoothed loss; with GRADIENT, its logits become d loss / d logits.
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * columns
    largest = -float("inf")
    total = 0.0
    summed = 0.0
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(first + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(value, axis=0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(value - higher), axis=0)
        summed += tl.sum(tl.where(column < columns, value, 0.0), axis=0)
        largest = higher
    target = tl.load(targets + row)
    at_target = tl.load(first + target).to(tl.float32)
    log_total = tl.log(total) + largest
    loss = (1.0 - smoothing) * (log_total - at_target) + smoothing * (log_total - summed / columns)
    tl.store(losses + row, loss)
    if GRADIENT:
        for begin in range(0, columns, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            there = column < columns
            value = tl.load(first + column, mask=there, other=0.0).to(tl.float32)
            gradient = tl.exp(value - log_total) - smoothing / columns
            gradient = tl.where(column == target, gradient - (1.0 - smoothing), gradient)
            tl.store(first + column, gradient.to(logits.dtype.element_ty), mask=there)


def row_loss(
    logits: torch.Tensor, targets: torch.Tensor, smoothing: float, with_gradient: bool
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    # See loss.row_loss; the gradient takes the place of the logits.
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        smoothed_rows[(rows,)](
            logits, targets, losses, columns, smoothing, GRADIENT=with_gradient,
            BLOCK=min(BLOCK, power_of_two(columns)), num_warps=WARPS, **OPTIONS,
        )  # fmt: skip
    return losses.sum(), logits if with_gradient else None


def specifications() -> List[Specification]:
    # The kernel with and without the gradient, in each type, at a vocabulary of thousands.
    return [
        Specification(
            smoothed_rows,
            f"{dtype}{'' if gradient else ', loss alone'}",
            {
                "logits": f"*{dtype}", "targets": "*i64", "losses": "*fp32", "columns": "i32", "smoothing": "fp32",
                "GRADIENT": gradient, "BLOCK": BLOCK,
            },
            WARPS,
            divisible=("columns",),
        )
        for dtype in ("fp32", "fp16", "bf16")
        for gradient in (True, False)
    ]  # fmt: skip
