"""User-item interactions, split into training pairs and one held-out item per user; also the toy data set."""

from typing import NamedTuple, Tuple

import numpy as np

from benchmarks.common.data.problem import Problem
from benchmarks.ncf.ratings import Ratings

MLPERF_NEGATIVES = 999  # negatives per held-out item (preproc_hp_num_eval in the v0.5 logs)
CHUNK_USERS = 4096  # users per chunk when sampling negatives

# Toy data set: synthetic users with a few tastes, learnable, and the same on all machines
TOY = "tastes"
USERS = 2000
TASTES = 48
ITEMS_OF_TASTE = 25
ITEMS = TASTES * ITEMS_OF_TASTE
TASTES_OF_USER = 2
RATINGS = 32  # ratings per user; repeated items are dropped
LOYALTY = 0.9  # fraction of ratings for items of the user's tastes; the other items are random
SEED = 20170403


class Interactions(NamedTuple):
    """A data set before it is written; ids count from 0 without gaps."""

    name: str
    items: int
    train_users: np.ndarray  # (pairs,), sorted by user, then item
    train_items: np.ndarray  # (pairs,)
    test_items: np.ndarray  # (users,): held-out items
    negatives: np.ndarray  # (users, negatives): negatives of the held-out item, possibly with repetitions
    description: str  # for dataset.json

    def notes(self) -> Tuple[str, ...]:
        """Report held-out items without training pairs: their embeddings stay at the initial values."""
        untrained = np.setdiff1d(self.test_items, self.train_items)
        text = f"{len(untrained):,} of {self.items:,} items are held out and never trained on (the first is "
        return (f"{text}{untrained[0]}): nothing can be learned about them",) if len(untrained) else ()


def leave_one_out(name: str, ratings: Ratings, source: str, description: str, seed: int) -> Interactions:
    """Hold out the last item of every user (He et al. 2017, section 4.1), and sample negatives.

    For ratings in the same second the order in the source counts. Raises Problem, with ids and lines of the file,
    for unsuitable ratings.
    """
    users, items = ratings.users.astype(np.int32), ratings.items.astype(np.int32)
    _check_ratings(ratings, source)
    order = np.lexsort((ratings.times, users))
    users, items = users[order], items[order]
    is_last = np.append(users[1:] != users[:-1], True)
    test_items, train_users, train_items = items[is_last], users[~is_last], items[~is_last]
    order = np.lexsort((train_items, train_users))
    train_users, train_items = train_users[order], train_items[order]
    count = len(ratings.item_ids)
    negatives = draw_negatives(train_users, train_items, test_items, count, MLPERF_NEGATIVES, seed)
    return Interactions(name, count, train_users, train_items, test_items, negatives, description)


# Reject repeated pairs, users with only one rating, and users who rated all items
def _check_ratings(ratings: Ratings, source: str) -> None:
    first, second = repeated_pair(ratings.users, ratings.items)
    if second:
        user, item = ratings.user_ids[ratings.users[second]], ratings.item_ids[ratings.items[second]]
        raise Problem(
            f"{source}, line {ratings.lines[second]:,}: user {user} rates item {item} again, as in line "
            f"{ratings.lines[first]:,}",
            "each user with each item once",
            "remove the repeated lines",
        )
    met, items = np.bincount(ratings.users), len(ratings.item_ids)
    single = np.flatnonzero(met == 1)
    if len(single):
        line = ratings.lines[np.argmax(ratings.users == single[0])]
        raise Problem(
            f"{source} has {len(single):,} users with a single rating, the first is user "
            f"{ratings.user_ids[single[0]]} in line {line:,}",
            "at least two ratings of each user: one to train on, one to hold out",
            "remove these users from the source",
        )
    if (met >= items).any():
        raise Problem(
            f"{source}: user {ratings.user_ids[int(np.argmax(met >= items))]} has rated all {items:,} items",
            "an unrated item to rank the held-out one against",
            "remove this user from the source",
        )


def draw_negatives(
    users: np.ndarray, items: np.ndarray, test_items: np.ndarray, item_count: int, count: int, seed: int
) -> np.ndarray:
    """Sample items that the user has not rated, uniformly with replacement: (users, count).

    Every user must have an unrated item. Without rejection: for n rated items, sorted as p_0 < p_1 ..., the r-th
    unrated item is r plus the number of j with p_j - j <= r.
    """
    user_count = len(test_items)
    held_out = np.arange(user_count, dtype=np.int64) * item_count + test_items
    pairs = np.sort(np.concatenate((users.astype(np.int64) * item_count + items, held_out)))
    met = np.bincount(pairs // item_count, minlength=user_count)
    first = np.cumsum(met) - met
    keys = pairs - (np.arange(len(pairs)) - np.repeat(first, met))
    random = np.random.RandomState(seed % 2**32)
    negatives = np.empty((user_count, count), np.int32)
    for start in range(0, user_count, CHUNK_USERS):
        rows = np.arange(start, min(start + CHUNK_USERS, user_count))[:, None]
        draws = np.floor(random.random_sample((len(rows), count)) * (item_count - met[rows])).astype(np.int64)
        below = np.searchsorted(keys, rows * item_count + draws, side="right") - first[rows]
        negatives[rows[:, 0]] = draws + below
    return negatives


def repeated_pair(users: np.ndarray, items: np.ndarray) -> Tuple[int, int]:
    """Return the positions of the first repeated pair and the repetition; (0, 0) if all pairs are unique."""
    keys = users.astype(np.int64) * (int(items.max()) + 1) + items
    order = np.argsort(keys, kind="stable")
    again = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    if not len(again):
        return 0, 0
    index = again[np.argmin(order[again + 1])]
    return int(order[index]), int(order[index + 1])


def generate() -> Interactions:
    """Generate users who mostly rate items of their tastes: a model that knows the tastes ranks the held-out item among
    the few remaining items.
    """
    # RandomState's stream is frozen, a Generator's is not.
    random = np.random.RandomState(SEED)
    tastes = random.randint(TASTES, size=(USERS, TASTES_OF_USER))
    ratings_of_taste = np.take_along_axis(tastes, random.randint(TASTES_OF_USER, size=(USERS, RATINGS)), 1)
    items = ratings_of_taste * ITEMS_OF_TASTE + random.randint(ITEMS_OF_TASTE, size=(USERS, RATINGS))
    stray = random.random_sample((USERS, RATINGS)) >= LOYALTY
    items = np.where(stray, random.randint(ITEMS, size=(USERS, RATINGS)), items)
    keys, first = np.unique(np.arange(USERS)[:, None] * ITEMS + items, return_index=True)
    description = f"{USERS} synthetic users with {TASTES_OF_USER} of {TASTES} tastes each"
    ids = range(USERS), range(ITEMS)
    ratings = Ratings(keys // ITEMS, keys % ITEMS, first, *ids, np.arange(len(keys)))
    return leave_one_out(TOY, ratings, TOY, description, SEED)
