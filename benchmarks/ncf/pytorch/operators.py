"""The samples of an epoch that a rank trains on, by their places: with its Triton kernel, see common/torch/kernels.py.

What is drawn is a function of a sample's place and the epoch's keys, in whole numbers: a rank computes its own part
alone, and any device and implementation finds the same.
"""

import math
from typing import Any, NamedTuple, Tuple

import torch

from benchmarks.common.torch import kernels

# Of the Feistel network of an epoch's order: with 4 neighbours in orders of 1,000 are less even than randperm's, with 6
# as even.
ROUNDS = 6
LOW = (1 << 32) - 1


class Index(NamedTuple):
    """The training pairs, sorted by user and item, and what finds a user's items that are none of them."""

    users: torch.Tensor  # int32 (pairs,)
    items: torch.Tensor  # int32 (pairs,)
    first: torch.Tensor  # int64 (users,): the first pair of each user
    not_met: torch.Tensor  # int64 (users,): items that a user does not train on
    keys: torch.Tensor  # int64 (pairs,): user * all_items + item - place of the pair among the user's
    all_items: int


Samples = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # users int64, items int64, labels float32


def hashed(number: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return 32 bits for each of ``number``, int64 below 2 ** 32 (Chris Wellons' lowbias32 of number ^ key)."""
    number = number ^ key
    number = ((number ^ (number >> 16)) * 0x21F0AAAD) & LOW
    number = ((number ^ (number >> 15)) * 0xD35A2D97) & LOW
    return number ^ (number >> 15)


def sides(count: int) -> Tuple[int, int]:
    """Return two numbers whose product is ``count`` or little more: the halves of a place in the Feistel network."""
    first = math.isqrt(count - 1) + 1
    return first, -(-count // first)


def _permuted(places: torch.Tensor, a: int, b: int, keys: torch.Tensor) -> torch.Tensor:
    left, right = places // b, places % b
    for number in range(ROUNDS):
        if number % 2 == 0:
            left = (left + (hashed(right, keys[number]) * a >> 32)) % a
        else:
            right = (right + (hashed(left, keys[number]) * b >> 32)) % b
    return left * b + right


def detours(count: int, keys: torch.Tensor) -> torch.Tensor:
    """Return where each of the places from ``count`` on ends that a * b has too many: below ``count``.

    The permutation of a * b is followed until it comes back below ``count``, in as many doublings as the longest way
    can need; nothing waits for the device. What goes in circles is never asked for.
    """
    a, b = sides(count)
    found = _permuted(torch.arange(count, a * b, device=keys.device), a, b, keys)
    for _ in range((a * b - count).bit_length()):
        found = torch.where(found < count, found, found[(found - count).clamp_(min=0)])
    return found


def shuffled(places: torch.Tensor, count: int, keys: torch.Tensor) -> torch.Tensor:
    """Return which of ``count`` samples is at each of ``places``, int64 below ``count``: a permutation of them all."""
    found, beyond = _permuted(places, *sides(count), keys), detours(count, keys)
    return torch.where(found < count, found, beyond[(found - count).clamp_(min=0)]) if len(beyond) else found


def samples(places: torch.Tensor, count: int, keys: torch.Tensor, index: Index) -> Samples:
    """Return the samples at ``places`` of an epoch of ``count``, of which the first are the pairs themselves.

    ``keys`` int64 (ROUNDS + 1,) below 2 ** 32 are the epoch's.
    """
    pairs = len(index.users)
    mine = shuffled(places, count, keys)
    pair, is_positive = mine % pairs, mine < pairs
    users = index.users[pair].long()
    # For each user an item that the user does not train on, by 32 random bits.
    number = hashed(mine, keys[ROUNDS]) * index.not_met[users] >> 32
    below = torch.searchsorted(index.keys, users * index.all_items + number, right=True)
    drawn = number + below - index.first[users]
    return users, torch.where(is_positive, index.items[pair].long(), drawn), is_positive.float()


def index_of(users: torch.Tensor, items: torch.Tensor, all_users: int, all_items: int) -> Index:
    """Return the index of pairs (int32, sorted by user and item) with memory of its own, but for the pairs."""
    met = torch.bincount(users, minlength=all_users)
    first = torch.cumsum(met, 0) - met
    # Of n items met, sorted as p_0 < p_1 ..., the r-th item not met is r plus the number of j with p_j - j <= r: no
    # draw is thrown away, so nothing depends on what was drawn.
    place = torch.arange(len(users), device=users.device) - first[users.long()]
    return Index(users, items, first, all_items - met, users.long() * all_items + items - place, all_items)


def _example(draws: Any, device: torch.device, dtype: torch.dtype, users: int, items: int, pairs: int) -> kernels.Call:
    numbers = torch.Generator(device).manual_seed(1)
    chosen = torch.randint(users * items, (pairs,), generator=numbers, device=device).unique()
    index = index_of((chosen // items).int(), (chosen % items).int(), users, items)
    keys = torch.randint(1 << 32, (ROUNDS + 1,), generator=numbers, device=device)
    count = 5 * len(chosen)
    places = torch.arange(count // 3, count, device=device)
    return lambda: list(draws(places, count, keys, index))


OPERATORS = {
    "samples": kernels.Operator(
        samples,
        "benchmarks.ncf.pytorch.kernels:samples",
        _example,
        ({"users": 7, "items": 40, "pairs": 130}, {"users": 90, "items": 300, "pairs": 2}),
    )
}
