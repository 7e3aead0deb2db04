"""Suppression of overlapping boxes in Triton. Compiled for GPUs, run in Triton's interpreter and on an H200."""

from typing import List

import torch
import triton
import triton.language as tl

from benchmarks.common.torch.kernels import OPTIONS, Specification, power_of_two

BITS = 32  # boxes per word, and rows per program
MIN_WORDS = 8  # for all groups of up to 256 boxes
WARPS = 1
# Group sizes vary between batches: do not compile kernels for 1, multiples of 16 and other sizes.
UNSPECIALIZED = ["count", "words_per_row"]


@triton.jit
def _corners(boxes, mask):
    # Left, top, right and bottom of ``boxes``, pointers to the first coordinate
    x0 = tl.load(boxes, mask=mask, other=0.0)
    y0 = tl.load(boxes + 1, mask=mask, other=0.0)
    x1 = tl.load(boxes + 2, mask=mask, other=0.0)
    y1 = tl.load(boxes + 3, mask=mask, other=0.0)
    return x0, y0, x1, y1


@triton.jit(do_not_specialize=UNSPECIALIZED)
def overlap_bits(boxes, bits, count, words_per_row, factor, BITS: tl.constexpr):
    """Set bits[group, i, w]: which boxes of word w overlap box i of the group. Words before i's word are not set."""
    group = tl.program_id(0).to(tl.int64)
    word = tl.program_id(2)
    if word >= tl.program_id(1):
        row = tl.program_id(1) * BITS + tl.arange(0, BITS)
        column = word * BITS + tl.arange(0, BITS)
        boxes += group * count * 4
        has_row = row < count
        x0, y0, x1, y1 = _corners(boxes + row * 4, has_row)
        other_x0, other_y0, other_x1, other_y1 = _corners(boxes + column * 4, column < count)
        width = tl.minimum(x1[:, None], other_x1[None, :]) - tl.maximum(x0[:, None], other_x0[None, :])
        height = tl.minimum(y1[:, None], other_y1[None, :]) - tl.maximum(y0[:, None], other_y0[None, :])
        intersection = tl.maximum(width, 0.0) * tl.maximum(height, 0.0)
        area = (x1 - x0) * (y1 - y0) * factor
        other_area = (other_x1 - other_x0) * (other_y1 - other_y0) * factor
        is_overlapping = intersection > area[:, None] + other_area[None, :]
        packed = tl.sum(is_overlapping.to(tl.int32) << tl.arange(0, BITS)[None, :], axis=1)
        tl.store(bits + (group * count + row) * words_per_row + word, packed, mask=has_row)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def greedy(bits, alive, keep, count, words_per_row, WORDS: tl.constexpr, BITS: tl.constexpr):
    """Process a group box by box: keep boxes that are alive and not removed, and remove the boxes that they overlap."""
    group = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, WORDS)
    removed = tl.zeros([WORDS], tl.int32)
    for row in range(count):
        own_word = row // BITS
        is_removed = (tl.sum(tl.where(word == own_word, removed, 0), axis=0) >> (row % BITS)) & 1
        is_kept = tl.load(alive + group * count + row).to(tl.int32) * (1 - is_removed)
        tl.store(keep + group * count + row, is_kept.to(tl.uint8))
        if is_kept > 0:
            mask = (word >= own_word) & (word < words_per_row)
            removed |= tl.load(bits + (group * count + row) * words_per_row + word, mask=mask, other=0)


def nms_mask(boxes: torch.Tensor, alive: torch.Tensor, threshold: float) -> torch.Tensor:
    groups, count = alive.shape
    keep = torch.zeros_like(alive, dtype=torch.uint8)
    if not alive.numel():
        return keep.bool()
    words_per_row = triton.cdiv(count, BITS)
    bits = torch.empty(groups, count, words_per_row, dtype=torch.int32, device=boxes.device)
    factor = threshold / (1 + threshold)
    overlap_bits[(groups, words_per_row, words_per_row)](
        boxes.float().contiguous(), bits, count, words_per_row, factor, BITS=BITS, num_warps=WARPS, **OPTIONS
    )
    greedy[(groups,)](
        bits, alive.to(torch.uint8), keep, count, words_per_row, WORDS=power_of_two(words_per_row, MIN_WORDS),
        BITS=BITS, num_warps=WARPS, **OPTIONS,
    )  # fmt: skip
    return keep.bool()


def specifications() -> List[Specification]:
    """Return all kernels at the sizes of the submissions: 2,000 boxes per group."""
    sizes = {"count": "i32", "words_per_row": "i32"}
    pairs = {"boxes": "*fp32", "bits": "*i32", **sizes, "factor": "fp32", "BITS": BITS}
    scan = {"bits": "*i32", "alive": "*u8", "keep": "*u8", **sizes, "WORDS": 64, "BITS": BITS}
    return [Specification(overlap_bits, "fp32", pairs, WARPS), Specification(greedy, "fp32", scan, WARPS)]
