"""Loss and gradient of rows of logits, and dropout, residual sum and norm in Triton: compiled, and interpreted."""

from typing import Any, List, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from benchmarks.common.torch.kernels import OPTIONS, Specification, power_of_two

BLOCK = 4096  # maximum columns per program
WARPS = 8
JOIN_WARPS = 4
PROGRAMS = 512  # programs in a norm's backward pass, with partial sums for weight and bias per program


@triton.jit
def smoothed_rows(logits, targets, losses, columns, smoothing, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    # One row: the smoothed loss; with GRADIENT, the logits are overwritten with d loss / d logits.
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * columns
    largest = -float("inf")
    total = 0.0
    summed = 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
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
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            there = column < columns
            value = tl.load(first + column, mask=there, other=0.0).to(tl.float32)
            gradient = tl.exp(value - log_total) - smoothing / columns
            gradient = tl.where(column == target, gradient - (1.0 - smoothing), gradient)
            tl.store(first + column, gradient.to(logits.dtype.element_ty), mask=there)


def row_loss(
    logits: torch.Tensor, targets: torch.Tensor, smoothing: float, with_gradient: bool
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    # See loss.row_loss; the gradient overwrites the logits.
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        smoothed_rows[(rows,)](
            logits, targets, losses, columns, smoothing, GRADIENT=with_gradient,
            BLOCK=min(BLOCK, power_of_two(columns)), num_warps=WARPS, **OPTIONS,
        )  # fmt: skip
    return losses.sum(), logits if with_gradient else None


@triton.jit
def _keep_mask(seed, row, column, WIDTH: tl.constexpr, dropout):
    # Dropout mask: a reproducible hash of seed and position (Chris Wellons' lowbias32, twice).
    number = (row * WIDTH + column).to(tl.uint32)
    for _ in tl.static_range(2):
        number = (number ^ (number >> 16)) * 0x21F0AAAD
        number = (number ^ (number >> 15)) * 0xD35A2D97
        number = (number ^ (number >> 15)) ^ seed
    # Of 24 bits, which fp32 has exactly.
    return (number >> 8).to(tl.int32).to(tl.float32) * (1.0 / (1 << 24)) >= dropout


@triton.jit
def join_forward(
    residual, update, weight, bias, seed, summed, normed, means, scales, epsilon, dropout, WIDTH: tl.constexpr,
    DROPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = column < WIDTH
    added = tl.load(update + row * WIDTH + column, mask=there, other=0.0).to(tl.float32)
    if DROPS:
        keep_mask = _keep_mask(tl.load(seed).to(tl.uint32), row, column, WIDTH, dropout)
        added = tl.where(keep_mask, added / (1.0 - dropout), 0.0)
    value = added + tl.load(residual + row * WIDTH + column, mask=there, other=0.0).to(tl.float32)
    # Normalize the rounded sum, as stored.
    rounded = value.to(summed.dtype.element_ty)
    tl.store(summed + row * WIDTH + column, rounded, mask=there)
    value = rounded.to(tl.float32)
    mean = tl.sum(value, axis=0) / WIDTH
    centred = tl.where(there, value - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / WIDTH + epsilon)
    factor = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    result = centred * scale * factor + shift
    tl.store(normed + row * WIDTH + column, result.to(normed.dtype.element_ty), mask=there)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)


@triton.jit
def join_backward(
    by_summed, by_normed, summed, weight, seed, means, scales, of_residual, of_found, of_weight, of_bias, rows, dropout,
    WIDTH: tl.constexpr, DROPS: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A strided set of rows: d norm (arXiv 1607.06450), plus the gradient of the sum if GIVEN.
    column = tl.arange(0, BLOCK)
    there = column < WIDTH
    factor = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    by_weight = tl.zeros([BLOCK], tl.float32)
    by_bias = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64)
    for turn in range(tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))):
        row = first + turn * tl.num_programs(0)
        scale = tl.load(scales + row)
        value = tl.load(summed + row * WIDTH + column, mask=there, other=0.0).to(tl.float32)
        unit = tl.where(there, (value - tl.load(means + row)) * scale, 0.0)
        grad_normed = tl.load(by_normed + row * WIDTH + column, mask=there, other=0.0).to(tl.float32)
        by_weight += grad_normed * unit
        by_bias += grad_normed
        inner = grad_normed * factor
        gradient = scale * (inner - tl.sum(inner, axis=0) / WIDTH - unit * (tl.sum(inner * unit, axis=0) / WIDTH))
        if GIVEN:
            gradient += tl.load(by_summed + row * WIDTH + column, mask=there, other=0.0).to(tl.float32)
        tl.store(of_residual + row * WIDTH + column, gradient.to(of_residual.dtype.element_ty), mask=there)
        if DROPS:
            keep_mask = _keep_mask(tl.load(seed).to(tl.uint32), row, column, WIDTH, dropout)
            gradient = tl.where(keep_mask, gradient / (1.0 - dropout), 0.0)
            tl.store(of_found + row * WIDTH + column, gradient.to(of_found.dtype.element_ty), mask=there)
    offset = tl.program_id(0) * WIDTH + column
    tl.store(of_weight + offset, by_weight, mask=there)
    tl.store(of_bias + offset, by_bias, mask=there)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual: torch.Tensor,
        update: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        epsilon: float,
        dropout: float,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        residual, update = residual.contiguous(), update.contiguous()
        width, rows = residual.shape[-1], residual.numel() // residual.shape[-1]
        summed, normed = torch.empty_like(residual), torch.empty_like(residual)
        means, scales = residual.new_empty(2, rows, dtype=torch.float32).unbind(0)
        # Generated on the device, without synchronization; checkpoints have the generator's state, so a resumed run has
        # the same masks.
        seed = torch.randint(1 << 31, (1,), device=residual.device) if dropout else means
        ctx.constants = {"WIDTH": width, "DROPS": dropout > 0, "BLOCK": power_of_two(width)}
        if rows:
            join_forward[(rows,)](
                residual, update, weight, bias, seed, summed, normed, means, scales, epsilon, dropout,
                **ctx.constants, num_warps=JOIN_WARPS, **OPTIONS,
            )  # fmt: skip
        ctx.save_for_backward(summed, weight, seed, means, scales)
        ctx.dropout = dropout
        return summed, normed

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, by_summed: Optional[torch.Tensor], by_normed: Optional[torch.Tensor]
    ) -> Tuple[Optional[torch.Tensor], ...]:
        summed, weight, seed, means, scales = ctx.saved_tensors
        by_normed = torch.zeros_like(summed) if by_normed is None else by_normed.contiguous()
        grad_summed = by_normed if by_summed is None else by_summed.contiguous()
        of_residual, rows = torch.empty_like(summed), len(means)
        of_found = torch.empty_like(summed) if ctx.dropout else of_residual
        programs = min(rows, PROGRAMS)
        of_weight, of_bias = weight.new_zeros(2, programs, len(weight), dtype=torch.float32).unbind(0)
        if rows:
            join_backward[(programs,)](
                grad_summed, by_normed, summed, weight, seed, means, scales, of_residual, of_found, of_weight, of_bias,
                rows, ctx.dropout, **ctx.constants, GIVEN=by_summed is not None, num_warps=JOIN_WARPS, **OPTIONS,
            )  # fmt: skip
        sums = (partial_sum.sum(0).to(weight.dtype) for partial_sum in (of_weight, of_bias))
        return (of_residual, of_found, *sums, None, None)


