"""operators.samples in Triton: one pass over the positions. Compiled for GPUs and run in Triton's interpreter."""

from typing import List

import torch
import triton
import triton.language as tl

from benchmarks.common.torch.kernels import OPTIONS, Specification
from benchmarks.ncf.pytorch.operators import ROUNDS, Index, Samples, detours, sides

BLOCK, WARPS = 512, 4


@triton.jit
def _hash(number, key):
    # See operators.hash_32; in 32 bits, and back in 64.
    number = number.to(tl.uint32) ^ key.to(tl.uint32)
    number = (number ^ (number >> 16)) * 0x21F0AAAD
    number = (number ^ (number >> 15)) * 0xD35A2D97
    return (number ^ (number >> 15)).to(tl.int64)


@triton.jit
def draw_samples(
    positions, overflow, keys, pair_users, pair_items, first, not_met, sorted_keys, users, items, labels, local_count,
    count, a, b, pairs, all_items, all_users, ROUNDS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The order by a Feistel network, then the user's r-th item that is not met by a search in the user's pairs.
    out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = out < local_count
    position = tl.load(positions + out, mask=mask, other=0)
    high_half = position // b
    low_half = position - high_half * b
    for number in tl.static_range(ROUNDS):
        key = tl.load(keys + number)
        if number % 2 == 0:
            high_half += (_hash(low_half, key) * a) >> 32
            high_half = tl.where(high_half >= a, high_half - a, high_half)
        else:
            low_half += (_hash(high_half, key) * b) >> 32
            low_half = tl.where(low_half >= b, low_half - b, low_half)
    index = high_half * b + low_half
    index = tl.where(index < count, index, tl.load(overflow + index - count, mask=mask & (index >= count), other=0))
    positive = index < pairs
    pair = index % pairs
    user = tl.load(pair_users + pair, mask=mask, other=0).to(tl.int64)
    start = tl.load(first + user, mask=mask, other=0)
    end = tl.load(first + user + 1, mask=mask & (user + 1 < all_users), other=0)
    end = tl.where(user + 1 < all_users, end, pairs)
    number = (_hash(index, tl.load(keys + ROUNDS)) * tl.load(not_met + user, mask=mask, other=0)) >> 32
    lower = start
    upper = tl.where(positive, start, end)
    for _ in range(STEPS):
        middle = (lower + upper) // 2
        is_open = lower < upper
        key_at = tl.load(sorted_keys + middle, mask=mask & is_open, other=0)
        is_below = key_at <= user * all_items + number
        lower = tl.where(is_open & is_below, middle + 1, lower)
        upper = tl.where(is_open & (is_below == 0), middle, upper)
    met = tl.load(pair_items + pair, mask=mask & positive, other=0).to(tl.int64)
    tl.store(users + out, user, mask=mask)
    tl.store(items + out, tl.where(positive, met, number + lower - start), mask=mask)
    tl.store(labels + out, positive.to(tl.float32), mask=mask)


def samples(positions: torch.Tensor, count: int, keys: torch.Tensor, index: Index) -> Samples:
    # See operators.samples.
    users, items = torch.empty_like(positions), torch.empty_like(positions)
    labels = torch.empty(len(positions), device=positions.device)
    a, b = sides(count)
    draw_samples[(triton.cdiv(len(positions), BLOCK),)](
        positions, detours(count, keys), keys, index.users, index.items, index.first, index.not_met, index.keys, users,
        items, labels, len(positions), count, a, b, len(index.users), index.all_items, len(index.first),
        ROUNDS=ROUNDS, STEPS=index.all_items.bit_length(), BLOCK=BLOCK, num_warps=WARPS, **OPTIONS,
    )  # fmt: skip
    return users, items, labels


def specifications() -> List[Specification]:
    # At the sizes of ml-20m: 26,744 items.
    tensors = dict.fromkeys(
        ("positions", "overflow", "keys", "first", "not_met", "sorted_keys", "users", "items"), "*i64"
    )
    numbers = ("local_count", "count", "a", "b", "pairs", "all_items", "all_users")
    arguments = {
        **tensors, **dict.fromkeys(("pair_users", "pair_items"), "*i32"), "labels": "*fp32",
        **dict.fromkeys(numbers, "i32"), "ROUNDS": ROUNDS, "STEPS": 15, "BLOCK": BLOCK,
    }  # fmt: skip
    return [Specification(draw_samples, "", {name: arguments[name] for name in draw_samples.arg_names}, WARPS)]
