"""Batches of sentences on this rank's device, built by a thread ahead of time; the order is the same on all ranks."""

from contextlib import closing
from functools import partial
from itertools import count
from typing import Callable, Generator, Iterator, NamedTuple, Tuple

import numpy as np
import torch

from benchmarks.common.data.arrays import Sequences
from benchmarks.common.data.read_ahead import read_ahead
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import batches
from benchmarks.translation.arrays import Pairs
from benchmarks.translation.orders import Order
from benchmarks.translation.vocabulary import BOS, EOS, PAD

# Maximum number of prefetched batches: building takes a millisecond, but the thread may be descheduled longer.
AHEAD = 4


class Batch(NamedTuple):
    # This rank's pairs in a step, padded with PAD.

    source: torch.Tensor  # int64 (B, S): tokens and EOS, with BOS in front if the model needs it
    source_lengths: torch.Tensor  # int64 (B,): with EOS, and BOS where it is there
    target_in: torch.Tensor  # int64 (B, T): BOS and the tokens
    target_out: torch.Tensor  # int64 (B, T): the tokens and EOS
    rows: torch.Tensor  # int64 (tokens,): where ``target_out`` as (B * T,) is not padding, for the loss
    tokens: int  # of ``target_out``, without padding
    all_tokens: int  # the same of all ranks
    sentences: int  # pairs of all ranks
    all_source_tokens: int = 0  # of ``source`` of all ranks, without padding
    source_rows: torch.Tensor = torch.empty(0)  # as ``rows``, of ``source``


class SourceBatch(NamedTuple):
    indices: np.ndarray  # int64 (B,): which of the test part they are; B may be 0
    source: torch.Tensor  # as in ``Batch``
    source_lengths: torch.Tensor


class Shape(NamedTuple):
    # Whether BOS comes before the source, as in GNMT's submission (seq2seq/data/tokenizer.py), not Transformer's.
    source_bos: bool = False
    multiple: int = 1  # lengths are padded to a multiple of this: tensor cores of fp16 and bf16 want 8


PLAIN = Shape()