join = _Join.apply


def specifications() -> List[Specification]:
    # All kernels in all types: the loss with a vocabulary of thousands, with and without the gradient, and the norm at
    # the submitted width.
    examples = []
    for dtype in ("fp32", "fp16", "bf16"):
        for gradient in (True, False):
            loss = {
                "logits": f"*{dtype}", "targets": "*i64", "losses": "*fp32", "columns": "i32", "smoothing": "fp32",
                "GRADIENT": gradient, "BLOCK": BLOCK,
            }  # fmt: skip
            name = f"{dtype}{'' if gradient else ', loss alone'}"
            examples.append(Specification(smoothed_rows, name, loss, WARPS, divisible=("columns",)))
        constants = {"WIDTH": 1024, "DROPS": True, "BLOCK": 1024}
        sums = {"means": "*fp32", "scales": "*fp32"}
        forward = {
            **dict.fromkeys(("residual", "update", "weight", "bias", "summed", "normed"), f"*{dtype}"),
            **sums, "seed": "*i64", "epsilon": "fp32", "dropout": "fp32", **constants,
        }  # fmt: skip
        names = ("by_summed", "by_normed", "summed", "weight", "of_residual", "of_found")
        backward = {
            **dict.fromkeys(names, f"*{dtype}"), "of_weight": "*fp32", "of_bias": "*fp32", **sums,
            "seed": "*i64", "rows": "i32", "dropout": "fp32", **constants, "GIVEN": True,
        }  # fmt: skip
        for kernel, arguments in ((join_forward, forward), (join_backward, backward)):
            ordered = {name: arguments[name] for name in kernel.arg_names}
            examples.append(Specification(kernel, dtype, ordered, JOIN_WARPS))
    return examples
