"""Batches of a prepared data set: each rank reads the numbers of its own rows and the indices of its own tables.

The order of an epoch follows from the seed and the epoch alone, so that a run can resume at any step.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Callable, Dict, Iterator, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from benchmarks.common.data import passport
from benchmarks.common.data.problem import Problem
from benchmarks.common.ranks import Ranks
from benchmarks.dlrm import blocks
from benchmarks.dlrm.blocks import BLOCK_ROWS, FIRST_TABLE, NUMBERS, TABLES
from benchmarks.dlrm.placement import place
from benchmarks.dlrm.pytorch.config import Config

CHECKED_BLOCKS = 256
"""Blocks of a split whose indices are looked at before the clock starts, spread over the file."""


class Batch(NamedTuple):
    """One step's rows on this rank's device."""

    numbers: torch.Tensor
    """(batch_size, 13) of this rank's rows."""
    labels: torch.Tensor
    """(batch_size,) float of this rank's rows."""
    indices: torch.Tensor
    """(my tables, global batch) int64 of all ranks' rows."""


class DataSet(NamedTuple):
    """A prepared data set, looked over."""

    train: np.ndarray
    val: np.ndarray
    train_rows: int
    val_rows: int
    table_sizes: Tuple[int, ...]


def open_data(directory: Path, config: Config, ranks: int, memory: int) -> DataSet:
    """Open a data set and refuse what would fail later; ``memory`` is a rank's, in bytes.

    Raises:
        Problem: files that do not fit the passport, indices outside their tables, tables larger than memory.
    """
    remedy = f"python -m benchmarks.dlrm.prepare --verify {directory}"
    try:
        content = passport.read(directory)
        facts = content["facts"]
        rows = {split: content["splits"][split]["count"] for split in ("train", "val")}
        sizes = tuple(int(size) for size in facts["table_sizes"])
        if len(sizes) != TABLES or min(sizes) < 1 or facts["block_rows"] != BLOCK_ROWS:
            raise ValueError(f"{len(sizes)} tables, blocks of {facts['block_rows']} rows")
        opened = {split: blocks.open_blocks(directory / f"{split}.bin", rows[split]) for split in rows}
    except (Problem, OSError, KeyError, TypeError, ValueError) as error:
        raise Problem(f"{directory} is no data set of dlrm: {error}", "", remedy) from None
    for split, stored in opened.items():
        chosen = np.unique(np.linspace(0, len(stored) - 1, CHECKED_BLOCKS).astype(int))
        for table, least, most in blocks.outside(stored, sizes, chosen.tolist()):
            found = f"{split}.bin has indices from {least:,} to {most:,} for table {table}"
            raise Problem(found, f"0 to {sizes[table] - 1:,}", remedy)
    check_memory(sizes, config, ranks, memory)
    return DataSet(opened["train"], opened["val"], rows["train"], rows["val"], sizes)


def check_memory(sizes: Sequence[int], config: Config, ranks: int, memory: int) -> None:
    """Refuse tables that do not fit into a rank's memory, or leave none for anything else."""
    row_bytes = config.bottom_mlp[-1] * 4
    needed = row_bytes * max(sum(sizes[table] for table in tables) for tables in place(sizes, ranks))
    if needed > memory * 0.9:
        fits = max(sizes) * row_bytes < memory * 0.9
        remedy = "use more ranks" if fits else "prepare with a lower --index-limit"
        raise Problem(
            f"the embedding tables need {needed / 1e9:,.1f} GB on the fullest of {ranks} ranks",
            f"at most {memory * 0.9 / 1e9:,.1f} GB, nine tenths of what is free",
            f"{remedy}, or set a narrower bottom_mlp",
        )


def free_memory(ranks: Ranks) -> int:
    """Bytes that this rank may fill: its GPU's, or its share of the machine's."""
    if ranks.context.type == "cuda":
        return int(torch.cuda.mem_get_info(ranks.context)[0])
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // ranks.local_size
    return 1 << 62


def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """The blocks of a split in the order of an epoch; one that is not full comes last."""
    full = rows // BLOCK_ROWS
    order = np.random.default_rng([seed, epoch]).permutation(full)
    return order if full * BLOCK_ROWS == rows else np.append(order, full)


def read(
    content: np.ndarray, order: np.ndarray, columns: Sequence[int], first: int, count: int, rows: int
) -> np.ndarray:
    """Words (columns, count) from place ``first`` of the ordered rows on; behind the last row comes the first."""
    parts = []
    while count:
        first %= rows
        some = min(count, rows - first)
        begin, end = first // BLOCK_ROWS, -(-(first + some) // BLOCK_ROWS)
        taken = content[order[begin:end][:, None], np.asarray(columns)]
        lane = first - begin * BLOCK_ROWS
        parts.append(taken.transpose(1, 0, 2).reshape(len(columns), -1)[:, lane : lane + some])
        first, count = first + some, count - some
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


class Reader(NamedTuple):
    """Batches of one split for one rank, as tensors on the CPU."""

    content: np.ndarray
    rows: int
    batch_size: int
    tables: Sequence[int]
    ranks: Ranks

    def batch(self, order: np.ndarray, step: int) -> Batch:
        """Read the rows of ``step``: the global batch's indices, this rank's labels and numbers."""
        size = self.batch_size
        total = size * self.ranks.size
        mine = step * total + self.ranks.rank * size
        words = read(self.content, order, range(FIRST_TABLE), mine, size, self.rows)
        own = torch.from_numpy(np.ascontiguousarray(words))
        columns = [FIRST_TABLE + table for table in self.tables]
        indices = read(self.content, order, columns, step * total, total, self.rows)
        return Batch(
            own[1 : 1 + NUMBERS].view(torch.float32).t().contiguous(),
            own[0].float(),
            torch.from_numpy(indices.astype(np.int64)),
        )


