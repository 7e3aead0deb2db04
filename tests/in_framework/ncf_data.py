"""A small data set of NCF, for the tests of the model and of the sampler."""

import numpy as np
import torch

from benchmarks.ncf.pytorch import data

USERS, ITEMS, HELD_OUT = 40, 30, 29


def small_data() -> data.DataSet:
    # Pairs of users and items, of which one item is nobody's but held out.
    generator = torch.Generator().manual_seed(3)
    met = torch.rand(USERS, ITEMS, generator=generator) < 0.3
    met[:, 0] = True
    met[:, HELD_OUT] = False
    pairs = met.nonzero().int()
    held_out = torch.full((USERS,), HELD_OUT, dtype=torch.int32)
    facts = {"users": USERS, "items": ITEMS}
    return data.DataSet(USERS, ITEMS, pairs[:, 0], pairs[:, 1], held_out, np.zeros((USERS, 1)), facts)
