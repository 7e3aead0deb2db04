"""Batches of a prepared data set, built ahead on threads: each group of ranks knows which samples are its own."""

from functools import partial
from typing import Any, Generator, Iterable, Iterator, List, NamedTuple, Sequence

import numpy as np
import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.llama import order
from benchmarks.llama.megatron import Documents
from benchmarks.llama.order import Order
from benchmarks.llama.pytorch.batches import ahead, to_device
from benchmarks.llama.pytorch.network import IGNORED
from benchmarks.llama.pytorch.parallel import Place, place_of
from benchmarks.llama.pytorch.texts import TEXTS
from benchmarks.llama31_8b.dataset import DataSet

ORDER = "order"  # folder of a run that holds the order of its samples


class MicroBatch(NamedTuple):
    tokens: torch.Tensor  # int64 (B, L)
    labels: torch.Tensor  # int64 (B, L): the tokens that follow
    positions: torch.Tensor  # int64 (L,): this rank's positions of the samples


Batch = List[MicroBatch]  # a group's samples of a step, in the parts that they are computed in


def training_order(config: Any, data: DataSet, run: Run) -> Order:
    """Return the order of the run's samples, which rank 0 writes for all; the same for any number of ranks.

    A resumed run has it already.
    """
    folder, samples = run.output / ORDER, config.max_steps * config.batch_size * run.ranks.size
    asked = (data.train.lengths, config.sequence_length, samples, config.seed)
    if run.ranks.rank == 0 and not order.is_there(folder, key := order.key_of(*asked)):
        order.write(order.shuffled(*asked), folder, key)
    pytorch.barrier()
    return order.read(folder, config.sequence_length)


def place(config: Any, ranks: Ranks) -> Place:
    return place_of(ranks, config.tensor_parallelism, config.context_parallelism)


def micro_batch(
    config: Any, source: Documents, samples: Order, at: Place, numbers: Sequence[int], rows: int
) -> MicroBatch:
    """Return the samples of some ``numbers``, filled up to ``rows`` by some that no loss counts."""
    tokens = np.zeros((rows, config.sequence_length + 1), np.int64)
    for row, number in enumerate(numbers):
        tokens[row] = samples.tokens(source, number)
    labels = torch.from_numpy(tokens[:, 1:].copy())
    labels[len(numbers) :] = IGNORED
    positions = at.positions(config.sequence_length)
    return MicroBatch(torch.from_numpy(tokens[:, :-1])[:, positions], labels[:, positions], positions)


def step_of(config: Any, source: Documents, samples: Order, ranks: Ranks, step: int) -> Batch:
    at, size = place(config, ranks), config.micro_batch_size
    mine = config.batch_size * config.group
    first = step * config.batch_size * ranks.size + at.group * mine
    parts = (range(begin, begin + size) for begin in range(first, first + mine, size))
    return [micro_batch(config, source, samples, at, part, size) for part in parts]


def training_input(
    config: Any, source: Documents, samples: Order, ranks: Ranks, steps: Iterable[int]
) -> Generator[Batch, None, None]:
    """Yield the training batches of ``steps`` of the run on this rank's device; see ``ahead``."""
    return ahead(partial(step_of, config, source, samples, ranks), steps, config.prefetch, ranks.context)


def evaluation_input(config: Any, source: Documents, samples: Order, ranks: Ranks) -> Iterator[MicroBatch]:
    """Yield the group's evaluation samples; all groups have as many batches, the last of which may count nothing."""
    at, size = place(config, ranks), config.eval_batch_size
    each = -(-len(samples) // at.groups)
    mine = range(at.group, len(samples), at.groups)
    for begin in range(0, each, size):
        part = micro_batch(config, source, samples, at, mine[begin : begin + size], size)
        yield to_device(part, ranks.context)


def evaluated_samples(config: Any, data: DataSet) -> Order:
    return order.in_order(data.test.lengths, config.sequence_length, config.eval_samples)


def shown_samples(data: DataSet, samples: Order) -> List[np.ndarray]:
    """Return the samples that a trained network continues for people to read."""
    numbers = np.linspace(0, len(samples) - 1, min(TEXTS, len(samples))).astype(int)
    return [samples.tokens(data.test, number) for number in numbers.tolist()]


def synthetic_batch(config: Any, vocabulary: int, ranks: Ranks) -> Batch:
    """Return a batch of random tokens."""
    at, generator = place(config, ranks), torch.Generator().manual_seed(config.seed)
    shape = (config.micro_batch_size, config.sequence_length + 1)
    tokens = torch.randint(vocabulary, shape, generator=generator)
    positions = at.positions(config.sequence_length)
    part = MicroBatch(tokens[:, positions], tokens[:, positions + 1], positions)
    return [to_device(part, ranks.context)] * config.accumulation
