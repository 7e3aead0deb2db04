"""What a step works on: built, warmed up, captured as a CUDA graph."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Optional, Sequence, Tuple

import torch

from benchmarks.common.cuda_graphs import Captured, repeated
from benchmarks.common.frameworks import pytorch
from benchmarks.common.ranks import Ranks
from benchmarks.dlrm.blocks import NUMBERS
from benchmarks.dlrm.placement import Placement
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import Batch, Words
from benchmarks.dlrm.pytorch.model import Training
from benchmarks.dlrm.reading import Rows

STEPS_BEFORE_CAPTURE = 3
"""At least, as PyTorch's documentation of CUDA graphs asks."""

Step = Callable[[Batch, torch.Tensor], torch.Tensor]
"""Train on a batch at a learning rate, a tensor (); return the mean loss of this rank's rows."""


def build(
    config: Config,
    sizes: Tuple[int, ...],
    ranks: Ranks,
    saved: Mapping[str, Any],
    placement: Optional[Placement] = None,
) -> Training:
    """Build with the weights, kernels and placement of a checkpoint, or with fresh weights."""
    if saved:
        placement = saved_placement(saved, sizes, ranks)
    training = Training(config, sizes, ranks, saved.get("kernels"), placement)
    if saved:
        training.weights.copy_(saved["weights"])
        training.tables.weight.copy_(saved["tables"])
    pytorch.broadcast([training.weights])
    return training


def saved_placement(saved: Mapping[str, Any], sizes: Sequence[int], ranks: Ranks) -> Placement:
    """Return the placement of a checkpoint: what a rank saved are the tables that it had, without their names."""
    placement = tuple(tuple(tables) for tables in saved.get("placement", ()))
    rows = sum(sizes[table] for tables in placement[ranks.rank : ranks.rank + 1] for table in tables)
    fits = sorted(sum(placement, ())) == list(range(len(sizes))) and rows == len(saved["tables"])
    found = f"rank {ranks.rank} saved {len(saved['tables']):,} rows, and the recorded placement gives it {rows:,}"
    # A rank that ended alone would leave the others in their next collective.
    reason = pytorch.agreed("" if fits else found)
    if reason:
        raise SystemExit(
            f"the checkpoint's tables do not fit: {reason}\n"
            "  expected: a checkpoint of this version on this data set\n"
            "  do this: remove the checkpoint, or resume with the version and the data set that wrote it"
        )
    return placement


def synthetic_batch(config: Config, sizes: Sequence[int], ranks: Ranks, rows: int = 0) -> Batch:
    """One batch of noise for tables of ``sizes``, laid out as a real one; default: of a training step."""
    size = rows or config.batch_size
    places = (Rows(size * ranks.size, 0, size * ranks.size), Rows(size, 0, size))
    words = Words.empty(len(sizes), len(sizes) * size * ranks.size, (NUMBERS + 1) * size)
    generator = torch.Generator().manual_seed(config.seed)
    numbers, labels, indices = words.batch(*places)
    for index, size in zip(indices, sizes):
        index.random_(0, size, generator=generator)
    numbers.uniform_(generator=generator)
    labels.random_(0, 2, generator=generator)
    return words._replace(whole=words.whole.to(ranks.context)).batch(*places)


def ready(eager: Step, training: Training, sizes: Sequence[int]) -> Step:
    """Choose kernels, connect the ranks and capture, on noise and before the clock (MLPerf since v0.6).

    The steps have rate 0, which changes nothing.
    """
    config, ranks = training.config, training.ranks
    mine = [sizes[table] for table in training.tables.mine]
    example, rate = synthetic_batch(config, mine, ranks), torch.zeros((), device=ranks.context)
    step = eager
    if config.cuda_graph:
        step = captured(eager, example, rate, max(config.warm_up_steps, STEPS_BEFORE_CAPTURE))
    elif config.warm_up_steps:
        repeated(eager, config.warm_up_steps)(example, rate)
    if config.warm_up_steps:
        training.scores(synthetic_batch(config, mine, ranks, config.eval_batch_size))
    return step


def captured(eager: Step, example: Batch, rate: torch.Tensor, warm_up_steps: int) -> Step:
    """Capture the same step as one CUDA graph."""

    def flat(*tensors: torch.Tensor) -> torch.Tensor:
        return eager(Batch(*tensors[:-1]), tensors[-1])

    graph = Captured(flat, (*example, rate), repeated(flat, warm_up_steps))
    return lambda batch, rate: graph(*batch, rate)
