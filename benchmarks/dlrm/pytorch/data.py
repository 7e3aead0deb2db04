"""Batches of a prepared data set: each rank reads the numbers of its own rows and the indices of its own tables.

The order of an epoch follows from the seed and the epoch alone, so that a run can resume at any step.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import closing
from dataclasses import replace
from functools import lru_cache, partial
from itertools import count, takewhile
from pathlib import Path
from typing import Callable, Deque, Generator, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common.data import passport
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.read_ahead import read_ahead
from benchmarks.common.run.ranks import Ranks
from benchmarks.dlrm import blocks
from benchmarks.dlrm.blocks import BLOCK_ROWS, NUMBERS, TABLES
from benchmarks.dlrm.placement import Placement, place
from benchmarks.dlrm.pytorch.config import MEMORY_SHARE, Config
from benchmarks.dlrm.reading import Reader, Rows, Task, epoch_order


class Batch(NamedTuple):
    """One step's rows on this rank's device."""

    # (batch_size, 13) of this rank's rows; may be in memory column by column, as it is on the disk.
    numbers: torch.Tensor
    labels: torch.Tensor  # (batch_size,) float of this rank's rows
    indices: torch.Tensor  # (my tables, global batch) int32 of all ranks' rows


Batches = Generator[Batch, None, None]


class DataSet(NamedTuple):
    """A prepared data set, looked over."""

    train: np.memmap
    val: np.memmap
    train_rows: int
    val_rows: int
    table_sizes: Tuple[int, ...]
    placement: Placement


def open_data(directory: Path, config: Config, ranks: int, memory: int) -> DataSet:
    """Open a data set without reading a row; ``memory`` is what is free on every rank, in bytes.

    Raises:
        Problem: files that do not fit the passport, tables larger than memory.
    """
    try:
        content = passport.read(directory)
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


class Words(NamedTuple):
    """Memory for the batches of a task as they are read: in one piece, so that one copy brings it to a GPU."""

    whole: torch.Tensor
    tables: int
    own_words: int  # at its end, for this rank's numbers and labels

    @classmethod
    def empty(cls, tables: int, words: int, own_words: int, pinned: bool = False) -> Words:
        """Return memory of any content; PyTorch keeps pinned memory and hands it out again once its copy is done."""
        return cls(torch.empty(words + own_words, dtype=torch.int32, pin_memory=pinned), tables, own_words)

    def parts(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Memory for indices, and for numbers and labels in the bits of float32."""
        indices, own = self.whole.split((len(self.whole) - self.own_words, self.own_words))
        return indices, own

    def batch(self, rows: Rows, own_rows: Rows) -> Batch:
        """The batch as the network takes it."""
        indices, own = self.parts()
        floats = own_rows.of(own.view(torch.float32), NUMBERS + 1)
        return Batch(floats[:NUMBERS].t(), floats[NUMBERS], rows.of(indices, self.tables))


class Loaded(NamedTuple):
    """A task that was read."""

    words: Words
    take: Callable[[], Words]  # gives its words to the computation
    places: List[Tuple[Rows, Rows]]  # places of its batches


class Loader:
    """Brings batches of one split to this rank's device."""

    def __init__(
        self, split: np.memmap, rows: int, batch_size: int, data: DataSet, tables: Sequence[int], ranks: Ranks
    ) -> None:
        self._reader = Reader(split, rows, batch_size, tables, data.table_sizes, ranks)
        on_gpu = ranks.context.type == "cuda"
        self._stream = torch.cuda.Stream(ranks.context) if on_gpu else None
        self._empty = partial(Words.empty, len(tables), *self._reader.words, on_gpu)
        self._used: Deque[Words] = deque()
        self._threads = max(1, len(os.sched_getaffinity(0)) // ranks.local_size)
        self.tasks = self._reader.tasks

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

        def load(task: Task) -> Loaded:
            return self._load(order_of(task.epoch), task)

        with closing(read_ahead(load, tasks, ahead, self._threads)) as loaded:
            for words, take, places in loaded:
                there = take()
                for place in places:
                    yield there.batch(*place)
                if reuse and self._stream is None:
                    self._used.append(words)

    # Read a task and begin its copy; called on several threads at once.
    def _load(self, order: np.ndarray, task: Task) -> Loaded:
        self._reader.ask_for(order, task)
        try:
            words = self._used.popleft()
        except IndexError:
            words = self._empty()
        places = self._reader.fill(order, task, *(part.numpy() for part in words.parts()))
        return Loaded(words, begin_copy(words, self._stream), places)


def begin_copy(words: Words, stream: Optional[torch.cuda.Stream]) -> Callable[[], Words]:
    """Begin to copy a task to the GPU of ``stream``, next to the computation; None stays on the CPU."""
    if stream is None:
        return lambda: words
    with torch.cuda.stream(stream):
        copied = words._replace(whole=words.whole.to(stream.device, non_blocking=True))
        event = stream.record_event()

    def take() -> Words:
        # The computation waits for the copy, and the memory is kept until the computation is through.
        current = torch.cuda.current_stream(stream.device)
        current.wait_event(event)
        copied.whole.record_stream(current)
        return copied

    return take


class TrainingInput:
    """An endless stream of training batches on this rank's device, from ``first_step`` of the run on.

    Nothing is read before the first batch is asked for. ``close`` ends the threads that read ahead.
    """

    def __init__(self, config: Config, data: DataSet, tables: Sequence[int], ranks: Ranks, first_step: int) -> None:
        source = held_batches if config.shuffle == "rows" else read_batches
        self._batches = source(config, data, tables, ranks, first_step)
        self.close = self._batches.close

    def next(self) -> Batch:
        """Return the next batch; on a CPU the memory of the one before is filled anew."""
        return next(self._batches)


def read_batches(config: Config, data: DataSet, tables: Sequence[int], ranks: Ranks, first_step: int) -> Batches:
    """Yield batches of blocks in a new order each epoch, read from the disk."""
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
        self._order = np.arange(len(data.val))
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
        with closing(self._loader.batches(tasks, lambda _: self._order, self._config.prefetch)) as batches:
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
