"""Batches of a prepared data set as rows of tokens, built ahead on threads; every rank knows what all ranks take.

Samples come in a new random order in each pass, which follows from the seed and the pass alone, so that a run can
resume at any step. No list of the order is kept: MLPerf's set has 157 million samples, of which a run sees 3 million.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from itertools import count
from typing import Any, Generator, List, NamedTuple, Optional, Tuple

import numpy as np
import torch

from benchmarks.bert.pytorch.config import Config
from benchmarks.common.data.problem import Problem
from benchmarks.common.ranks import Ranks
from benchmarks.common.read_ahead import read_ahead
from benchmarks.language.arrays import DataSet, Samples
from benchmarks.language.pytorch.encoder import Rows

THREADS = 2
"""That build batches: one takes less than a millisecond per hundred samples."""
ROUNDS = 4
"""Of the Feistel network: enough that the order looks random (Luby and Rackoff 1988)."""


class Part(NamedTuple):
    """Samples of this rank that are computed together."""

    rows: Rows
    masked: torch.Tensor
    """int64 (M,): places of masked words in the row of tokens."""
    labels: torch.Tensor
    """int64 (M,): the words that stood there."""
    next: torch.Tensor
    """int64 (B,): 1 where the second text is a random one."""
    masked_weight: float = 1.0
    """Factor on the summed loss of the masked words, so that the ranks' gradients sum to that of the mean."""
    next_weight: float = 1.0
    """The same of the next sentences."""

    def to(self, device: torch.device) -> Part:
        """Copy to a device; from pinned memory nobody waits."""
        rows = self.rows
        tensors = (rows.tokens, rows.segments, rows.positions, rows.offsets, self.masked, self.labels, self.next)
        tokens, segments, positions, offsets, *others = (each.to(device, non_blocking=True) for each in tensors)
        masked, labels, follows = others
        rows = Rows(tokens, segments, positions, offsets, rows.longest)
        return Part(rows, masked, labels, follows, self.masked_weight, self.next_weight)


Batch = List[Part]
"""This rank's samples of a step, in the parts that they are computed in."""


def permuted(places: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Return where ``places`` (int64, below ``size``) go in the random order of an epoch: a permutation of all.

    A Feistel network over the next power of four; what falls outside goes through it again.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    mask = np.uint64((1 << half) - 1)
    keys = np.random.default_rng([seed, epoch]).integers(1, 1 << 62, ROUNDS, dtype=np.uint64) | np.uint64(1)
    found = places.astype(np.uint64)
    outside = np.ones(len(found), bool)
    while outside.any():
        left, right = found[outside] >> np.uint64(half), found[outside] & mask
        for key in keys:
            mixed = (right + np.uint64(1)) * key
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)  # of splitmix64
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        found[outside] = (left << np.uint64(half)) | right
        outside = found >= size
    return found.astype(np.int64)


def samples_of_step(config: Config, samples: int, ranks: int, step: int) -> np.ndarray:
    """Return the samples of all ranks of a step, int64 (global batch,), rank by rank."""
    total = config.batch_size * ranks
    numbers = np.arange(step * total, (step + 1) * total)
    epochs, places = numbers // samples, numbers % samples
    chosen = np.empty(total, np.int64)
    for epoch in np.unique(epochs):
        chosen[epochs == epoch] = permuted(places[epochs == epoch], samples, config.seed, int(epoch))
    return chosen