class TrainingInput:
    """An endless stream of training batches on this rank's device, from ``first_step`` of the run on."""

    def __init__(self, config: Config, data: DataSet, tables: Sequence[int], ranks: Ranks, first_step: int) -> None:
        self._seed = config.seed
        self._rows = data.train_rows
        self._steps_per_epoch = -(-data.train_rows // (config.batch_size * ranks.size))
        self._step = first_step
        self._device = ranks.context
        if config.shuffle == "rows":
            held = HeldRows(config, data, tables, ranks)
            self.next: Callable[[], Batch] = lambda: held.batch(*self._place())
        else:
            reader = Reader(data.train, data.train_rows, config.batch_size, tables, ranks)
            self.next = self._streamed(reader, config.prefetch)

    def _place(self) -> Tuple[int, int]:
        """Epoch and step in it of the next batch."""
        place = divmod(self._step, self._steps_per_epoch)
        self._step += 1
        return place

    def _read_all(self, reader: Reader) -> Iterator[Callable[[], Batch]]:
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        order, epoch_of_order = np.zeros(0, int), -1
        while True:
            epoch, step = self._place()
            if epoch != epoch_of_order:
                order, epoch_of_order = epoch_order(self._seed, epoch, self._rows), epoch
            yield begin_copy(reader.batch(order, step), stream)

    def _streamed(self, reader: Reader, ahead: int) -> Callable[[], Batch]:
        batches = self._read_all(reader)
        if ahead == 0:
            return lambda: next(batches)()
        thread = ThreadPoolExecutor(1)
        waiting = deque(thread.submit(next, batches) for _ in range(ahead))

        def take() -> Batch:
            waiting.append(thread.submit(next, batches))
            return waiting.popleft().result()()

        return take


def begin_copy(batch: Batch, stream: Optional[torch.cuda.Stream]) -> Callable[[], Batch]:
    """Begin to copy a batch to the GPU of ``stream``, next to the computation; None stays on the CPU.

    The call that is returned gives the batch to the computation.
    """
    if stream is None:
        return lambda: batch
    with torch.cuda.stream(stream):
        copied = Batch(*(tensor.pin_memory().to(stream.device, non_blocking=True) for tensor in batch))
        event = stream.record_event()

    def take() -> Batch:
        # The computation waits for the copy, and the memory is kept until the computation is through.
        current = torch.cuda.current_stream(stream.device)
        current.wait_event(event)
        for tensor in copied:
            tensor.record_stream(current)
        return copied

    return take


class HeldRows:
    """All training rows on the device, drawn one by one without replacement in each epoch."""

    def __init__(self, config: Config, data: DataSet, tables: Sequence[int], ranks: Ranks) -> None:
        reader = Reader(data.train, data.train_rows, data.train_rows, tables, replace(ranks, rank=0, size=1))
        self._all = Batch(*(each.to(ranks.context) for each in reader.batch(np.arange(len(data.train)), 0)))
        self._config, self._ranks = config, ranks
        self._epoch, self._order = -1, torch.zeros(0)

    def batch(self, epoch: int, step: int) -> Batch:
        """Select the rows of ``step`` of ``epoch``."""
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        size = self._config.batch_size
        total = size * self._ranks.size
        rows = self._order[step * total : (step + 1) * total]
        mine = rows[self._ranks.rank * size : (self._ranks.rank + 1) * size]
        numbers, labels, indices = self._all
        return Batch(numbers.index_select(0, mine), labels.index_select(0, mine), indices.index_select(1, rows))

    def _shuffled(self, epoch: int) -> torch.Tensor:
        """A permutation, the same on all ranks; its beginning fills the last batch up."""
        labels = self._all.labels
        generator = torch.Generator(labels.device).manual_seed(self._config.seed * 1000 + epoch)
        order = torch.randperm(len(labels), generator=generator, device=labels.device)
        total = self._config.batch_size * self._ranks.size
        missing = -len(order) % total
        return torch.cat((order, order.repeat(-(-missing // len(order)))[:missing])) if missing else order


class EvaluationInput:
    """Passes over the evaluation rows; each row counts on one rank, whatever fills the last batch up."""

    def __init__(self, config: Config, data: DataSet, tables: Sequence[int], ranks: Ranks) -> None:
        self.total = data.val_rows
        self._size = config.eval_batch_size
        self._ranks = ranks
        self._reader = Reader(data.val, data.val_rows, self._size, tables, ranks)
        self._order = np.arange(len(data.val))
        self._steps = -(-data.val_rows // (self._size * ranks.size))
        self._caches = config.cache_eval_data
        self._kept: Dict[int, Batch] = {}

    def one_pass(self) -> Iterator[Tuple[Batch, int]]:
        """Batches with the number of their first rows on this rank that count."""
        for step in range(self._steps):
            first = (step * self._ranks.size + self._ranks.rank) * self._size
            counted = max(0, min(self._size, self.total - first))
            batch = self._kept.get(step)
            if batch is None:
                batch = Batch(*(each.to(self._ranks.context) for each in self._reader.batch(self._order, step)))
                if self._caches:
                    self._kept[step] = batch
            yield batch, counted
