"""A small data set of NCF for the tests of the model and of the sampler."""

import numpy as np
import torch

from benchmarks.ncf.pytorch import data
from tests.in_framework.waves import waves

USERS, ITEMS, HELD_OUT = 40, 30, 29


def small_data() -> data.DataSet:
    # Pairs of users and items; every user has item 0, and the last item is only held out
    interactions = torch.from_numpy(waves(USERS, ITEMS) < -0.6)
    interactions[:, 0] = True
    interactions[:, HELD_OUT] = False
    users, items = interactions.nonzero().int().unbind(1)
    test_items = torch.full((USERS,), HELD_OUT, dtype=torch.int32)
    facts = {"users": USERS, "items": ITEMS}
    return data.DataSet(USERS, ITEMS, users, items, test_items, np.zeros((USERS, 1)), facts)
