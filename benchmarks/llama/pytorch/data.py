"""Batches from a prepared data set, built by threads ahead of time; each group of ranks reads different samples."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any, Generator, Iterable, Iterator, List, NamedTuple, Sequence

import numpy as np
import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.run.run import Run
from benchmarks.common.torch.batches import ahead, to_device
from benchmarks.llama import order, tokenization
from benchmarks.llama.dataset import DataSet, open_data
from benchmarks.llama.megatron import Documents
from benchmarks.llama.order import Order
from benchmarks.llama.pytorch.network import IGNORE_INDEX
from benchmarks.llama.pytorch.parallel import MeshPosition, mesh_position
from benchmarks.llama.pytorch.texts import TEXTS

THREADS = 2  # that build batches
ORDER = "order"  # a run's subfolder with the sample order


class MicroBatch(NamedTuple):
    tokens: torch.Tensor  # int64 (B, L)
    labels: torch.Tensor  # int64 (B, L): the tokens that follow
    positions: torch.Tensor  # int64 (L,): this rank's positions of the samples


Batch = List[MicroBatch]  # the group's samples per step, as micro-batches


def open_for(config: Any, folder: Path) -> DataSet:
    """Open a prepared data set; with eod_mask_loss, exclude the labels after end-of-document tokens."""
    data = open_data(folder)
    if not config.eod_mask_loss:
        return data
    return data.excluding_labels_after(tokenization.read(folder / tokenization.FILE).token_to_id(tokenization.END))


def training_order(config: Any, data: DataSet, run: Run) -> Order:
    """Return the order of the run's samples, memory-mapped; rank 0 writes it. The same for any number of ranks.

    As in NVIDIA's submissions it is built from the index before run_start, without reading tokens, and reused only by
    the same run when it resumes: other runs may not reuse it (run.sub, "which is forbidden").
    """
    folder, samples = run.output / ORDER, config.max_steps * config.global_batch(run.ranks.size)
    arguments = (data.train.lengths, config.sequence_length, samples, config.seed)
    if run.ranks.rank == 0 and not order.is_there(folder, key := order.key_of(*arguments)):
        order.write(order.shuffled(*arguments), folder, key)
    pytorch.barrier()
    return order.read(folder, config.sequence_length)


def remove_order(run: Run) -> None:
    """Free the space of the order, 3.4 GB with C4, at the end of the run."""
    if run.ranks.rank == 0:
        shutil.rmtree(run.output / ORDER, ignore_errors=True)


def micro_batch(
    config: Any, source: Documents, samples: Order, position: MeshPosition, numbers: Sequence[int], rows: int
) -> MicroBatch:
    """Return the samples of some ``numbers``, filled up to ``rows`` by some that no loss counts."""
    tokens = np.zeros((rows, config.sequence_length + 1), np.int64)
    for row, number in enumerate(numbers):
        tokens[row] = samples.tokens(source, number)
    labels = torch.from_numpy(tokens[:, 1:].copy())
    labels[torch.from_numpy(tokens[:, :-1] == source.end_token)] = IGNORE_INDEX
    labels[len(numbers) :] = IGNORE_INDEX
    positions = position.positions(config.sequence_length)
    return MicroBatch(torch.from_numpy(tokens[:, :-1])[:, positions], labels[:, positions], positions)


def step_of(config: Any, source: Documents, samples: Order, ranks: Ranks, step: int) -> Batch:
    position, size = mesh_position(config, ranks), config.micro_batch_size
    first = step * config.global_batch(ranks.size) + position.group * config.batch_size
    parts = (range(start, start + size) for start in range(first, first + config.batch_size, size))
    return [micro_batch(config, source, samples, position, part, size) for part in parts]


def training_input(
    config: Any, source: Documents, samples: Order, ranks: Ranks, steps: Iterable[int]
) -> Generator[Batch, None, None]:
    """Yield the training batches of ``steps`` of the run on this rank's device; see ``ahead``."""
    return ahead(partial(step_of, config, source, samples, ranks), steps, config.prefetch, THREADS, ranks.context)


def evaluation_input(config: Any, source: Documents, samples: Order, ranks: Ranks) -> Iterator[MicroBatch]:
    """Yield the group's evaluation samples. All groups have equally many batches; the last may be padding only."""
    position, size = mesh_position(config, ranks), config.eval_batch_size
    per_group = -(-len(samples) // position.groups)
    local_samples = range(position.group, len(samples), position.groups)
    for start in range(0, per_group, size):
        numbers = local_samples[start : start + size]
        yield to_device(micro_batch(config, source, samples, position, numbers, size), ranks.context)


def evaluated_samples(config: Any, data: DataSet, evaluations: int) -> Order:
    """Return the evaluation samples; ``evaluations``: number of evaluations that Megatron shuffles samples for."""
    arguments = (data.test.lengths, config.sequence_length, config.eval_samples)
    if config.eval_shuffle:
        return order.shuffled_start(*arguments, evaluations, config.seed)
    return order.in_order(*arguments)


def shown_samples(data: DataSet, samples: Order) -> List[np.ndarray]:
    """Return the samples that a trained network continues for people to read."""
    numbers = np.linspace(0, len(samples) - 1, min(TEXTS, len(samples))).astype(int)
    return [samples.tokens(data.test, number) for number in numbers.tolist()]


def synthetic_batch(config: Any, vocabulary: int, ranks: Ranks) -> Batch:
    """Return a batch of random tokens."""
    return [synthetic_micro_batch(config, vocabulary, ranks, config.micro_batch_size)] * config.accumulation


def synthetic_micro_batch(config: Any, vocabulary: int, ranks: Ranks, rows: int) -> MicroBatch:
    """Return ``rows`` samples of random tokens."""
    position, generator = mesh_position(config, ranks), torch.Generator().manual_seed(config.seed)
    tokens = torch.randint(vocabulary, (rows, config.sequence_length + 1), generator=generator)
    positions = position.positions(config.sequence_length)
    return to_device(MicroBatch(tokens[:, positions], tokens[:, positions + 1], positions), ranks.context)