def padded(
    sentences: Sequences, indices: np.ndarray, prefix_marks: int, suffix_marks: int, multiple: int
) -> Tuple[np.ndarray, np.ndarray]:
    """Return sentences as int64 (B, longest) with PAD, and lengths int64 (B,).

    Args:
        sentences: of one side.
        indices: sentences to select.
        prefix_marks: 1 to reserve a position for BOS.
        suffix_marks: 1 for EOS.
        multiple: of the width.
    """
    lengths = sentences.lengths[indices].astype(np.int64)
    padded_lengths = lengths + prefix_marks + suffix_marks
    width = -(-int(padded_lengths.max(initial=1)) // multiple) * multiple
    table = np.full((len(indices), width), PAD, np.int64)
    positions = np.arange(int(lengths.sum()))
    begins = np.cumsum(lengths) - lengths
    # A sentence's tokens are neighbours in both arrays.
    table.reshape(-1)[positions + np.repeat(np.arange(len(indices)) * width + prefix_marks - begins, lengths)] = (
        np.asarray(sentences.tokens)[positions + np.repeat(sentences.offsets[indices] - begins, lengths)]
    )
    if prefix_marks:
        table[:, 0] = BOS
    if suffix_marks:
        table[np.arange(len(indices)), padded_lengths - 1] = EOS
    return table, padded_lengths


Task = Tuple[Order, int]  # (epoch's order, step)


def training_input(
    pairs: Pairs,
    order_of: Callable[[int], Order],
    ranks: Ranks,
    position: int,
    shape: Shape = PLAIN,
    ahead: int = AHEAD,
) -> Generator[Batch, None, None]:
    """Yield training batches without end from step ``position``; ``close`` stops the threads.

    Threads start with the first batch.

    Args:
        pairs: of the training part.
        order_of: returns an epoch's order, counted from 0; all have the same number of steps.
        ranks: of the job.
        position: finished steps.
        shape: of batches.
        ahead: maximum prefetched batches; 0: no threads.
    """
    tasks = _tasks(order_of, position, ahead)
    with closing(tasks):
        yield from batches.ahead(partial(_build, pairs, ranks, shape), tasks, ahead, 1, ranks.context)


def _tasks(order_of: Callable[[int], Order], position: int, ahead: int) -> Generator[Task, None, None]:
    # Yield the steps from ``position``; the next epoch's order is built during the current epoch.
    epoch, step = divmod(position, order_of(0).steps) if position else (0, 0)
    with closing(read_ahead(order_of, count(epoch), min(ahead, 1), 1)) as orders:
        for order in orders:
            for later_step in range(step, order.steps):
                yield order, later_step
            step = 0


def _build(pairs: Pairs, ranks: Ranks, shape: Shape, task: Task) -> Batch:
    order, step = task
    indices, first = order.batch(step, ranks.rank, ranks.size), step * ranks.size
    all_sentences = order.sentences[order.bounds[first] : order.bounds[first + ranks.size]]
    source, source_lengths = padded(pairs.source, indices, int(shape.source_bos), 1, shape.multiple)
    target_out, _ = padded(pairs.target, indices, 0, 1, shape.multiple)
    target_in = np.full_like(target_out, PAD)
    target_in[:, 0] = BOS
    # EOS is predicted, but is not an input.
    target_in[:, 1:] = np.where(target_out[:, :-1] == EOS, PAD, target_out[:, :-1])
    rows = np.flatnonzero(target_out.reshape(-1) != PAD)
    return Batch(
        source=torch.from_numpy(source),
        source_lengths=torch.from_numpy(source_lengths),
        target_in=torch.from_numpy(target_in),
        target_out=torch.from_numpy(target_out),
        rows=torch.from_numpy(rows),
        tokens=len(rows),
        all_tokens=int(pairs.target.lengths[all_sentences].sum(dtype=np.int64)) + len(all_sentences),
        sentences=len(all_sentences),
        all_source_tokens=int(pairs.source.lengths[all_sentences].sum(dtype=np.int64))
        + len(all_sentences) * (1 + shape.source_bos),
        source_rows=torch.from_numpy(np.flatnonzero(source.reshape(-1) != PAD)),
    )


def evaluation_batches(
    sentences: Sequences, order: Order, ranks: Ranks, shape: Shape = PLAIN, ahead: int = AHEAD
) -> Iterator[SourceBatch]:
    # Yield this rank's batches of ``order`` over the source of the test part; some may be empty.
    def make(step: int) -> SourceBatch:
        indices = order.batch(step, ranks.rank, ranks.size)
        return SourceBatch(
            indices, *map(torch.from_numpy, padded(sentences, indices, int(shape.source_bos), 1, shape.multiple))
        )

    return batches.ahead(make, range(order.steps), ahead, 1, ranks.context)


def synthetic_batch(vocabulary_size: int, sentences: int, length: int, ranks: Ranks) -> Batch:
    # Return a batch of random tokens per rank, with ``length`` positions per side and no padding.
    return synthetic_pairs(vocabulary_size, torch.full((2, sentences), length), ranks)


def synthetic_pairs(vocabulary_size: int, lengths: torch.Tensor, ranks: Ranks) -> Batch:
    # Return a batch of random tokens per rank, with sources and targets of ``lengths``, int64 (2, sentences).
    generator = torch.Generator().manual_seed(1)
    sides = []
    for side in lengths:
        position, count = torch.arange(int(side.max())), len(side)
        tokens = torch.randint(EOS + 1, vocabulary_size, (count, len(position)), generator=generator)
        tokens[position >= side[:, None]] = PAD
        tokens[torch.arange(count), side - 1] = EOS
        sides.append(tokens)
    source, target = sides
    target_in = target.where(target != EOS, PAD).roll(1, dims=1)
    target_in[:, 0] = BOS
    source_rows, rows = ((side != PAD).flatten().nonzero().flatten() for side in sides)
    batch = Batch(
        source=source,
        source_lengths=lengths[0],
        target_in=target_in,
        target_out=target,
        rows=rows,
        tokens=len(rows),
        all_tokens=len(rows) * ranks.size,
        sentences=len(source) * ranks.size,
        all_source_tokens=len(source_rows) * ranks.size,
        source_rows=source_rows,
    )
    return batches.to_device(batch, ranks.context)
