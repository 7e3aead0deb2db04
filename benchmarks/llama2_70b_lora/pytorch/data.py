"""Batches from a prepared data set, built by threads ahead of time; each group of ranks reads different samples."""

from functools import lru_cache, partial
from typing import Generator, Iterable, Iterator, List, NamedTuple, Sequence

import numpy as np
import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch.batches import ahead, to_device
from benchmarks.llama.pytorch.data import THREADS
from benchmarks.llama.pytorch.network import IGNORE_INDEX
from benchmarks.llama.pytorch.parallel import MeshPosition, mesh_position
from benchmarks.llama2_70b_lora.dataset import Samples
from benchmarks.llama2_70b_lora.pytorch.config import Config


class MicroBatch(NamedTuple):
    tokens: torch.Tensor  # int64 (B, L)
    labels: torch.Tensor  # int64 (B, L): next tokens; IGNORE_INDEX where excluded from the loss
    positions: torch.Tensor  # int64 (L,): this rank's positions within the samples
    counted: int  # labels in the loss, on all ranks that share the samples; 0 without a sample
    samples: torch.Tensor  # int64 (B,): numbers of the samples within the run


Batch = List[MicroBatch]  # the group's samples per step, as micro-batches


@lru_cache(maxsize=4)
def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of an epoch's samples."""
    return np.random.RandomState([seed % (1 << 32), seed >> 32, epoch]).permutation(count)


def micro_batch(tokens: np.ndarray, counts: np.ndarray, position: MeshPosition, samples: Sequence[int]) -> MicroBatch:
    """Return this rank's positions in ``tokens`` (B, L): each predicts the next token, except the last."""
    labels = np.full(tokens.shape, IGNORE_INDEX, np.int64)
    labels[:, :-1] = np.where(counts[:, 1:], tokens[:, 1:], IGNORE_INDEX)
    positions = position.positions(tokens.shape[1])
    inputs = torch.from_numpy(tokens.astype(np.int64))
    label_count = int((labels != IGNORE_INDEX).sum())
    return MicroBatch(
        inputs[:, positions], torch.from_numpy(labels)[:, positions], positions, label_count, torch.tensor(samples)
    )


def step_of(config: Config, data: Samples, ranks: Ranks, step: int) -> Batch:
    position, size = mesh_position(config, ranks), config.micro_batch_size
    first = step * config.global_batch(ranks.size) + position.group * config.batch_size
    micro_batches = []
    for start in range(first, first + config.batch_size, size):
        numbers = range(start, start + size)
        rows = [shuffled(len(data), config.seed, number // len(data))[number % len(data)] for number in numbers]
        micro_batches.append(micro_batch(data.tokens[rows], data.counts[rows], position, numbers))
    return micro_batches


def training_input(config: Config, data: Samples, ranks: Ranks, steps: Iterable[int]) -> Generator[Batch, None, None]:
    """Yield the training batches for the run's ``steps`` on this rank's device; see ``ahead``.

    Each epoch has a different sample order; a batch may span two epochs.
    """
    return ahead(partial(step_of, config, data, ranks), steps, config.prefetch, THREADS, ranks.context)


def evaluation_input(config: Config, data: Samples, ranks: Ranks) -> Iterator[MicroBatch]:
    """Yield the group's evaluation samples, equally many for all groups; the last may not count (``counted`` 0)."""
    position = mesh_position(config, ranks)
    for start in range(0, len(data), position.groups):
        row = start + position.group
        part = micro_batch(data.tokens[[row % len(data)]], data.counts[[row % len(data)]], position, (row,))
        if row >= len(data):
            part = part._replace(labels=torch.full_like(part.labels, IGNORE_INDEX), counted=0)
        yield to_device(part, ranks.context)


def synthetic_batch(config: Config, vocabulary: int, ranks: Ranks) -> Batch:
    """Return a batch with random tokens."""
    shape = (config.micro_batch_size, config.sequence_length)
    tokens = np.random.RandomState(0).randint(vocabulary, size=shape)
    part = micro_batch(tokens, np.ones(shape, bool), mesh_position(config, ranks), range(len(tokens)))
    return [to_device(part, ranks.context)] * config.accumulation
