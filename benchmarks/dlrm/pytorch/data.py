"""Batches from a prepared data set: a rank reads the numbers in local rows and the indices for local tables.

An epoch's order depends only on seed and epoch, so that a run can resume at any step. Data are copied only one time
on the host: from the page cache to the batch.
"""

import os
from collections import deque
from contextlib import closing
from dataclasses import replace
from functools import lru_cache, partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Callable, Deque, Generator, Iterable, Iterator, List, NamedTuple, Sequence, Tuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common.data import manifest
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.read_ahead import read_ahead
from benchmarks.common.run.ranks import Ranks
from benchmarks.dlrm import blocks
from benchmarks.dlrm.blocks import BLOCK_BYTES, BLOCK_ROWS, COLUMNS, FIRST_TABLE, NUMBERS, TABLES
from benchmarks.dlrm.placement import Placement, place
from benchmarks.dlrm.pytorch.config import MEMORY_SHARE, Config

A = TypeVar("A", bound=Any)  # an array or a tensor
# Words per read task: every call needs the GIL, and passing a batch to another thread takes as long as reading 5,000
# rows (0.15 ms, two virtual machine cores)
TASK_WORDS = 1 << 21
LOCAL_COLUMNS = (*range(1, FIRST_TABLE), 0)  # columns read only for the local rows: numbers, label


class Batch(NamedTuple):
    """One step's rows on this rank's device."""

    # (batch_size, 13) of this rank's rows; may be in memory column by column, as it is on the disk.
    numbers: torch.Tensor
    labels: torch.Tensor  # (batch_size,) float of this rank's rows
    indices: torch.Tensor  # (my tables, global batch) int32 of all ranks' rows


Batches = Generator[Batch, None, None]


class DataSet(NamedTuple):
    train: np.memmap
    val: np.memmap
    train_rows: int
    val_rows: int
    table_sizes: Tuple[int, ...]
    placement: Placement


def open_data(directory: Path, config: Config, ranks: int, memory: int) -> DataSet:
    """Open a data set without reading rows; ``memory``: free bytes on every rank.

    Raises:
        Problem: files do not match dataset.json, or tables do not fit into memory.
    """
    try:
        content = manifest.read(directory)
        manifest_facts = content["facts"]
        rows = {split: content["splits"][split]["count"] for split in ("train", "val")}
        sizes = tuple(int(size) for size in manifest_facts["table_sizes"])
        if len(sizes) != TABLES or min(sizes) < 1 or manifest_facts["block_rows"] != BLOCK_ROWS:
            raise ValueError(f"{len(sizes)} tables, blocks of {manifest_facts['block_rows']} rows")
        opened = {split: blocks.open_blocks(directory / f"{split}.bin", rows[split]) for split in rows}
    except (Problem, OSError, KeyError, TypeError, ValueError) as error:
        raise Problem(
            f"{directory} is not a data set of dlrm: {error}",
            "",
            f"python -m benchmarks.dlrm.prepare --verify {directory}",
        ) from None
    placement = place(sizes, ranks, config.bottom_mlp[-1] * 4, memory * MEMORY_SHARE)
    return DataSet(opened["train"], opened["val"], rows["train"], rows["val"], sizes, placement)


def free_memory(ranks: Ranks) -> int:
    """Return the free bytes per rank, the minimum over all ranks: GPU memory, or a fraction of the host memory.
    Collective call.
    """
    if ranks.context.type == "cuda":
        free = int(torch.cuda.mem_get_info(ranks.context)[0])
    else:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 1 << 62)
        free //= ranks.local_size
    if ranks.size == 1:
        return free
    # The placement must be the same on all ranks.
    least = torch.tensor(free, device=ranks.context)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


# -- where rows are ------------------------------------------------------------------------------------


class Task(NamedTuple):
    epoch: int
    step: int
    steps: int


class Rows(NamedTuple):
    """Location of a batch's rows in memory with lines of ``width`` words, one line per column."""

    width: int
    start: int
    length: int

    def of(self, memory: A, lines: int) -> A:
        """Return the rows as (lines, length); ``memory`` is a one-dimensional array or tensor."""
        return memory[: lines * self.width].reshape(lines, self.width)[:, self.start : self.start + self.length]


