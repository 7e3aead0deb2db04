"""Packed batches from a prepared data set, built by threads ahead of time; the order is the same on all ranks.

Samples have a new random order in every epoch, which depends only on the seed and the epoch, so that a run can
resume at any step. The order is not stored: MLPerf's set has 157 million samples, and a run reads 3 million.
"""

from functools import partial
from itertools import count
from typing import Generator, List, NamedTuple, Optional

import numpy as np
import torch

from benchmarks.bert.pytorch.config import Config
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch.batches import ahead, to_device
from benchmarks.language.arrays import Samples, ragged
from benchmarks.language.pytorch.encoder import Rows, fill_up, gather_rows

THREADS = 2  # threads that build batches: less than a millisecond per hundred samples
NO_WORD = -100  # label of unmasked positions, PyTorch's default ignore_index
ROUNDS = 4  # rounds of the Feistel network: enough that the order looks random (Luby and Rackoff 1988)


class MicroBatch(NamedTuple):
    rows: Rows
    masked: torch.Tensor  # int64 (M,): masked positions in the row of tokens
    labels: torch.Tensor  # int64 (M,): original tokens at these positions
    next: torch.Tensor  # int64 (B,): 1 where the second text is a random one
    # fp32 (2,): factors of the summed losses of masked tokens and next sentences. With them, the sum of the ranks'
    # gradients is the gradient of both means.
    weights: torch.Tensor = torch.ones(2)


Batch = List[MicroBatch]  # this rank's samples per step, as micro-batches


def permuted(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Map ``positions`` (int64, below ``size``) to samples with an epoch's pseudo-random permutation.

    A Feistel network over the next power of four; values outside are permuted again (cycle walking).
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    mask = np.uint64((1 << half) - 1)
    keys = np.random.default_rng([seed, epoch]).integers(1, 1 << 62, ROUNDS, dtype=np.uint64) | np.uint64(1)
    indices = positions.astype(np.uint64)
    outside = np.ones(len(indices), bool)
    while outside.any():
        left, right = indices[outside] >> np.uint64(half), indices[outside] & mask
        for key in keys:
            mixed = (right + np.uint64(1)) * key
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)  # of splitmix64
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        indices[outside] = (left << np.uint64(half)) | right
        outside = indices >= size
    return indices.astype(np.int64)


def samples_of_step(config: Config, samples: int, ranks: int, step: int) -> np.ndarray:
    # Return a step's samples on all ranks, int64 (global batch,), rank by rank.
    total = config.batch_size * ranks
    numbers = np.arange(step * total, (step + 1) * total)
    epochs, positions = numbers // samples, numbers % samples
    indices = np.empty(total, np.int64)
    for epoch in np.unique(epochs):
        indices[epochs == epoch] = permuted(positions[epochs == epoch], samples, config.seed, int(epoch))
    return indices


def shares(lengths: np.ndarray, count: int) -> np.ndarray:
    """Distribute samples with ``lengths`` over ``count`` parts of equal size, int64 (count, samples per part).

    Sorted by length and assigned in serpentine order, so that parts have about the same number of tokens: ranks wait
    less for each other, and micro-batches have few row lengths.
    """
    rounds = np.argsort(-lengths, kind="stable").reshape(-1, count)
    rounds[1::2] = rounds[1::2, ::-1]
    return np.ascontiguousarray(rounds.T)


def part_of(samples: Samples, indices: np.ndarray) -> MicroBatch:
    # Return the samples ``indices`` as one row, the shortest first.
    indices = indices[np.argsort(samples.offsets[indices + 1] - samples.offsets[indices], kind="stable")]
    rows = gather_rows(samples, indices)
    masked, counts = ragged(samples.masked_offsets, indices)
    positions = np.repeat(rows.offsets[:-1].numpy().astype(np.int64), counts) + samples.masked_places[masked]
    labels, follows = samples.masked_labels[masked].astype(np.int64), samples.next[indices].astype(np.int64)
    return MicroBatch(rows, *map(torch.from_numpy, (positions, labels, follows)))


def step_of(config: Config, samples: Samples, ranks: Ranks, step: int) -> Batch:
    # Read this rank's samples for a step, with the weights of their losses.
    everyone = samples_of_step(config, len(samples), ranks.size, step)
    lengths = samples.offsets[everyone + 1] - samples.offsets[everyone]
    dealt = shares(lengths, ranks.size * config.accumulation).reshape(ranks.size, config.accumulation, -1)
    masked = int((samples.masked_offsets[everyone + 1] - samples.masked_offsets[everyone]).sum())
    batch = [part_of(samples, everyone[indices]) for indices in dealt[ranks.rank]]
    return [ready(part, config, ranks, masked) for part in batch]


