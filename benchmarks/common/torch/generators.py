"""A rank's random generators: equal weights, different dropout, and warm-ups without side effects."""

from contextlib import contextmanager
from typing import Iterator

import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import optimizers
from benchmarks.common.torch.flat_optimizer import FlatOptimizer, preserve_scale

SEED_STRIDE = 1_000_003  # between the seeds of the ranks' dropout


def seed_dropout(seed: int, ranks: Ranks) -> None:
    """Seed dropout differently on each rank."""
    torch.manual_seed(seed + (ranks.rank + 1) * SEED_STRIDE)


@contextmanager
def fixed_seed(seed: int) -> Iterator[None]:
    """Draw from ``seed`` on the CPU and restore the generator, whose state comes from the checkpoint."""
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def dry_run(optimizer: FlatOptimizer, ranks: Ranks) -> Iterator[None]:
    """Run warm-up steps at rate 0; reset optimizer, loss scale and generators on exit."""
    with preserve_scale(optimizer), torch.random.fork_rng([ranks.context] if ranks.context.type == "cuda" else []):
        yield
        optimizers.reset(optimizer.inner)
