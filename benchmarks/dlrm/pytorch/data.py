"""Batches of a prepared data set: each rank reads the numbers of its own rows and the indices of its own tables.

The order of an epoch follows from the seed and the epoch alone, so that a run can resume at any step. A word is copied
once on the host: from the page cache to its place in the batch.
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
# Words that are read together, by few calls: each waits for the interpreter's lock, and handing a batch to another
# thread takes as long as reading 5,000 rows (0.15 ms, two cores of a virtual machine).
TASK_WORDS = 1 << 21
OWN_COLUMNS = (*range(1, FIRST_TABLE), 0)  # columns that a rank reads of its own rows alone: numbers, label


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
    """Open a data set without reading a row; ``memory`` is what is free on every rank, in bytes.

    Raises:
        Problem: files that do not fit the manifest, tables larger than memory.
    """
    try:
        content = manifest.read(directory)
        facts = content["facts"]
        rows = {split: content["splits"][split]["count"] for split in ("train", "val")}
        sizes = tuple(int(size) for size in facts["table_sizes"])
        if len(sizes) != TABLES or min(sizes) < 1 or facts["block_rows"] != BLOCK_ROWS:
            raise ValueError(f"{len(sizes)} tables, blocks of {facts['block_rows']} rows")
        opened = {split: blocks.open_blocks(directory / f"{split}.bin", rows[split]) for split in rows}
    except (Problem, OSError, KeyError, TypeError, ValueError) as error:
        hint = f"python -m benchmarks.dlrm.prepare --verify {directory}"
        raise Problem(f"{directory} is no data set of dlrm: {error}", "", hint) from None
    placement = place(sizes, ranks, config.bottom_mlp[-1] * 4, memory * MEMORY_SHARE)
    return DataSet(opened["train"], opened["val"], rows["train"], rows["val"], sizes, placement)


def free_memory(ranks: Ranks) -> int:
    """Bytes that any rank may fill: its GPU's, or its share of the machine's; asked on all ranks together."""
    if ranks.context.type == "cuda":
        free = int(torch.cuda.mem_get_info(ranks.context)[0])
    else:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 1 << 62)
        free //= ranks.local_size
    if ranks.size == 1:
        return free
    # All ranks must place the tables alike.
    least = torch.tensor(free, device=ranks.context)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


# -- where rows are ------------------------------------------------------------------------------------


class Task(NamedTuple):
    epoch: int
    step: int
    steps: int


class Rows(NamedTuple):
    """Where the rows of a batch are, in memory that is filled with lines of ``width`` words, one line per column."""

    width: int
    begin: int
    length: int

    def of(self, memory: A, lines: int) -> A:
        """Return them as (lines, length), of an array or a tensor of one dimension."""
        return memory[: lines * self.width].reshape(lines, self.width)[:, self.begin : self.begin + self.length]


class Words(NamedTuple):
    """Memory for the batches of a task as they are read: in one piece, so that one copy brings it to a GPU."""

    whole: torch.Tensor
    tables: int
    own_words: int  # at its end, for this rank's numbers and labels

    @classmethod
    def empty(cls, tables: int, words: int, own_words: int, pinned: bool = False) -> "Words":
        """Return memory of any content; PyTorch keeps pinned memory and hands it out again once its copy is done."""
        return cls(torch.empty(words + own_words, dtype=torch.int32, pin_memory=pinned), tables, own_words)

    def parts(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Memory for indices, and for numbers and labels in the bits of float32."""
        return self.whole[: -self.own_words], self.whole[-self.own_words :]

    def batch(self, rows: Rows, own_rows: Rows) -> Batch:
        indices, own = self.parts()
        floats = own_rows.of(own.view(torch.float32), NUMBERS + 1)
        return Batch(floats[:NUMBERS].t(), floats[NUMBERS], rows.of(indices, self.tables))


def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """The blocks of a split in the order of an epoch; one that is not full comes last."""
    full = rows // BLOCK_ROWS
    order = np.random.default_rng([seed, epoch]).permutation(full)
    return order if full * BLOCK_ROWS == rows else np.append(order, full)