class BatchBuffer(NamedTuple):
    """Contiguous memory for a task's batches, copied to a GPU in one operation."""

    memory: torch.Tensor
    tables: int
    local_words: int  # at the end, for local numbers and labels

    @classmethod
    def empty(cls, tables: int, size: int, local_words: int, pinned: bool = False) -> "BatchBuffer":
        """Allocate a buffer. PyTorch reuses pinned memory after the copy is complete."""
        return cls(torch.empty(size + local_words, dtype=torch.int32, pin_memory=pinned), tables, local_words)

    def parts(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Memory for indices, and for numbers and labels in the bits of float32."""
        return self.memory[: -self.local_words], self.memory[-self.local_words :]

    def batch(self, rows: Rows, local_rows: Rows) -> Batch:
        indices, local = self.parts()
        floats = local_rows.of(local.view(torch.float32), NUMBERS + 1)
        return Batch(floats[:NUMBERS].t(), floats[NUMBERS], rows.of(indices, self.tables))


def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """Return a split's blocks in an epoch's order; an incomplete block is last."""
    full = rows // BLOCK_ROWS
    order = np.random.default_rng([seed, epoch]).permutation(full)
    return order if full * BLOCK_ROWS == rows else np.append(order, full)


def block_rows_touched(rows: int) -> int:
    """Return the rows of the blocks that ``rows`` neighbours may touch."""
    return (-(-rows // BLOCK_ROWS) + 1) * BLOCK_ROWS


def block_spans(order: np.ndarray, rows: int, first: int, count: int) -> Iterator[Tuple[int, slice, slice]]:
    """Yield the location of ``count`` ordered rows from position ``first``: block, rows in the block, positions in the
    batch.

    After the last row the order wraps around.
    """
    done = 0
    while done < count:
        start = (first + done) % rows
        block, lane = divmod(start, BLOCK_ROWS)
        length = min(BLOCK_ROWS - lane, count - done, rows - start)
        yield int(order[block]), slice(lane, lane + length), slice(done, done + length)
        done += length


# -- reading -------------------------------------------------------------------------------------------


class Loader:
    def __init__(
        self, split: np.memmap, rows: int, batch_size: int, data: DataSet, tables: Sequence[int], ranks: Ranks
    ) -> None:
        self._rows, self._size, self._ranks = rows, batch_size, ranks
        self._total = batch_size * ranks.size
        self._tables, self._sizes = list(tables), np.array([data.table_sizes[table] for table in tables], np.int64)
        self._columns = [FIRST_TABLE + table for table in tables]
        # Slicing a memmap takes twice the time of slicing an array.
        self._lines = np.asarray(split).reshape(-1, BLOCK_ROWS)
        self._path = Path(str(split.filename))
        self._file = self._path.open("rb")
        self.max_steps = max(1, TASK_WORDS // (len(tables) * self._total + len(LOCAL_COLUMNS) * batch_size))
        on_gpu = ranks.context.type == "cuda"
        self._stream = torch.cuda.Stream(ranks.context) if on_gpu else None
        # Words per task: for the indices, and for local numbers and labels
        index_words = block_rows_touched(self.max_steps * self._total)
        local_words = len(LOCAL_COLUMNS) * min(index_words, self.max_steps * block_rows_touched(batch_size))
        self._empty = partial(BatchBuffer.empty, len(tables), len(tables) * index_words, local_words, on_gpu)
        self._used: Deque[BatchBuffer] = deque()

    def tasks(self, first_step: int) -> Iterator[Task]:
        steps_per_epoch, step = -(-self._rows // self._total), first_step
        while True:
            epoch, index = divmod(step, steps_per_epoch)
            # An epoch's last step may wrap around, and is a separate task.
            task = Task(epoch, index, max(1, min(self.max_steps, self._rows // self._total - index)))
            yield task
            step += task.steps

    def batches(
        self, tasks: Iterable[Task], order_of: Callable[[int], np.ndarray], ahead: int, reuse: bool = False
    ) -> Batches:
        """Yield the batches of ``tasks``, which are read up to ``ahead`` tasks in advance.

        Args:
            tasks: of the split.
            order_of: returns the blocks in an epoch's order.
            ahead: number of tasks; 0 reads on request.
            reuse: reuse CPU batch memory when the next batch is requested. New memory costs a page fault
                every 4 KiB. GPU memory is managed by PyTorch.
        """

        def load(task: Task) -> Tuple[Callable[[], BatchBuffer], List[Tuple[Rows, Rows]]]:
            return self._load(order_of(task.epoch), task)

        threads = max(1, len(os.sched_getaffinity(0)) // self._ranks.local_size)
        with closing(read_ahead(load, tasks, ahead, threads)) as loaded:
            for take, row_pairs in loaded:
                buffer = take()
                for row_pair in row_pairs:
                    yield buffer.batch(*row_pair)
                if reuse and self._stream is None:
                    self._used.append(buffer)

    # Read a task and start the copy; called by several threads. Returns a function that passes the buffer to the
    # computation, and the locations of the batches.
    def _load(self, order: np.ndarray, task: Task) -> Tuple[Callable[[], BatchBuffer], List[Tuple[Rows, Rows]]]:
        # Start reading the blocks of the next task from disk, to avoid waiting for pages. Ranks on a node share the
        # page cache, and divide the blocks.
        first, last = (step * self._total for step in (task.step + task.steps, task.step + 2 * task.steps))
        block_numbers = order[first // BLOCK_ROWS : -(-last // BLOCK_ROWS)]
        for block in block_numbers[self._ranks.local_rank :: self._ranks.local_size].tolist():
            os.posix_fadvise(self._file.fileno(), block * BLOCK_BYTES, BLOCK_BYTES, os.POSIX_FADV_WILLNEED)
        try:
            buffer = self._used.popleft()
        except IndexError:
            buffer = self._empty()
        row_pairs = self.fill(order, task, *(part.numpy() for part in buffer.parts()))
        if self._stream is None:
            return (lambda: buffer), row_pairs
        with torch.cuda.stream(self._stream):  # in parallel with the computation
            copied = buffer._replace(memory=buffer.memory.to(self._stream.device, non_blocking=True))
            event = self._stream.record_event()

        def take() -> BatchBuffer:
            # The computation waits for the copy, and the allocator keeps the memory until the computation is complete.
            current = torch.cuda.current_stream(copied.memory.device)
            current.wait_event(event)
            copied.memory.record_stream(current)
            return copied

        return take, row_pairs

    def fill(self, order: np.ndarray, task: Task, indices: np.ndarray, local: np.ndarray) -> List[Tuple[Rows, Rows]]:
        """Read a task's rows.

        Args:
            order: blocks in the order of the epoch.
            task: steps.
            indices: int32, output.
            local: int32, output for local numbers and labels, in the bits of float32.

        Returns:
            Location of the rows by step: indices (local tables, global batch), numbers and labels (14, batch_size).
        """
        rows = self._copy(order, task, 0, self._total, self._columns, indices)
        local_rows = self._copy(order, task, self._ranks.rank * self._size, self._size, LOCAL_COLUMNS, local)
        width = local_rows[0].width
        labels = local[NUMBERS * width : (NUMBERS + 1) * width]
        labels.view(np.float32)[:] = labels
        self._check(rows[0]._replace(length=self._total * task.steps).of(indices, len(self._columns)))
        return list(zip(rows, local_rows))

    # Copy ``columns`` of ``count`` rows, starting at ``offset`` in every global batch
    def _copy(
        self, order: np.ndarray, task: Task, offset: int, count: int, columns: Sequence[int], into: np.ndarray
    ) -> List[Rows]:
        firsts = [(task.step + number) * self._total + offset for number in range(task.steps)]
        if firsts[-1] + count > self._rows:  # a batch that wraps around to the first row
            around = Rows(count, 0, count)
            lines = around.of(into, len(columns))
            for block, lanes, here in block_spans(order, self._rows, firsts[0], count):
                lines[:, here] = self._lines[block * COLUMNS + np.array(columns, int), lanes]
            return [around]
        apart = self._total > block_rows_touched(count)
        pieces = firsts if apart else firsts[:1]
        length = count if apart else firsts[-1] - firsts[0] + count
        block_numbers = [order[first // BLOCK_ROWS : -(-(first + length) // BLOCK_ROWS)] for first in pieces]
        begins = [first % BLOCK_ROWS for first in pieces]
        for number in range(1, len(pieces)):
            begins[number] += sum(map(len, block_numbers[:number])) * BLOCK_ROWS
        lines = np.add.outer(columns, np.concatenate(block_numbers) * COLUMNS)
        target = into[: lines.size * BLOCK_ROWS].reshape(*lines.shape, BLOCK_ROWS)
        # With other modes NumPy makes another copy.
        np.take(self._lines, lines, axis=0, out=target, mode="clip")
        width = lines.shape[1] * BLOCK_ROWS
        if apart:
            return [Rows(width, start, count) for start in begins]
        return [Rows(width, begins[0] + first - firsts[0], count) for first in firsts]

    # Exit if an index is out of range: it would train a row of another table. The data set must not be read before the
    # clock starts (MLPerf training rules, "run results"), so indices are checked during training.
    def _check(self, indices: np.ndarray) -> None:
        maxima = indices.view(np.uint32).max(axis=1)  # a negative index becomes a large one
        for table in np.flatnonzero(maxima >= self._sizes):
            values, size = indices[table], self._sizes[table]
            problem = Problem(
                f"{self._path.name} has indices from {values.min():,} to {values.max():,} for table "
                f"{self._tables[table]}",
                f"0 to {size - 1:,}",
                f"python -m benchmarks.dlrm.prepare --verify {self._path.parent}",
            )
            raise SystemExit(str(problem))


# -- passes --------------------------------------------------------------------------------------------


def training_batches(config: Config, data: DataSet, tables: Sequence[int], ranks: Ranks, first_step: int) -> Batches:
    """Return an endless stream of training batches on this rank's device, starting at ``first_step`` of the run.

    Reading starts with the first request; ``close`` stops the threads. On a CPU the batch memory is reused when the
    next batch is requested.
    """
    if config.shuffle == "rows":
        return device_batches(config, data, tables, ranks, first_step)
    loader = Loader(data.train, data.train_rows, config.batch_size, data, tables, ranks)
    order_of = lru_cache(2)(partial(epoch_order, config.seed, rows=data.train_rows))
    return loader.batches(loader.tasks(first_step), order_of, config.prefetch, reuse=True)


def device_batches(config: Config, data: DataSet, tables: Sequence[int], ranks: Ranks, first_step: int) -> Batches:
    """Yield batches from rows that are resident on the device, sampled without replacement in every epoch."""
    single_rank = replace(ranks, rank=0, size=1)
    loader = Loader(data.train, data.train_rows, data.train_rows, data, tables, single_rank)
    with closing(loader.batches(loader.tasks(0), lambda _: np.arange(len(data.train)), 0)) as batches:
        numbers, labels, indices = next(batches)
    numbers = numbers.contiguous()  # a row is gathered as one piece
    size, total = config.batch_size, config.batch_size * ranks.size
    order_of = lru_cache(1)(lambda epoch: shuffle_rows(config.seed * 1000 + epoch, labels, total))
    steps_per_epoch = -(-data.train_rows // total)
    for epoch, step in (divmod(step, steps_per_epoch) for step in count(first_step)):
        rows = order_of(epoch)[step * total : (step + 1) * total]
        local = rows[ranks.rank * size : (ranks.rank + 1) * size]
        yield Batch(numbers.index_select(0, local), labels.index_select(0, local), indices.index_select(1, rows))


def shuffle_rows(seed: int, labels: torch.Tensor, total: int) -> torch.Tensor:
    """Return a permutation of the rows of ``labels``, the same on all ranks, padded with its start to a multiple of
    ``total``.
    """
    generator = torch.Generator(labels.device).manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator, device=labels.device)
    missing = -len(order) % total
    return torch.cat((order, order.repeat(-(-missing // len(order)))[:missing])) if missing else order


class EvaluationInput:
    """Passes over the evaluation rows; every row counts on one rank, padding does not count."""

    def __init__(self, config: Config, data: DataSet, tables: Sequence[int], ranks: Ranks) -> None:
        self.total = data.val_rows
        self._config, self._ranks = config, ranks
        self._loader = Loader(data.val, data.val_rows, config.eval_batch_size, data, tables, ranks)
        self._steps = -(-data.val_rows // (config.eval_batch_size * ranks.size))
        self._kept: List[Batch] = []

    def one_pass(self) -> Generator[Tuple[Batch, int], None, None]:
        """Yield batches with the number of valid rows on this rank, which are at the start of the batch."""
        size = self._config.eval_batch_size
        with closing(self._batches()) as batches:
            for step, batch in enumerate(batches):
                first = (step * self._ranks.size + self._ranks.rank) * size
                yield batch, max(0, min(size, self.total - first))

    def _batches(self) -> Batches:
        if len(self._kept) == self._steps:
            yield from self._kept
            return
        self._kept.clear()
        tasks = takewhile(lambda task: task.epoch == 0, self._loader.tasks(0))
        order = np.arange(-(-self.total // BLOCK_ROWS))
        with closing(self._loader.batches(tasks, lambda _: order, self._config.prefetch)) as batches:
            for batch in batches:
                if self._config.cache_eval_data:
                    self._kept.append(batch)
                yield batch


def synthetic_batch(config: Config, sizes: Sequence[int], ranks: Ranks, rows: int = 0) -> Batch:
    """Return a synthetic batch in the layout of real batches for tables of ``sizes``, by default with the training
    batch size.
    """
    size = rows or config.batch_size
    row_pair = (Rows(size * ranks.size, 0, size * ranks.size), Rows(size, 0, size))
    buffer = BatchBuffer.empty(len(sizes), len(sizes) * size * ranks.size, (NUMBERS + 1) * size)
    generator = torch.Generator().manual_seed(config.seed)
    numbers, labels, indices = buffer.batch(*row_pair)
    for index, size in zip(indices, sizes):
        index.random_(0, size, generator=generator)
    numbers.uniform_(generator=generator)
    labels.random_(0, 2, generator=generator)
    return buffer._replace(memory=buffer.memory.to(ranks.context)).batch(*row_pair)