def ragged(offsets: np.ndarray, chosen: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Return where the values of the samples ``chosen`` are, one sample behind the other, and how many each has."""
    begins = offsets[chosen]
    counts = offsets[chosen + 1] - begins
    ends = np.cumsum(counts)
    return np.repeat(begins - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0), counts


def part_of(samples: Samples, chosen: np.ndarray, pinned: bool = False) -> Part:
    """Return the samples ``chosen`` as one row, the shortest first."""
    lengths = samples.offsets[chosen + 1] - samples.offsets[chosen]
    chosen = chosen[np.argsort(lengths, kind="stable")]
    where, lengths = ragged(samples.offsets, chosen)
    ends = np.cumsum(lengths)
    positions = np.arange(len(where)) - np.repeat(ends - lengths, lengths)
    segments = positions >= np.repeat(samples.second[chosen].astype(np.int64), lengths)
    masked, counts = ragged(samples.masked_offsets, chosen)
    places = np.repeat(ends - lengths, counts) + samples.masked_places[masked]

    def tensor(array: np.ndarray, dtype: Any = np.int64) -> torch.Tensor:
        made = torch.from_numpy(np.ascontiguousarray(array).astype(dtype))
        return made.pin_memory() if pinned else made

    offsets = tensor(np.concatenate(([0], ends)), np.int32)
    rows = Rows(
        tensor(samples.tokens[where]), tensor(segments), tensor(positions), offsets, int(lengths.max(initial=0))
    )
    return Part(rows, tensor(places), tensor(samples.masked_labels[masked]), tensor(samples.next[chosen]))


def step_of(config: Config, samples: Samples, ranks: Ranks, step: int) -> Batch:
    """Read this rank's samples of a step, and the weights of their losses."""
    everyone = samples_of_step(config, len(samples), ranks.size, step)
    mine = everyone.reshape(ranks.size, config.accumulation, -1)[ranks.rank]
    masked = int((samples.masked_offsets[everyone + 1] - samples.masked_offsets[everyone]).sum())
    batch = [part_of(samples, chosen, ranks.context.type == "cuda") for chosen in mine]
    return [weighted(part, config, ranks, masked) for part in batch]


def weighted(part: Part, config: Config, ranks: Ranks, masked: int) -> Part:
    """Give a part the weights of its losses; ``masked`` counts the masked words of all ranks in the step."""
    if config.masked_mean == "batch":
        masked = len(part.labels) * ranks.size * config.accumulation
    return part._replace(masked_weight=1.0 / max(1, masked), next_weight=1.0 / (config.batch_size * ranks.size))


class TrainingInput:
    """An endless stream of training batches on this rank's device, from ``first_step`` of the run on.

    Nothing is read before the first batch is asked for. ``close`` ends the threads that read ahead.
    """

    def __init__(self, config: Config, samples: Samples, ranks: Ranks, first_step: int) -> None:
        make = partial(step_of, config, samples, ranks)
        self._batches = read_ahead(make, count(first_step), config.prefetch, THREADS)
        self._device = ranks.context
        self.close = self._batches.close

    def next(self) -> Batch:
        """Return the next batch."""
        batch = next(self._batches)
        return batch if self._device.type == "cpu" else [part.to(self._device) for part in batch]


class EvaluationInput:
    """Passes over the evaluation samples, each on one rank; all ranks have as many batches, the last may be empty."""

    def __init__(self, config: Config, samples: Samples, ranks: Ranks) -> None:
        self.masked = len(samples.masked_labels)
        self._config, self._samples, self._ranks = config, samples, ranks

    def one_pass(self) -> Generator[Optional[Part], None, None]:
        """Yield batches of neighbours in length; None where this rank has no sample left."""
        size, ranks = self._config.eval_batch_size, self._ranks
        order = np.argsort(self._samples.lengths, kind="stable")
        mine = order[ranks.rank :: ranks.size]
        batches = [mine[begin : begin + size] for begin in range(0, -(-len(order) // ranks.size), size)]
        make = partial(part_of, self._samples, pinned=ranks.context.type == "cuda")
        filled = [chosen for chosen in batches if len(chosen)]
        with closing(read_ahead(make, filled, self._config.prefetch, THREADS)) as parts:
            for part in parts:
                yield part.to(ranks.context)
        yield from [None] * (len(batches) - len(filled))


def check(config: Config, data: DataSet, ranks: Ranks) -> DataSet:
    """Refuse a data set that the configuration cannot train on; Problem says why."""
    total = config.batch_size * ranks.size
    if len(data.train) < total:
        raise Problem(
            f"{len(data.train):,} training samples",
            f"at least the {total:,} of a step",
            "take a smaller batch, fewer ranks, or more data",
        )
    if data.sequence_length > config.positions:
        raise Problem(
            f"samples of up to {data.sequence_length} tokens in {data.folder}",
            f"at most positions={config.positions}",
            f"set positions={data.sequence_length}, or prepare the data with a shorter sequence",
        )
    return data


def noise(config: Config, vocabulary: int, ranks: Ranks) -> Batch:
    """A batch as full as they come: samples of the longest length, a seventh of their words masked."""
    length, per_part = config.positions, config.batch_size // config.accumulation
    masked = max(1, length // 7)
    generator = torch.Generator().manual_seed(config.seed)
    places = torch.stack([torch.randperm(length, generator=generator)[:masked] for _ in range(per_part)])
    rows = Rows(
        torch.randint(vocabulary, (per_part * length,), generator=generator),
        (torch.arange(length) >= length // 2).long().repeat(per_part),
        torch.arange(length).repeat(per_part),
        torch.arange(0, per_part * length + 1, length, dtype=torch.int32),
        length,
    )
    labels = torch.randint(vocabulary, (per_part * masked,), generator=generator)
    follows = torch.randint(2, (per_part,), generator=generator)
    flat = (places + torch.arange(per_part)[:, None] * length).flatten()
    part = Part(rows, flat, labels, follows).to(ranks.context)
    return [weighted(part, config, ranks, len(labels) * ranks.size * config.accumulation)] * config.accumulation
