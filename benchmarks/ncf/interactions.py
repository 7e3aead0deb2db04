"""Interactions of users with items, split into training pairs and one held-out item a user; the toy data set's too."""

from typing import NamedTuple, Tuple

import numpy as np

from benchmarks.common.data.problem import Problem
from benchmarks.ncf.ratings import Ratings

MLPERF_NEGATIVES = 999  # items that each held-out item is ranked among (preproc_hp_num_eval in the logs of v0.5)
CHUNK_USERS = 4096  # for whom negatives are drawn at once

# The toy data set: synthetic users with a few tastes each, learnable, the same on every machine.
TOY = "tastes"
USERS = 2000
TASTES = 48
ITEMS_OF_TASTE = 25
ITEMS = TASTES * ITEMS_OF_TASTE
TASTES_OF_USER = 2
RATINGS = 32  # ratings of each user; some repeat an item and are left out
LOYALTY = 0.9  # share of a user's ratings that goes to items of the user's tastes; the rest goes anywhere
SEED = 20170403


class Interactions(NamedTuple):
    """A data set before it is written; ids count from 0 without gaps."""

    name: str
    items: int
    train_users: np.ndarray  # (pairs,), sorted by user, then item
    train_items: np.ndarray  # (pairs,)
    test_items: np.ndarray  # (users,): the held-out item of each user
    negatives: np.ndarray  # (users, negatives): what it is ranked among; a draw may repeat an item
    made: str  # A description of how it was made

    def notes(self) -> Tuple[str, ...]:
        """Name held-out items that no user trains on, whose embeddings stay as they were drawn."""
        untrained = np.setdiff1d(self.test_items, self.train_items)
        text = f"{len(untrained):,} of {self.items:,} items are held out and never trained on (the first is "
        return (f"{text}{untrained[0]}): nothing can be learned about them",) if len(untrained) else ()


def leave_one_out(name: str, ratings: Ratings, where: str, made: str, seed: int) -> Interactions:
    """Hold out each user's last item in time (He et al. 2017, section 4.1), and draw what it is ranked among.

    Of ratings given in the same second the one that comes last in the source counts as the last. Problem, with the
    file's own ids and lines, for ratings that do not allow it.
    """
    users, items = ratings.users.astype(np.int32), ratings.items.astype(np.int32)
    _check_ratings(ratings, where)
    order = np.lexsort((ratings.times, users))
    users, items = users[order], items[order]
    is_last = np.append(users[1:] != users[:-1], True)
    test_items, train_users, train_items = items[is_last], users[~is_last], items[~is_last]
    order = np.lexsort((train_items, train_users))
    train_users, train_items = train_users[order], train_items[order]
    count = len(ratings.item_ids)
    negatives = draw_negatives(train_users, train_items, test_items, count, MLPERF_NEGATIVES, seed)
    return Interactions(name, count, train_users, train_items, test_items, negatives, made)


# Refuse pairs that occur twice, and users of whom nothing or no other item would be left.
def _check_ratings(ratings: Ratings, where: str) -> None:
    first, second = repeated_pair(ratings.users, ratings.items)
    if second:
        user, item = ratings.user_ids[ratings.users[second]], ratings.item_ids[ratings.items[second]]
        raise Problem(
            f"{where}, line {ratings.lines[second]:,}: user {user} rates item {item} again, as in line "
            f"{ratings.lines[first]:,}",
            "each user with each item once",
            "remove the repeated lines",
        )
    met, items = np.bincount(ratings.users), len(ratings.item_ids)
    single = np.flatnonzero(met == 1)
    if len(single):
        line = ratings.lines[np.argmax(ratings.users == single[0])]
        raise Problem(
            f"{where} has {len(single):,} users with a single rating, the first is user "
            f"{ratings.user_ids[single[0]]} in line {line:,}",
            "at least two ratings of each user: one to train on, one to hold out",
            "remove these users from the source",
        )
    if (met >= items).any():
        raise Problem(
            f"{where}: user {ratings.user_ids[int(np.argmax(met >= items))]} has met all {items:,} items",
            "an item that is left to rank the held-out one against",
            "remove this user from the source",
        )


def draw_negatives(
    users: np.ndarray, items: np.ndarray, test_items: np.ndarray, item_count: int, count: int, seed: int
) -> np.ndarray:
    """(users, count): for each user, items that the user never met, drawn evenly and with replacement.

    Each user has an item that is not met. No draw is thrown away: of n items met, sorted as p_0 < p_1 ..., the r-th
    item not met is r plus the number of j with p_j - j <= r.
    """
    user_count = len(test_items)
    held_out = np.arange(user_count, dtype=np.int64) * item_count + test_items
    pairs = np.sort(np.concatenate((users.astype(np.int64) * item_count + items, held_out)))
    met = np.bincount(pairs // item_count, minlength=user_count)
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


def repeated_pair(users: np.ndarray, items: np.ndarray) -> Tuple[int, int]:
    """Return the places of a pair and of its repetition that comes first; (0, 0) where each pair occurs once."""
    keys = users.astype(np.int64) * (int(items.max()) + 1) + items
    order = np.argsort(keys, kind="stable")
    again = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    if not len(again):
        return 0, 0
    place = again[np.argmin(order[again + 1])]
    return int(order[place]), int(order[place + 1])


def generate() -> Interactions:
    """Generate users who rate mostly the items of their own tastes; who knows a user's tastes ranks the held-out
    item among the handful of their items that are left."""
    # RandomState's stream is frozen, a Generator's is not.
    random = np.random.RandomState(SEED)
    tastes = random.randint(TASTES, size=(USERS, TASTES_OF_USER))
    chosen = np.take_along_axis(tastes, random.randint(TASTES_OF_USER, size=(USERS, RATINGS)), 1)
    items = chosen * ITEMS_OF_TASTE + random.randint(ITEMS_OF_TASTE, size=(USERS, RATINGS))
    stray = random.random_sample((USERS, RATINGS)) >= LOYALTY
    items = np.where(stray, random.randint(ITEMS, size=(USERS, RATINGS)), items)
    keys, first = np.unique(np.arange(USERS)[:, None] * ITEMS + items, return_index=True)
    made = f"{USERS} synthetic users with {TASTES_OF_USER} of {TASTES} tastes each"
    ids = range(USERS), range(ITEMS)
    ratings = Ratings(keys // ITEMS, keys % ITEMS, first, *ids, np.arange(len(keys)))
    return leave_one_out(TOY, ratings, TOY, made, SEED)
