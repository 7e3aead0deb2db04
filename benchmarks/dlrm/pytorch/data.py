"""Batches of a prepared data set: each rank reads the numbers of its own rows and the indices of its own tables.

The order of an epoch follows from the seed and the epoch alone, so that a run can go on at any step.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from benchmarks.common.data import passport
from benchmarks.common.data.problem import Problem
from benchmarks.common.ranks import Ranks
from benchmarks.dlrm import blocks
from benchmarks.dlrm.blocks import BLOCK_ROWS, FIRST_TABLE, NUMBERS, TABLES
from benchmarks.dlrm.placement import most_rows
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


class BadInput(Exception):
    """The data cannot be trained on: what was found, expected, and what to do."""


def open_data(directory: Path, config: Config, ranks: int, memory: int) -> DataSet:
    """Open a data set and refuse what would fail later; ``memory`` is a rank's, in bytes.

    Raises:
        BadInput: files that do not fit the passport, indices outside their tables, tables larger than memory.
    """
    again = f"do this: python -m benchmarks.dlrm.prepare --verify {directory}"
    try:
        found = passport.read(directory)
        facts = found["facts"]
        rows = {split: found["splits"][split]["count"] for split in ("train", "val")}
        sizes = tuple(int(size) for size in facts["table_sizes"])
        if len(sizes) != TABLES or min(sizes) < 1 or facts["block_rows"] != BLOCK_ROWS:
            raise ValueError(f"{len(sizes)} tables, blocks of {facts['block_rows']} rows")
        opened = {split: blocks.open_blocks(directory / f"{split}.bin", rows[split]) for split in rows}
    except (Problem, OSError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{directory} is no data set of dlrm: {error}\n  {again}") from None
    for split, content in opened.items():
        chosen = np.unique(np.linspace(0, len(content) - 1, CHECKED_BLOCKS).astype(int))
        for table, least, most in blocks.outside(content, sizes, chosen):
            raise BadInput(
                f"{split}.bin has indices from {least:,} to {most:,} for table {table}\n"
                f"  expected: 0 to {sizes[table] - 1:,}\n  {again}"
            )
    check_memory(sizes, config, ranks, memory)
    return DataSet(opened["train"], opened["val"], rows["train"], rows["val"], sizes)


def check_memory(sizes: Sequence[int], config: Config, ranks: int, memory: int) -> None:
    """Refuse tables that do not fit into a rank's memory, or leave none for anything else."""
    needed = most_rows(sizes, ranks) * config.bottom_mlp[-1] * 4
    if needed > memory * 0.9:
        most = max(sizes) * config.bottom_mlp[-1] * 4
        remedy = "use more ranks" if most < memory * 0.9 else "prepare with a lower --index-limit"
        raise BadInput(
            f"the embedding tables need {needed / 1e9:,.1f} GB on the fullest of {ranks} ranks\n"
            f"  expected: at most {memory * 0.9 / 1e9:,.1f} GB, nine tenths of what is free\n"
            f"  do this: {remedy}, or set a narrower bottom_mlp"
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


class Reader:
    """Batches of one split for one rank, as tensors on the CPU."""

    def __init__(
        self, content: np.ndarray, rows: int, batch_size: int, tables: Sequence[int], ranks: Ranks
    ) -> None:
        self._content = content
        self._rows = rows
        self._batch_size = batch_size
        self._own = list(range(FIRST_TABLE))
        self._tables = [FIRST_TABLE + table for table in tables]
        self._ranks = ranks

    def batch(self, order: np.ndarray, step: int) -> Batch:
        """The rows of ``step``: the global batch's indices, this rank's labels and numbers."""
        size = self._batch_size
        total = size * self._ranks.size
        mine = step * total + self._ranks.rank * size
        own = torch.from_numpy(
            np.ascontiguousarray(read(self._content, order, self._own, mine, size, self._rows))
        )
        indices = read(self._content, order, self._tables, step * total, total, self._rows)
        return Batch(
            own[1 : 1 + NUMBERS].view(torch.float32).t().contiguous(),
            own[0].float(),
            torch.from_numpy(indices.astype(np.int64)),
        )


class TrainingInput:
    """An endless stream of training batches on this rank's device, from ``first_step`` of the run on."""

    def __init__(
        self, config: Config, data: DataSet, tables: Sequence[int], ranks: Ranks, first_step: int
    ) -> None:
        self._seed = config.seed
        self._rows = data.train_rows
        self._ranks = ranks
        self._steps_per_epoch = -(-data.train_rows // (config.batch_size * ranks.size))
        self._step = first_step
        self._mover = Mover(ranks.context)
        if config.shuffle == "rows":
            self._next: Callable[[], Batch] = HeldRows(config, data, tables, ranks, self._mover).batch_at(
                self._place
            )
        else:
            reader = Reader(data.train, data.train_rows, config.batch_size, tables, ranks)
            self._next = self._streamed(reader, config.prefetch)

    def next(self) -> Batch:
        """The next batch."""
        return self._next()

    def _place(self) -> Tuple[int, int]:
        """Epoch and step in it of the next batch."""
        place = divmod(self._step, self._steps_per_epoch)
        self._step += 1
        return place

    def _read_all(self, reader: Reader) -> Iterator[Batch]:
        order, epoch_of_order = np.zeros(0, int), -1
        while True:
            epoch, step = self._place()
            if epoch != epoch_of_order:
                order, epoch_of_order = epoch_order(self._seed, epoch, self._rows), epoch
            yield self._mover.send(reader.batch(order, step))

    def _streamed(self, reader: Reader, ahead: int) -> Callable[[], Batch]:
        batches = self._read_all(reader)
        if ahead == 0:
            return lambda: self._mover.take(next(batches))
        waiting: "queue.Queue[Any]" = queue.Queue(ahead)

        def fill() -> None:
            try:
                for batch in batches:
                    waiting.put(batch)
            except BaseException as error:
                waiting.put(error)  # the loop raises it

        threading.Thread(target=fill, daemon=True).start()

        def take() -> Batch:
            batch = waiting.get()
            if isinstance(batch, BaseException):
                raise batch
            return self._mover.take(batch)

        return take


class Mover:
    """Copies batches to a GPU on a stream of its own, beside the computation; does nothing for a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._events: "queue.Queue[Any]" = queue.Queue()

    def send(self, batch: Batch) -> Batch:
        """Begin to copy; the batch may be used after ``take``, in the same order."""
        if self._stream is None:
            return batch
        with torch.cuda.stream(self._stream):
            moved = Batch(*(tensor.pin_memory().to(self._device, non_blocking=True) for tensor in batch))
            event = torch.cuda.Event()
            event.record(self._stream)
        self._events.put(event)
        return moved

    def take(self, batch: Batch) -> Batch:
        """Let the computation wait for the copy, and keep the memory until the computation is through."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._events.get())
            for tensor in batch:
                tensor.record_stream(current)
        return batch


class HeldRows:
    """All training rows on the device, drawn one by one without replacement in each epoch."""

    def __init__(
        self, config: Config, data: DataSet, tables: Sequence[int], ranks: Ranks, mover: Mover
    ) -> None:
        whole = [FIRST_TABLE + table for table in tables]
        order = np.arange(len(data.train))
        rows = data.train_rows
        own = torch.from_numpy(
            np.ascontiguousarray(read(data.train, order, range(FIRST_TABLE), 0, rows, rows))
        )
        self._labels = own[0].float().to(ranks.context)
        self._numbers = own[1:].view(torch.float32).t().contiguous().to(ranks.context)
        indices = read(data.train, order, whole, 0, rows, rows)
        self._indices = torch.from_numpy(indices.astype(np.int64)).to(ranks.context)
        self._config = config
        self._ranks = ranks
        self._epoch = -1
        self._order = torch.zeros(0)

    def batch_at(self, place: Callable[[], Tuple[int, int]]) -> Callable[[], Batch]:
        """A function that returns the batch of the next ``place``."""

        def following() -> Batch:
            epoch, step = place()
            if epoch != self._epoch:
                self._epoch, self._order = epoch, self._shuffled(epoch)
            size = self._config.batch_size
            total = size * self._ranks.size
            rows = self._order[step * total : (step + 1) * total]
            mine = rows[self._ranks.rank * size : (self._ranks.rank + 1) * size]
            return Batch(
                self._numbers.index_select(0, mine),
                self._labels.index_select(0, mine),
                self._indices.index_select(1, rows),
            )

        return following

    def _shuffled(self, epoch: int) -> torch.Tensor:
        """A permutation, the same on all ranks; its beginning fills the last batch up."""
        generator = torch.Generator(self._labels.device).manual_seed(self._config.seed * 1000 + epoch)
        order = torch.randperm(len(self._labels), generator=generator, device=self._labels.device)
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
        self._kept: Optional[List[Batch]] = [] if config.cache_eval_data else None

    def one_pass(self) -> Iterator[Tuple[Batch, int]]:
        """Batches with the number of their first rows on this rank that count."""
        for step in range(self._steps):
            first = (step * self._ranks.size + self._ranks.rank) * self._size
            counted = max(0, min(self._size, self.total - first))
            if self._kept is not None and step < len(self._kept):
                yield self._kept[step], counted
                continue
            batch = Batch(*(each.to(self._ranks.context) for each in self._reader.batch(self._order, step)))
            if self._kept is not None:
                self._kept.append(batch)
            yield batch, counted
