"""Llama on four ranks, in the shapes that submissions have: each kind of parallelism beside another one."""

import dataclasses

import pytest

from benchmarks.common.frameworks import pytorch
from tests.in_framework.pytorch.llama import CONFIG, trained
from tests.in_framework.splits import assert_same_weights

RANKS = (4,)
SHAPES = (
    {"tensor_parallelism": 2},
    {"context_parallelism": 2},
    {"tensor_parallelism": 2, "context_parallelism": 2},
    {"context_parallelism": 4},
)


@pytest.fixture(scope="session")
def ranks():
    found = pytorch.start(CONFIG)
    yield found
    pytorch.finish()


def test_two_kinds_of_parallelism_train_as_one_rank(ranks):
    """With gradients clipped to a thousandth, by the norm of all of them."""
    clipped = dataclasses.replace(CONFIG, gradient_clip=1e-3, epsilon=1e-6)
    training, _, expected = trained(clipped, dataclasses.replace(ranks, rank=0, size=1))
    for how in SHAPES:
        split, _, losses = trained(dataclasses.replace(clipped, batch_size=1, **how), ranks)
        assert losses == pytest.approx(expected, rel=2e-6), how
        assert_same_weights(split, training, how, rtol=1e-3, atol=1e-5)