def ready(part: MicroBatch, config: Config, ranks: Ranks, masked: int) -> MicroBatch:
    # Return a weighted micro-batch, padded if rows need certain lengths.
    part = weighted(part, config, ranks, masked)
    return filled(part, config) if config.fills_rows else part


def filled(part: MicroBatch, config: Config) -> MicroBatch:
    """Pad a row to the next multiple of token_bucket, and the masked positions to a fixed number for that length.

    All rows get the same number of padding sequences, which no loss includes. More masked positions than one in six
    tokens plus one per sample are not padded.
    """
    bucket = config.token_bucket
    tokens = -(-len(part.rows.tokens) // bucket) * bucket
    part = part._replace(rows=fill_up(part.rows, tokens, -(-bucket // config.positions) + 1, config.positions))
    # Masking selects 15 % of a sample's tokens, rounded, and at least one.
    room = tokens // 6 + len(part.next) - len(part.masked)
    if room < 0:
        return part
    return part._replace(
        masked=torch.cat([part.masked, part.masked.new_zeros(room)]),
        labels=torch.cat([part.labels, part.labels.new_full((room,), NO_WORD)]),
    )


def weighted(part: MicroBatch, config: Config, ranks: Ranks, masked: int) -> MicroBatch:
    # Set a micro-batch's loss weights; ``masked``: masked tokens on all ranks in the step.
    if config.masked_mean == "batch":
        masked = len(part.labels) * ranks.size * config.accumulation
    weights = torch.tensor([1.0 / max(1, masked), 1.0 / (config.batch_size * ranks.size)], dtype=torch.float32)
    return part._replace(weights=weights)


def training_input(config: Config, samples: Samples, ranks: Ranks, first_step: int) -> Generator[Batch, None, None]:
    """Yield training batches on this rank's device without end, from ``first_step`` of the run.

    Threads start with the first batch; ``close`` stops them.
    """
    make = partial(step_of, config, samples, ranks)
    return ahead(make, count(first_step), config.prefetch, THREADS, ranks.context)


def evaluation_input(config: Config, samples: Samples, ranks: Ranks) -> Generator[Optional[MicroBatch], None, None]:
    """Yield this rank's evaluation samples, sorted by length; None after the last one.

    All ranks have the same number of batches.
    """
    order, size = np.argsort(samples.lengths, kind="stable"), config.eval_batch_size
    local_order = order[ranks.rank :: ranks.size]
    batches = [local_order[start : start + size] for start in range(0, -(-len(order) // ranks.size), size)]
    there = [indices for indices in batches if len(indices)]

    def make(indices: np.ndarray) -> MicroBatch:
        return ready(part_of(samples, indices), config, ranks, 1)

    yield from ahead(make, there, config.prefetch, THREADS, ranks.context)
    yield from [None] * (len(batches) - len(there))


def synthetic_batch(config: Config, vocabulary: int, ranks: Ranks, tokens: int = 0) -> Batch:
    """A batch of samples of equal length, with one in seven tokens masked.

    A micro-batch has about ``tokens`` tokens; default: the maximum.
    """
    per_part = config.batch_size // config.accumulation
    length = max(2, min(tokens // per_part or config.positions, config.positions))
    masked = max(1, length // 7)
    generator = torch.Generator().manual_seed(config.seed)
    positions = torch.stack([torch.randperm(length, generator=generator)[:masked] for _ in range(per_part)])
    rows = Rows(
        torch.randint(vocabulary, (per_part * length,), generator=generator),
        (torch.arange(length) >= length // 2).long().repeat(per_part),
        torch.arange(length).repeat(per_part),
        torch.arange(0, per_part * length + 1, length, dtype=torch.int32),
        length,
    )
    labels = torch.randint(vocabulary, (per_part * masked,), generator=generator)
    follows = torch.randint(2, (per_part,), generator=generator)
    flat = (positions + torch.arange(per_part)[:, None] * length).flatten()
    part = MicroBatch(rows, flat, labels, follows)
    part = ready(part, config, ranks, len(labels) * ranks.size * config.accumulation)
    return [to_device(part, ranks.context)] * config.accumulation
