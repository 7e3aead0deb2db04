"""The toy data set: synthetic users with a few tastes each, learnable, the same on every machine."""

from __future__ import annotations

import numpy as np

from benchmarks.ncf.sources.interactions import Interactions, leave_one_out
from benchmarks.ncf.sources.ratings import Ratings

NAME = "tastes"
USERS = 2000
TASTES = 48
ITEMS_OF_TASTE = 25
ITEMS = TASTES * ITEMS_OF_TASTE
TASTES_OF_USER = 2
RATINGS = 32  # ratings of each user; some repeat an item and are left out
LOYALTY = 0.9  # share of a user's ratings that goes to items of the user's tastes; the rest goes anywhere
SEED = 20170403


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
    return leave_one_out(NAME, ratings, NAME, made, SEED)
