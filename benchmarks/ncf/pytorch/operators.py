"""A rank's samples in an epoch, by position; for the Triton kernel see common/torch/kernels.py.

Samples are an integer function of position and the epoch's keys: a rank computes only its samples, and all devices
and implementations return the same.
"""

import math
from typing import Any, NamedTuple, Tuple

import torch

from benchmarks.common.torch import kernels

# Rounds of the Feistel network for the order: with 4, neighbours in orders of 1,000 are less uniform than with
# randperm, with 6 they are equally uniform
ROUNDS = 6
LOW = (1 << 32) - 1


class Index(NamedTuple):
    """Training pairs, sorted by user and item, with an index to find items without a training pair."""

    users: torch.Tensor  # int32 (pairs,)
    items: torch.Tensor  # int32 (pairs,)
    first: torch.Tensor  # int64 (users,): first pair by user
    not_met: torch.Tensor  # int64 (users,): items that a user does not train on
    keys: torch.Tensor  # int64 (pairs,): user * all_items + item - rank of the pair among the user's pairs
    all_items: int


Samples = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # users int64, items int64, labels float32


def hash_32(number: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a 32-bit hash of ``number``, int64 below 2 ** 32 (Chris Wellons' lowbias32 of number ^ key)."""
    number = number ^ key
    number = ((number ^ (number >> 16)) * 0x21F0AAAD) & LOW
    number = ((number ^ (number >> 15)) * 0xD35A2D97) & LOW
    return number ^ (number >> 15)


def sides(count: int) -> Tuple[int, int]:
    """Return two factors with a product of at least ``count``: the ranges of the halves in the Feistel network."""
    first = math.isqrt(count - 1) + 1
    return first, -(-count // first)


def _permute(positions: torch.Tensor, a: int, b: int, keys: torch.Tensor) -> torch.Tensor:
    high, low = positions // b, positions % b
    for number in range(ROUNDS):
        if number % 2 == 0:
            high = (high + (hash_32(low, keys[number]) * a >> 32)) % a
        else:
            low = (low + (hash_32(high, keys[number]) * b >> 32)) % b
    return high * b + low


def detours(count: int, keys: torch.Tensor) -> torch.Tensor:
    """Return the replacement below ``count`` for the surplus positions from ``count`` to a * b.

    The permutation with a * b elements is iterated until the result is below ``count``, by pointer doubling with a
    fixed number of iterations, without synchronization. Cycles within the surplus are never used.
    """
    a, b = sides(count)
    mapped = _permute(torch.arange(count, a * b, device=keys.device), a, b, keys)
    for _ in range((a * b - count).bit_length()):
        mapped = torch.where(mapped < count, mapped, mapped[(mapped - count).clamp_(min=0)])
    return mapped


def shuffle(positions: torch.Tensor, count: int, keys: torch.Tensor) -> torch.Tensor:
    """Return the sample index at ``positions``, int64 below ``count``: a permutation of all samples."""
    mapped, beyond = _permute(positions, *sides(count), keys), detours(count, keys)
    return torch.where(mapped < count, mapped, beyond[(mapped - count).clamp_(min=0)]) if len(beyond) else mapped


def samples(positions: torch.Tensor, count: int, keys: torch.Tensor, index: Index) -> Samples:
    """Return the samples at ``positions`` in an epoch with ``count`` samples; the first samples are the training pairs.

    ``keys``: int64 (ROUNDS + 1,) below 2 ** 32, different per epoch.
    """
    pairs = len(index.users)
    indices = shuffle(positions, count, keys)
    pair, is_positive = indices % pairs, indices < pairs
    users = index.users[pair].long()
    # An item without a training pair of the user, from 32 random bits
    number = hash_32(indices, keys[ROUNDS]) * index.not_met[users] >> 32
    below = torch.searchsorted(index.keys, users * index.all_items + number, right=True)
    negatives = number + below - index.first[users]
    return users, torch.where(is_positive, index.items[pair].long(), negatives), is_positive.float()


def build_index(users: torch.Tensor, items: torch.Tensor, all_users: int, all_items: int) -> Index:
    """Return the index of pairs (int32, sorted by user and item). New memory, except for the pairs."""
    met = torch.bincount(users, minlength=all_users)
    first = torch.cumsum(met, 0) - met
    # For n rated items, sorted as p_0 < p_1 ..., the r-th unrated item is r plus the number of j with p_j - j <= r:
    # nothing is rejected, so samples are independent.
    rank = torch.arange(len(users), device=users.device) - first[users.long()]
    return Index(users, items, first, all_items - met, users.long() * all_items + items - rank, all_items)


def _example(draws: Any, device: torch.device, dtype: torch.dtype, users: int, items: int, pairs: int) -> kernels.Call:
    generator = torch.Generator(device).manual_seed(1)
    pair_keys = torch.randint(users * items, (pairs,), generator=generator, device=device).unique()
    index = build_index((pair_keys // items).int(), (pair_keys % items).int(), users, items)
    keys = torch.randint(1 << 32, (ROUNDS + 1,), generator=generator, device=device)
    count = 5 * len(pair_keys)
    positions = torch.arange(count // 3, count, device=device)
    return lambda: list(draws(positions, count, keys, index))


OPERATORS = {
    "samples": kernels.Operator(
        samples,
        "benchmarks.ncf.pytorch.kernels:samples",
        _example,
        ({"users": 7, "items": 40, "pairs": 130}, {"users": 90, "items": 300, "pairs": 2}),
    )
}
