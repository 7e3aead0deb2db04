"""The attention's weights in Triton, see attention.py. Compiled for GPUs and run in Triton's interpreter."""

from typing import Any, List, Tuple

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from benchmarks.common.torch.kernels import OPTIONS, Specification

# Tile of query positions, key positions and columns per program: 32 tanh values per thread.
ROWS, OTHERS, BLOCK, WARPS = 8, 16, 32, 4


@triton.jit
def _tanh(row, other, positions, place_there, other_positions, other_there, column, column_there, WIDTH: tl.constexpr):
    # (ROWS, OTHERS, BLOCK) of tanh(row + other), in fp32, without overflow of the exponential.
    mask = place_there[:, None] & column_there[None, :]
    left_rows = tl.load(row + positions[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
    mask = other_there[:, None] & column_there[None, :]
    right = tl.load(other + other_positions[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * (left_rows[:, None, :] + right[None, :, :])))


# Lengths vary between batches: do not compile kernels for 1, multiples of 16 and other lengths.
@triton.jit(do_not_specialize=["targets", "sources"])
def attention_weights(
    queries, keys, vector, padding, weights, targets, sources, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    OTHERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A block of target positions in a sentence: scores, then their softmax in place.
    sentence = tl.program_id(0).to(tl.int64)
    positions = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    place_there = positions < targets
    out = weights + (sentence * targets + positions)[:, None] * sources
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, sources, OTHERS):
        other_positions = start + tl.arange(0, OTHERS)
        is_token = tl.load(padding + sentence * sources + other_positions, mask=other_positions < sources, other=1) == 0
        score = tl.full([ROWS, OTHERS], -float("inf"), tl.float32)
        # Skip padding positions.
        if tl.sum(is_token.to(tl.int32), axis=0) > 0:
            summed = tl.zeros([ROWS, OTHERS, BLOCK], tl.float32)
            for first in range(0, WIDTH, BLOCK):
                column = first + tl.arange(0, BLOCK)
                column_there = column < WIDTH
                tanh = _tanh(queries + sentence * targets * WIDTH, keys + sentence * sources * WIDTH, positions,
                             place_there, other_positions, is_token, column, column_there, WIDTH)  # fmt: skip
                factor = tl.load(vector + column, mask=column_there, other=0.0).to(tl.float32)
                summed += tanh * factor[None, None, :]
            score = tl.where(is_token[None, :], tl.sum(summed, axis=2), -float("inf"))
            higher = tl.maximum(largest, tl.max(score, axis=1))
            total = total * tl.exp(largest - higher) + tl.sum(tl.exp(score - higher[:, None]), axis=1)
            largest = higher
        tl.store(
            out + other_positions[None, :], score, mask=place_there[:, None] & (other_positions < sources)[None, :]
        )
    # Wait for writes of other threads.
    tl.debug_barrier()
    for start in range(0, sources, OTHERS):
        other_positions = start + tl.arange(0, OTHERS)
        there = place_there[:, None] & (other_positions < sources)[None, :]
        score = tl.load(out + other_positions[None, :], mask=there, other=-float("inf"))
        tl.store(out + other_positions[None, :], tl.exp(score - largest[:, None]) / total[:, None], mask=there)


@triton.jit(do_not_specialize=["row_count", "other_count"])
def attention_gradients(
    rows, others, vector, gradient, of_rows, of_vector, row_count, other_count, WIDTH: tl.constexpr,
    WITH_VECTOR: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A tile in a sentence, queries over all keys (WITH_VECTOR) or keys over all queries: d tanh = 1 - tanh ** 2.
    row_stride = other_count if WITH_VECTOR else 1  # of ``gradient`` (queries, keys)
    other_stride = 1 if WITH_VECTOR else row_count
    sentence = tl.program_id(0).to(tl.int64)
    positions = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    place_there = positions < row_count
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    column_there = column < WIDTH
    summed = tl.zeros([ROWS, OTHERS, BLOCK], tl.float32)
    by_vector = tl.zeros([ROWS, OTHERS, BLOCK], tl.float32)
    grad_ptr = gradient + sentence * row_count * other_count
    for start in range(0, other_count, OTHERS):
        against = start + tl.arange(0, OTHERS)
        other_there = against < other_count
        here = tl.load(grad_ptr + positions[:, None] * row_stride + against[None, :] * other_stride,
                       mask=place_there[:, None] & other_there[None, :], other=0.0)  # fmt: skip
        # Gradients are 0 in the padding of both sentences; NaN is not skipped.
        if tl.sum(tl.sum((here != 0.0).to(tl.int32), axis=1), axis=0) > 0:
            tanh = _tanh(rows + sentence * row_count * WIDTH, others + sentence * other_count * WIDTH, positions,
                         place_there, against, other_there, column, column_there, WIDTH)  # fmt: skip
            summed += here[:, :, None] * (1.0 - tanh * tanh)
            if WITH_VECTOR:
                by_vector += here[:, :, None] * tanh
    factor = tl.load(vector + column, mask=column_there, other=0.0).to(tl.float32)
    grad_rows = tl.sum(summed, axis=1) * factor[None, :]
    out = of_rows + (sentence * row_count + positions)[:, None] * WIDTH + column[None, :]
    tl.store(out, grad_rows.to(of_rows.dtype.element_ty), mask=place_there[:, None] & column_there[None, :])
    if WITH_VECTOR:
        offset = sentence * tl.num_programs(1) + tl.program_id(1)
        tl.store(of_vector + offset * WIDTH + column, tl.sum(tl.sum(by_vector, axis=1), axis=0), mask=column_there)


# See attention.plain.
class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: torch.Tensor, keys: torch.Tensor, vector: torch.Tensor, padding: torch.Tensor
    ) -> torch.Tensor:
        queries, keys = queries.contiguous(), keys.contiguous()
        (sentences, targets, width), sources = queries.shape, keys.shape[1]
        weights = queries.new_empty(sentences, targets, sources, dtype=torch.float32)
        attention_weights[(sentences, triton.cdiv(targets, ROWS))](
            queries, keys, vector, padding.contiguous(), weights, targets, sources,
            WIDTH=width, ROWS=ROWS, OTHERS=OTHERS, BLOCK=BLOCK, num_warps=WARPS, **OPTIONS,
        )  # fmt: skip
        ctx.save_for_backward(queries, keys, vector, weights)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        queries, keys, vector, weights = ctx.saved_tensors
        of_scores = weights * (gradient - (gradient * weights).sum(2, keepdim=True))
        (sentences, targets, width), sources = queries.shape, keys.shape[1]
        of_queries, of_keys = torch.empty_like(queries), torch.empty_like(keys)
        # Reduce over programs in fp32 in a fixed order.
        of_vector = queries.new_empty(sentences, triton.cdiv(targets, ROWS), width, dtype=torch.float32)
        launches = (
            (queries, keys, of_queries, (targets, sources), True),
            (keys, queries, of_keys, (sources, targets), False),
        )
        for rows, other_side, of_rows, sizes, with_vector in launches:
            attention_gradients[(sentences, triton.cdiv(sizes[0], ROWS), triton.cdiv(width, BLOCK))](
                rows, other_side, vector, of_scores, of_rows, of_vector, *sizes,
                WIDTH=width, WITH_VECTOR=with_vector, ROWS=ROWS, OTHERS=OTHERS, BLOCK=BLOCK, num_warps=WARPS,
                **OPTIONS,
            )  # fmt: skip
        return of_queries, of_keys, of_vector.sum((0, 1)).to(vector.dtype), None


weights = _Weights.apply


def specifications() -> List[Specification]:
    # All kernels at the submitted width, in all types.
    specs = []
    constants = {"WIDTH": 1024, "ROWS": ROWS, "OTHERS": OTHERS, "BLOCK": BLOCK}
    for dtype in ("fp32", "fp16", "bf16"):
        inputs = {"queries": f"*{dtype}", "keys": f"*{dtype}", "vector": f"*{dtype}", "padding": "*i1"}
        sizes = {"weights": "*fp32", "targets": "i32", "sources": "i32"}
        specs.append(Specification(attention_weights, dtype, {**inputs, **sizes, **constants}, WARPS))
        for name in ("queries", "keys"):
            pointers = {"rows": f"*{dtype}", "others": f"*{dtype}", "vector": f"*{dtype}", "gradient": "*fp32"}
            results = {"of_rows": f"*{dtype}", "of_vector": "*fp32", "row_count": "i32", "other_count": "i32"}
            arguments = {**pointers, **results, "WITH_VECTOR": name == "queries", **constants}
            specs.append(Specification(attention_gradients, f"{dtype}, of {name}", arguments, WARPS))
    return specs