def room(rows: int) -> int:
    """Return the rows of the blocks that ``rows`` neighbours may touch."""
    return (-(-rows // BLOCK_ROWS) + 1) * BLOCK_ROWS


def spans(order: np.ndarray, rows: int, first: int, count: int) -> Iterator[Tuple[int, slice, slice]]:
    """Yield where ``count`` ordered rows are, from place ``first`` on: block, rows in it, places in the batch.

    Behind the last row comes the first.
    """
    done = 0
    while done < count:
        place = (first + done) % rows
        block, lane = divmod(place, BLOCK_ROWS)
        some = min(BLOCK_ROWS - lane, count - done, rows - place)
        yield int(order[block]), slice(lane, lane + some), slice(done, done + some)
        done += some


# -- reading -------------------------------------------------------------------------------------------


class Loader:
    def __init__(
        self, split: np.memmap, rows: int, batch_size: int, data: DataSet, tables: Sequence[int], ranks: Ranks
    ) -> None:
        self._rows, self._size, self._ranks = rows, batch_size, ranks
        self._total = batch_size * ranks.size
        self._tables, self._sizes = list(tables), np.array([data.table_sizes[table] for table in tables], np.int64)
        self._columns = [FIRST_TABLE + table for table in tables]
        # A slice of a memmap takes twice the time of a slice of a plain array.
        self._lines = np.asarray(split).reshape(-1, BLOCK_ROWS)
        self._path = Path(str(split.filename))
        self._file = self._path.open("rb")
        self.most_steps = max(1, TASK_WORDS // (len(tables) * self._total + len(OWN_COLUMNS) * batch_size))
        on_gpu = ranks.context.type == "cuda"
        self._stream = torch.cuda.Stream(ranks.context) if on_gpu else None
        # Words of memory that a task takes: for the indices, and for the numbers and labels of this rank.
        whole = room(self.most_steps * self._total)
        own = len(OWN_COLUMNS) * min(whole, self.most_steps * room(batch_size))
        self._empty = partial(Words.empty, len(tables), len(tables) * whole, own, on_gpu)
        self._used: Deque[Words] = deque()

    def tasks(self, first_step: int) -> Iterator[Task]:
        steps_per_epoch, step = -(-self._rows // self._total), first_step
        while True:
            epoch, place = divmod(step, steps_per_epoch)
            # The step that ends an epoch may begin it again, and is read by itself.
            task = Task(epoch, place, max(1, min(self.most_steps, self._rows // self._total - place)))
            yield task
            step += task.steps

    def batches(
        self, tasks: Iterable[Task], order_of: Callable[[int], np.ndarray], ahead: int, reuse: bool = False
    ) -> Batches:
        """Yield the batches of ``tasks``, read up to ``ahead`` tasks early.

        Args:
            tasks: of the split.
            order_of: blocks in the order of an epoch.
            ahead: tasks; 0 reads when a batch is asked for.
            reuse: fill the memory of a batch on the CPU anew once the next is asked for. New memory costs a page fault
                every 4 KiB. Memory on a GPU is PyTorch's to hand out again.
        """

        def load(task: Task) -> Tuple[Callable[[], Words], List[Tuple[Rows, Rows]]]:
            return self._load(order_of(task.epoch), task)

        threads = max(1, len(os.sched_getaffinity(0)) // self._ranks.local_size)
        with closing(read_ahead(load, tasks, ahead, threads)) as loaded:
            for take, places in loaded:
                words = take()
                for place in places:
                    yield words.batch(*place)
                if reuse and self._stream is None:
                    self._used.append(words)

    # Read a task and begin its copy; called on several threads at once. Returns what gives its words to the
    # computation, and the places of its batches.
    def _load(self, order: np.ndarray, task: Task) -> Tuple[Callable[[], Words], List[Tuple[Rows, Rows]]]:
        # Let the system begin to read the blocks behind the task from the disk; else each page is waited for. The ranks
        # of a node share its page cache, and the blocks to ask for.
        first, last = (step * self._total for step in (task.step + task.steps, task.step + 2 * task.steps))
        wanted = order[first // BLOCK_ROWS : -(-last // BLOCK_ROWS)]
        for block in wanted[self._ranks.local_rank :: self._ranks.local_size].tolist():
            os.posix_fadvise(self._file.fileno(), block * BLOCK_BYTES, BLOCK_BYTES, os.POSIX_FADV_WILLNEED)
        try:
            words = self._used.popleft()
        except IndexError:
            words = self._empty()
        places = self.fill(order, task, *(part.numpy() for part in words.parts()))
        if self._stream is None:
            return (lambda: words), places
        with torch.cuda.stream(self._stream):  # next to the computation
            copied = words._replace(whole=words.whole.to(self._stream.device, non_blocking=True))
            event = self._stream.record_event()

        def take() -> Words:
            # The computation waits for the copy, and the memory is kept until the computation is through.
            current = torch.cuda.current_stream(copied.whole.device)
            current.wait_event(event)
            copied.whole.record_stream(current)
            return copied

        return take, places

    def fill(self, order: np.ndarray, task: Task, indices: np.ndarray, own: np.ndarray) -> List[Tuple[Rows, Rows]]:
        """Read the rows of a task.

        Args:
            order: blocks of the task's epoch.
            task: steps.
            indices: int32, to be filled.
            own: int32, the same for this rank's numbers and labels, in the bits of float32.

        Returns:
            Where the rows of each step are: indices (my tables, global batch), numbers and labels (14, batch_size).
        """
        rows = self._copy(order, task, 0, self._total, self._columns, indices)
        own_rows = self._copy(order, task, self._ranks.rank * self._size, self._size, OWN_COLUMNS, own)
        width = own_rows[0].width
        labels = own[NUMBERS * width : (NUMBERS + 1) * width]
        labels.view(np.float32)[:] = labels
        self._check(rows[0]._replace(length=self._total * task.steps).of(indices, len(self._columns)))
        return list(zip(rows, own_rows))

    # Copy ``columns`` of ``count`` rows from ``offset`` on of each global batch.
    def _copy(
        self, order: np.ndarray, task: Task, offset: int, count: int, columns: Sequence[int], into: np.ndarray
    ) -> List[Rows]:
        firsts = [(task.step + number) * self._total + offset for number in range(task.steps)]
        if firsts[-1] + count > self._rows:  # a batch that begins again at the first row
            around = Rows(count, 0, count)
            lines = around.of(into, len(columns))
            for block, lanes, here in spans(order, self._rows, firsts[0], count):
                lines[:, here] = self._lines[block * COLUMNS + np.array(columns, int), lanes]
            return [around]
        apart = self._total > room(count)
        pieces = firsts if apart else firsts[:1]
        length = count if apart else firsts[-1] - firsts[0] + count
        chosen = [order[first // BLOCK_ROWS : -(-(first + length) // BLOCK_ROWS)] for first in pieces]
        begins = [first % BLOCK_ROWS for first in pieces]
        for number in range(1, len(pieces)):
            begins[number] += sum(map(len, chosen[:number])) * BLOCK_ROWS
        lines = np.add.outer(columns, np.concatenate(chosen) * COLUMNS)
        taken = into[: lines.size * BLOCK_ROWS].reshape(*lines.shape, BLOCK_ROWS)
        # With another mode NumPy copies twice.
        np.take(self._lines, lines, axis=0, out=taken, mode="clip")
        width = lines.shape[1] * BLOCK_ROWS
        if apart:
            return [Rows(width, begin, count) for begin in begins]
        return [Rows(width, begins[0] + first - firsts[0], count) for first in firsts]

    # End where an index is outside its table: it would train another table's row. Nothing may read the data set before
    # the clock starts (MLPerf training rules, "run results"), so the rows are checked as they come.
    def _check(self, indices: np.ndarray) -> None:
        most = indices.view(np.uint32).max(axis=1)  # a negative index becomes a large one
        for mine in np.flatnonzero(most >= self._sizes):
            found, size = indices[mine], self._sizes[mine]
            problem = Problem(
                f"{self._path.name} has indices from {found.min():,} to {found.max():,} for table {self._tables[mine]}",
                f"0 to {size - 1:,}",
                f"python -m benchmarks.dlrm.prepare --verify {self._path.parent}",
            )
            raise SystemExit(str(problem))


# -- passes --------------------------------------------------------------------------------------------


def training_batches(config: Config, data: DataSet, tables: Sequence[int], ranks: Ranks, first_step: int) -> Batches:
    """Return an endless stream of training batches on this rank's device, from ``first_step`` of the run on.

    Nothing is read before the first batch is asked for; ``close`` ends the threads that read ahead. On a CPU the memory
    of a batch is filled anew once the next is asked for.
    """
    if config.shuffle == "rows":
        return held_batches(config, data, tables, ranks, first_step)
    loader = Loader(data.train, data.train_rows, config.batch_size, data, tables, ranks)
    order_of = lru_cache(2)(partial(epoch_order, config.seed, rows=data.train_rows))
    return loader.batches(loader.tasks(first_step), order_of, config.prefetch, reuse=True)


def held_batches(config: Config, data: DataSet, tables: Sequence[int], ranks: Ranks, first_step: int) -> Batches:
    """Yield batches of rows that are all held on the device, drawn one by one without replacement in each epoch."""
    alone = replace(ranks, rank=0, size=1)
    loader = Loader(data.train, data.train_rows, data.train_rows, data, tables, alone)
    with closing(loader.batches(loader.tasks(0), lambda _: np.arange(len(data.train)), 0)) as whole:
        numbers, labels, indices = next(whole)
    numbers = numbers.contiguous()  # a row is gathered as one piece
    size, total = config.batch_size, config.batch_size * ranks.size
    order_of = lru_cache(1)(lambda epoch: shuffled_rows(config.seed * 1000 + epoch, labels, total))
    steps_per_epoch = -(-data.train_rows // total)
    for epoch, step in (divmod(step, steps_per_epoch) for step in count(first_step)):
        rows = order_of(epoch)[step * total : (step + 1) * total]
        mine = rows[ranks.rank * size : (ranks.rank + 1) * size]
        yield Batch(numbers.index_select(0, mine), labels.index_select(0, mine), indices.index_select(1, rows))


def shuffled_rows(seed: int, labels: torch.Tensor, total: int) -> torch.Tensor:
    """A permutation of the rows of ``labels``, the same on all ranks; its beginning fills the last ``total`` up."""
    generator = torch.Generator(labels.device).manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator, device=labels.device)
    missing = -len(order) % total
    return torch.cat((order, order.repeat(-(-missing // len(order)))[:missing])) if missing else order


class EvaluationInput:
    """Passes over the evaluation rows; each row counts on one rank, whatever fills the last batch up."""

    def __init__(self, config: Config, data: DataSet, tables: Sequence[int], ranks: Ranks) -> None:
        self.total = data.val_rows
        self._config, self._ranks = config, ranks
        self._loader = Loader(data.val, data.val_rows, config.eval_batch_size, data, tables, ranks)
        self._steps = -(-data.val_rows // (config.eval_batch_size * ranks.size))
        self._kept: List[Batch] = []

    def one_pass(self) -> Generator[Tuple[Batch, int], None, None]:
        """Batches with the number of their first rows on this rank that count."""
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
    """One synthetic batch for tables of ``sizes``, laid out as a real one; default: of a training step."""
    size = rows or config.batch_size
    places = (Rows(size * ranks.size, 0, size * ranks.size), Rows(size, 0, size))
    words = Words.empty(len(sizes), len(sizes) * size * ranks.size, (NUMBERS + 1) * size)
    generator = torch.Generator().manual_seed(config.seed)
    numbers, labels, indices = words.batch(*places)
    for index, size in zip(indices, sizes):
        index.random_(0, size, generator=generator)
    numbers.uniform_(generator=generator)
    labels.random_(0, 2, generator=generator)
    return words._replace(whole=words.whole.to(ranks.context)).batch(*places)
