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
    users: int
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
    notes: Tuple[str, ...] = ()


def leave_one_out(
    users: np.ndarray, items: np.ndarray, times: np.ndarray
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Training users and items, sorted, and each user's last item in time (He et al. 2017, section 4.1).

    Of ratings given in the same second the one that stands last in the source counts as the last.
    """
    order = np.lexsort((np.arange(len(users)), times, users))
    users, items = users[order], items[order]
    is_last = np.append(users[1:] != users[:-1], True)
    alone = is_last & np.append(True, users[1:] != users[:-1])
    if alone.any():
        raise Problem(
            "{:,} users with a single rating".format(int(alone.sum())),
            "at least two ratings of each user: one to train on, one to hold out",
            "remove these users from the source",
        )
    test_items = items[is_last]
    train_users, train_items = users[~is_last], items[~is_last]
    order = np.lexsort((train_items, train_users))
    return train_users[order], train_items[order], test_items


def draw_negatives(
    users: np.ndarray, items: np.ndarray, test_items: np.ndarray, item_count: int, count: int, seed: int
) -> np.ndarray:
    """(users, count): for each user, items that the user never met, drawn evenly and with replacement.

    No draw is thrown away: of n items met, sorted as p_0 < p_1 ..., the r-th item not met is r plus the number
    of j with p_j - j <= r.
    """
    user_count = len(test_items)
    all_users = np.concatenate((users, np.arange(user_count, dtype=users.dtype))).astype(np.int64)
    all_items = np.concatenate((items, test_items.astype(items.dtype))).astype(np.int64)
    order = np.lexsort((all_items, all_users))
    all_users, all_items = all_users[order], all_items[order]
    met = np.bincount(all_users, minlength=user_count)
    if (met >= item_count).any():
        user = int(np.argmax(met >= item_count))
        raise Problem(
            "user {} has met all {:,} items".format(user, item_count),
            "an item that is left to rank the held-out one against",
            "remove this user from the source",
        )
    first = np.concatenate(([0], np.cumsum(met)))
    keys = all_users * item_count + all_items - (np.arange(len(all_users)) - first[all_users])
    random = np.random.RandomState(seed % 2**32)
    found = np.empty((user_count, count), np.int32)
    for begin in range(0, user_count, CHUNK_USERS):
        rows = np.arange(begin, min(begin + CHUNK_USERS, user_count))[:, None]
        draws = np.floor(random.random_sample((len(rows), count)) * (item_count - met[rows])).astype(np.int64)
        below = np.searchsorted(keys, rows * item_count + draws, side="right") - first[rows]
        found[rows[:, 0]] = draws + below
    return found


def check_pairs(users: np.ndarray, items: np.ndarray, source: str) -> None:
    """Refuse negative ids and pairs that occur twice."""
    if len(users) == 0:
        raise Problem("{} has no interactions".format(source), "users and items", "name another source")
    lowest = min(int(users.min()), int(items.min()))
    if lowest < 0:
        raise Problem(
            "{} has the id {}".format(source, lowest), "ids from 0 on", "mend the source: ids count from 0"
        )
    keys = np.sort(users.astype(np.int64) * (int(items.max()) + 1) + items)
    repeated = keys[1:][keys[1:] == keys[:-1]]
    if len(repeated):
        user, item = divmod(int(repeated[0]), int(items.max()) + 1)
        raise Problem(
            "{} has {:,} pairs twice, the first is user {} with item {}".format(
                source, len(repeated), user, item
            ),
            "each user with each item once",
            "remove the repeated lines",
        )


def untrained_note(test_items: np.ndarray, train_items: np.ndarray, items: int) -> Tuple[str, ...]:
    """Tells of held-out items that no user trains on, whose embeddings stay as they were drawn."""
    untrained = np.setdiff1d(test_items, train_items)
    if not len(untrained):
        return ()
    return (
        "{:,} of {:,} items are held out and never trained on (the first is {}): nothing can be learned "
        "about them".format(len(untrained), items, int(untrained[0])),
    )
