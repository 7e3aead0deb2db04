"""Suppression of overlapping boxes in Triton. Compiled for GPUs, run in Triton's interpreter and on an H200."""

from typing import List

import torch
import triton
import triton.language as tl

from benchmarks.common.torch.kernels import OPTIONS, Specification, power_of_two

BITS = 32  # boxes of a word, and rows of a program
WARPS = 1


@triton.jit
def _corners(boxes, mask):
    # Left, top, right and bottom of ``boxes``, pointers to their first numbers
    left = tl.load(boxes, mask=mask, other=0.0)
    top = tl.load(boxes + 1, mask=mask, other=0.0)
    right = tl.load(boxes + 2, mask=mask, other=0.0)
    bottom = tl.load(boxes + 3, mask=mask, other=0.0)
    return left, top, right, bottom


@triton.jit
def overlap_bits(boxes, bits, count, words, share, BITS: tl.constexpr):
    """bits[group, i, w]: which of the boxes of word w overlap box i of their group; words before that of i are left."""
    group = tl.program_id(0).to(tl.int64)
    word = tl.program_id(2)
    if word >= tl.program_id(1):
        row = tl.program_id(1) * BITS + tl.arange(0, BITS)
        column = word * BITS + tl.arange(0, BITS)
        boxes += group * count * 4
        has_row = row < count
        left, top, right, bottom = _corners(boxes + row * 4, has_row)
        their_left, their_top, their_right, their_bottom = _corners(boxes + column * 4, column < count)
        width = tl.minimum(right[:, None], their_right[None, :]) - tl.maximum(left[:, None], their_left[None, :])
        height = tl.minimum(bottom[:, None], their_bottom[None, :]) - tl.maximum(top[:, None], their_top[None, :])
        both = tl.maximum(width, 0.0) * tl.maximum(height, 0.0)
        area = (right - left) * (bottom - top) * share
        their_area = (their_right - their_left) * (their_bottom - their_top) * share
        above = both > area[:, None] + their_area[None, :]
        packed = tl.sum(above.to(tl.int32) << tl.arange(0, BITS)[None, :], axis=1)
        tl.store(bits + (group * count + row) * words + word, packed, mask=has_row)


@triton.jit
def greedy(bits, alive, kept, count, words, WORDS: tl.constexpr, BITS: tl.constexpr):
    """One group: box by box, keep what is alive and not removed, and remove what it overlaps."""
    group = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, WORDS)
    removed = tl.zeros([WORDS], tl.int32)
    for row in range(count):
        own = row // BITS
        is_removed = (tl.sum(tl.where(word == own, removed, 0), axis=0) >> (row % BITS)) & 1
        stays = tl.load(alive + group * count + row).to(tl.int32) * (1 - is_removed)
        tl.store(kept + group * count + row, stays.to(tl.uint8))
        if stays > 0:
            mask = (word >= own) & (word < words)
            removed |= tl.load(bits + (group * count + row) * words + word, mask=mask, other=0)


def keep_of_groups(boxes: torch.Tensor, alive: torch.Tensor, threshold: float) -> torch.Tensor:
    groups, count = alive.shape
    kept = torch.zeros_like(alive, dtype=torch.uint8)
    if not alive.numel():
        return kept.bool()
    words = triton.cdiv(count, BITS)
    bits = torch.empty(groups, count, words, dtype=torch.int32, device=boxes.device)
    share = threshold / (1 + threshold)
    overlap_bits[(groups, words, words)](
        boxes.float().contiguous(), bits, count, words, share, BITS=BITS, num_warps=WARPS, **OPTIONS
    )
    greedy[(groups,)](
        bits, alive.to(torch.uint8), kept, count, words, WORDS=power_of_two(words, 1), BITS=BITS,
        num_warps=WARPS, **OPTIONS,
    )  # fmt: skip
    return kept.bool()


def specifications() -> List[Specification]:
    """Every kernel at the sizes of the submissions: 2,000 boxes of a group."""
    sizes = {"count": "i32", "words": "i32"}
    pairs = {"boxes": "*fp32", "bits": "*i32", **sizes, "share": "fp32", "BITS": BITS}
    scan = {"bits": "*i32", "alive": "*u8", "kept": "*u8", **sizes, "WORDS": 64, "BITS": BITS}
    return [Specification(overlap_bits, "fp32", pairs, WARPS), Specification(greedy, "fp32", scan, WARPS)]
