"""operators.samples in Triton: one pass over the places. Compiled for GPUs and run in Triton's interpreter."""

from typing import List

import torch
import triton
import triton.language as tl

from benchmarks.common.torch.kernels import OPTIONS, Specification
from benchmarks.ncf.pytorch.operators import ROUNDS, Index, Samples, detours, sides

BLOCK, WARPS = 512, 4


@triton.jit
def _hashed(number, key):
    # See operators.hashed; in 32 bits, and back in 64.
    number = number.to(tl.uint32) ^ key.to(tl.uint32)
    number = (number ^ (number >> 16)) * 0x21F0AAAD
    number = (number ^ (number >> 15)) * 0xD35A2D97
    return (number ^ (number >> 15)).to(tl.int64)


@triton.jit
def draw_samples(
    places, beyond, keys, pair_users, pair_items, first, not_met, sorted_keys, users, items, labels, wanted, count,
    a, b, pairs, all_items, all_users, ROUNDS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The order by a Feistel network, then the user's r-th item that is not met by a search in the user's pairs.
    out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = out < wanted
    place = tl.load(places + out, mask=there, other=0)
    left = place // b
    right = place - left * b
    for number in tl.static_range(ROUNDS):
        key = tl.load(keys + number)
        if number % 2 == 0:
            left += (_hashed(right, key) * a) >> 32
            left = tl.where(left >= a, left - a, left)
        else:
            right += (_hashed(left, key) * b) >> 32
            right = tl.where(right >= b, right - b, right)
    mine = left * b + right
    mine = tl.where(mine < count, mine, tl.load(beyond + mine - count, mask=there & (mine >= count), other=0))
    positive = mine < pairs
    pair = mine % pairs
    user = tl.load(pair_users + pair, mask=there, other=0).to(tl.int64)
    begin = tl.load(first + user, mask=there, other=0)
    end = tl.load(first + user + 1, mask=there & (user + 1 < all_users), other=0)
    end = tl.where(user + 1 < all_users, end, pairs)
    number = (_hashed(mine, tl.load(keys + ROUNDS)) * tl.load(not_met + user, mask=there, other=0)) >> 32
    low = begin
    high = tl.where(positive, begin, end)
    for _ in range(STEPS):
        middle = (low + high) // 2
        is_open = low < high
        found = tl.load(sorted_keys + middle, mask=there & is_open, other=0)
        is_below = found <= user * all_items + number
        low = tl.where(is_open & is_below, middle + 1, low)
        high = tl.where(is_open & (is_below == 0), middle, high)
    met = tl.load(pair_items + pair, mask=there & positive, other=0).to(tl.int64)
    tl.store(users + out, user, mask=there)
    tl.store(items + out, tl.where(positive, met, number + low - begin), mask=there)
    tl.store(labels + out, positive.to(tl.float32), mask=there)


def samples(places: torch.Tensor, count: int, keys: torch.Tensor, index: Index) -> Samples:
    # See operators.samples.
    users, items = torch.empty_like(places), torch.empty_like(places)
    labels = torch.empty(len(places), device=places.device)
    a, b = sides(count)
    draw_samples[(triton.cdiv(len(places), BLOCK),)](
        places, detours(count, keys), keys, index.users, index.items, index.first, index.not_met, index.keys, users,
        items, labels, len(places), count, a, b, len(index.users), index.all_items, len(index.first),
        ROUNDS=ROUNDS, STEPS=index.all_items.bit_length(), BLOCK=BLOCK, num_warps=WARPS, **OPTIONS,
    )  # fmt: skip
    return users, items, labels


def specifications() -> List[Specification]:
    # At the sizes of ml-20m: 26,744 items.
    tensors = dict.fromkeys(("places", "beyond", "keys", "first", "not_met", "sorted_keys", "users", "items"), "*i64")
    numbers = ("wanted", "count", "a", "b", "pairs", "all_items", "all_users")
    arguments = {
        **tensors, **dict.fromkeys(("pair_users", "pair_items"), "*i32"), "labels": "*fp32",
        **dict.fromkeys(numbers, "i32"), "ROUNDS": ROUNDS, "STEPS": 15, "BLOCK": BLOCK,
    }  # fmt: skip
    return [Specification(draw_samples, "", {name: arguments[name] for name in draw_samples.arg_names}, WARPS)]
