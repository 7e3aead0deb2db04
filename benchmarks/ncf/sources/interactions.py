"""Interactions of users with items, split into training pairs and one held-out item a user."""

from __future__ import annotations

from typing import NamedTuple, Tuple

import numpy as np

from benchmarks.common.data.problem import Problem

MLPERF_NEGATIVES = 999
"""Items that each held-out item is ranked among (preproc_hp_num_eval in the logs of v0.5)."""
CHUNK_USERS = 4096


class Interactions(NamedTuple):
    """A data set before it is written; ids count from 0 without gaps."""

    name: str
    items: int
    train_users: np.ndarray
    """(pairs,), sorted by user, then item."""
    train_items: np.ndarray
    """(pairs,)"""
    test_items: np.ndarray
    """(users,): the held-out item of each user."""
    negatives: np.ndarray
    """(users, negatives): what it is ranked among; a draw may repeat an item."""
    made: str
    """How it came about, in words."""

    def notes(self) -> Tuple[str, ...]:
        """Name held-out items that no user trains on, whose embeddings stay as they were drawn."""
        untrained = np.setdiff1d(self.test_items, self.train_items)
        text = f"{len(untrained):,} of {self.items:,} items are held out and never trained on (the first is "
        return (f"{text}{untrained[0]}): nothing can be learned about them",) if len(untrained) else ()


def leave_one_out(
    name: str, users: np.ndarray, items: np.ndarray, times: np.ndarray, item_count: int, made: str, seed: int
) -> Interactions:
    """Hold out each user's last item in time (He et al. 2017, section 4.1), and draw what it is ranked among.

    Of ratings given in the same second the one that comes last in the source counts as the last.
    """
    single = int((np.bincount(users) == 1).sum())
    if single:
        raise Problem(
            f"{single:,} users with a single rating",
            "at least two ratings of each user: one to train on, one to hold out",
            "remove these users from the source",
        )
    order = np.lexsort((times, users))
    users, items = users[order], items[order]
    is_last = np.append(users[1:] != users[:-1], True)
    test_items, train_users, train_items = items[is_last], users[~is_last], items[~is_last]
    order = np.lexsort((train_items, train_users))
    train_users, train_items = train_users[order], train_items[order]
    negatives = draw_negatives(train_users, train_items, test_items, item_count, MLPERF_NEGATIVES, seed)
    return Interactions(name, item_count, train_users, train_items, test_items, negatives, made)


def draw_negatives(
    users: np.ndarray, items: np.ndarray, test_items: np.ndarray, item_count: int, count: int, seed: int
) -> np.ndarray:
    """(users, count): for each user, items that the user never met, drawn evenly and with replacement.

    No draw is thrown away: of n items met, sorted as p_0 < p_1 ..., the r-th item not met is r plus the number
    of j with p_j - j <= r.
    """
    user_count = len(test_items)
    held_out = np.arange(user_count, dtype=np.int64) * item_count + test_items
    pairs = np.sort(np.concatenate((users.astype(np.int64) * item_count + items, held_out)))
    met = np.bincount(pairs // item_count, minlength=user_count)
    if (met >= item_count).any():
        raise Problem(
            f"user {np.argmax(met >= item_count)} has met all {item_count:,} items",
            "an item that is left to rank the held-out one against",
            "remove this user from the source",
        )
    first = np.cumsum(met) - met
    keys = pairs - (np.arange(len(pairs)) - np.repeat(first, met))
    random = np.random.RandomState(seed % 2**32)
    found = np.empty((user_count, count), np.int32)
    for begin in range(0, user_count, CHUNK_USERS):
        rows = np.arange(begin, min(begin + CHUNK_USERS, user_count))[:, None]
        draws = np.floor(random.random_sample((len(rows), count)) * (item_count - met[rows])).astype(np.int64)
        below = np.searchsorted(keys, rows * item_count + draws, side="right") - first[rows]
        found[rows[:, 0]] = draws + below
    return found


def check_pairs(users: np.ndarray, items: np.ndarray, source: str) -> None:
    """Refuse pairs that occur twice."""
    width = int(items.max()) + 1
    keys = np.sort(users.astype(np.int64) * width + items)
    repeated = keys[1:][keys[1:] == keys[:-1]]
    if len(repeated):
        user, item = divmod(int(repeated[0]), width)
        raise Problem(
            f"{source} has {len(repeated):,} pairs twice, the first is user {user} with item {item}",
            "each user with each item once",
            "remove the repeated lines",
        )
