"""Windows as batches without padding on this rank's device, built ahead on a thread, and a synthetic batch."""

from dataclasses import replace
from itertools import count
from typing import Generator, Iterator, NamedTuple

import numpy as np
import torch

from benchmarks.bert_squad.arrays import DataSet, Windows
from benchmarks.bert_squad.pytorch.config import Config
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch.batches import ahead, to_device
from benchmarks.language.pytorch.encoder import Rows, fill_up, gather_rows


class Batch(NamedTuple):
    # This rank's windows for a step: B packed windows with T tokens, sorted by length.

    rows: Rows
    # int64 (T,): indices of the tokens in a flattened (B, longest) table; B * longest for padding.
    wide: torch.Tensor
    start: torch.Tensor  # int64 (B,): position of the answer's first token in the window
    end: torch.Tensor  # int64 (B,): position of the last token
    indices: torch.Tensor  # int64 (B,): which windows they are


def steps_per_epoch(config: Config, data: DataSet, ranks: Ranks) -> int:
    # Return the number of complete global batches; Config.mismatches rejects a data set without any.
    return len(data.train) // (config.batch_size * ranks.size)


def batch_indices(config: Config, windows: Windows, step: int, steps: int, ranks: Ranks) -> np.ndarray:
    """Return this rank's windows for a step, int64 (batch_size,): the same global batch for any number of ranks.

    An epoch is a seeded permutation without the last, incomplete batch. A batch's windows are distributed by length,
    to balance the load.
    """
    epoch, number = divmod(step, steps)
    size = config.batch_size * ranks.size
    # NumPy has only 2 ** 32 seeds; a large prime separates the epochs of different seeds.
    order = np.random.RandomState((config.seed * 1_000_003 + epoch) % 2**32).permutation(len(windows))
    batch = order[number * size : (number + 1) * size]
    return batch[np.argsort(-windows.lengths[batch], kind="stable")][ranks.rank :: ranks.size]


def gathered(windows: Windows, indices: np.ndarray) -> Batch:
    rows = gather_rows(windows, indices)
    rows = replace(rows, longest=max(1, rows.longest))
    lengths = (rows.offsets[1:] - rows.offsets[:-1]).long()
    wide = torch.repeat_interleave(torch.arange(len(indices)) * rows.longest, lengths) + rows.positions
    start, end = (torch.from_numpy(positions[indices].astype(np.int64)) for positions in (windows.start, windows.end))
    return Batch(rows, wide, start, end, torch.from_numpy(indices))


def filled(batch: Batch, config: Config) -> Batch:
    """Pad a row to the next multiple of token_bucket, with a table as wide as the longest possible window.

    The same number of padding sequences is appended to every row; the loss ignores them.
    """
    bucket, longest = config.token_bucket, config.sequence_length
    there = len(batch.wide)
    rows = fill_up(batch.rows, -(-there // bucket) * bucket, -(-bucket // longest) + 1, longest)
    owners = torch.div(batch.wide, max(1, batch.rows.longest), rounding_mode="floor")
    wide = owners * longest + batch.rows.positions
    missing = len(rows.tokens) - there
    return batch._replace(rows=rows, wide=torch.cat([wide, wide.new_full((missing,), len(batch.start) * longest)]))


def training_input(
    config: Config, data: DataSet, steps: int, ranks: Ranks, position: int
) -> Generator[Batch, None, None]:
    """Yield training batches without end from step ``position``; ``close`` stops the read-ahead thread.

    The thread starts with the first batch.
    """

    def make(step: int) -> Batch:
        batch = gathered(data.train, batch_indices(config, data.train, step, steps, ranks))
        return filled(batch, config) if config.cuda_graph else batch

    return ahead(make, count(position), config.prefetch, 1, ranks.context)


def evaluation_batches(config: Config, windows: Windows, ranks: Ranks) -> Iterator[Batch]:
    # Yield this rank's batches of all windows, longest first; all ranks have the same number of batches, some empty.
    order = np.argsort(-windows.lengths, kind="stable")
    size = config.eval_batch_size * ranks.size

    def make(start: int) -> Batch:
        return gathered(windows, order[start : start + size][ranks.rank :: ranks.size])

    return ahead(make, range(0, len(order), size), config.prefetch, 1, ranks.context)


def synthetic_batch(config: Config, vocabulary: int, ranks: Ranks, tokens: int = 0) -> Batch:
    # A batch of windows of equal length, of random tokens: about ``tokens`` tokens, by default full windows.
    count = config.batch_size
    length = max(2, min(tokens // count or config.sequence_length, config.sequence_length))
    draw = np.random.RandomState(config.seed % 2**32)
    windows = Windows(
        tokens=draw.randint(0, vocabulary, count * length).astype(np.uint16),
        begins=np.zeros(0, np.uint16),
        ends=np.zeros(0, np.uint16),
        best=np.zeros(0, np.uint8),
        offsets=np.arange(count + 1) * length,
        second=np.full(count, length // 4, np.uint16),
        start=draw.randint(length // 4, length, count).astype(np.uint16),
        end=draw.randint(length // 4, length, count).astype(np.uint16),
        question=np.zeros(count, np.int32),
    )
    batch = gathered(windows, np.arange(count))
    return to_device(filled(batch, config) if config.cuda_graph else batch, ranks.context)
