"""The small set: made-up users with a few tastes each, learnable, the same on every machine."""

from __future__ import annotations

import numpy as np

from benchmarks.ncf.sources.interactions import (
    MLPERF_NEGATIVES,
    Interactions,
    draw_negatives,
    leave_one_out,
    untrained_note,
)

NAME = "tastes"
USERS = 2000
TASTES = 48
ITEMS_OF_TASTE = 25
ITEMS = TASTES * ITEMS_OF_TASTE
TASTES_OF_USER = 2
RATINGS = 32
"""Of each user; some repeat an item and are left out."""
LOYALTY = 0.9
"""Share of a user's ratings that goes to items of the user's tastes; the rest goes anywhere."""
SEED = 20170403


def make() -> Interactions:
    """Users who rate mostly the items of their own tastes; who knows a user's tastes ranks the held-out item
    among the handful of their items that are left."""
    # RandomState's stream is frozen, a Generator's is not.
    random = np.random.RandomState(SEED)
    tastes = random.randint(TASTES, size=(USERS, TASTES_OF_USER))
    chosen = np.take_along_axis(tastes, random.randint(TASTES_OF_USER, size=(USERS, RATINGS)), 1)
    items = chosen * ITEMS_OF_TASTE + random.randint(ITEMS_OF_TASTE, size=(USERS, RATINGS))
    stray = random.random_sample((USERS, RATINGS)) >= LOYALTY
    items = np.where(stray, random.randint(ITEMS, size=(USERS, RATINGS)), items)
    users = np.repeat(np.arange(USERS, dtype=np.int32), RATINGS)
    keys, first = np.unique(users.astype(np.int64) * ITEMS + items.ravel(), return_index=True)
    users, flat = (keys // ITEMS).astype(np.int32), (keys % ITEMS).astype(np.int32)
    train_users, train_items, test_items = leave_one_out(users, flat, first)
    return Interactions(
        name=NAME,
        users=USERS,
        items=ITEMS,
        train_users=train_users,
        train_items=train_items,
        test_items=test_items,
        negatives=draw_negatives(train_users, train_items, test_items, ITEMS, MLPERF_NEGATIVES, SEED),
        made="{} made-up users with {} of {} tastes each".format(USERS, TASTES_OF_USER, TASTES),
        notes=untrained_note(test_items, train_items, ITEMS),
    )
