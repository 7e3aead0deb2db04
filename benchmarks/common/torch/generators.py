"""Generators of a rank: the same weights on all ranks, other dropout on each, and warm-ups that leave no trace."""

from contextlib import contextmanager
from typing import Iterator

import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import optimizers
from benchmarks.common.torch.flat_optimizer import FlatOptimizer, preserve_scale

SEED_STRIDE = 1_000_003  # between the seeds of the ranks' dropout


def seed_dropout(seed: int, ranks: Ranks) -> None:
    """Let what dropout draws differ from rank to rank."""
    torch.manual_seed(seed + (ranks.rank + 1) * SEED_STRIDE)


@contextmanager
def fixed_seed(seed: int) -> Iterator[None]:
    """Draw on the CPU from ``seed``, and leave the generator as it was: a checkpoint has brought its state."""
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def dry_run(optimizer: FlatOptimizer, ranks: Ranks) -> Iterator[None]:
    """Let steps at rate 0 be taken inside, and reset the optimizer, the loss scale and the generators behind them."""
    with preserve_scale(optimizer), torch.random.fork_rng([ranks.context] if ranks.context.type == "cuda" else []):
        yield
        optimizers.reset(optimizer.inner)
