"""Reads batches of a prepared data set straight into their memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Sequence, Tuple, TypeVar

import numpy as np

from benchmarks.common.data.problem import Problem
from benchmarks.common.run.ranks import Ranks
from benchmarks.dlrm.blocks import BLOCK_BYTES, BLOCK_ROWS, COLUMNS, FIRST_TABLE, NUMBERS

A = TypeVar("A", bound=Any)  # an array or a tensor
# Words that are read together, by few calls: each waits for the interpreter's lock, and handing a batch to another
# thread takes as long as reading 5,000 rows (0.15 ms, two cores of a virtual machine).
TASK_WORDS = 1 << 21

OWN_COLUMNS = (*range(1, FIRST_TABLE), 0)  # columns that a rank reads of its own rows alone: numbers, label


class Task(NamedTuple):
    """Steps of one epoch that are read together."""

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


class Reader:
    """Fills the memory of batches of one split for one rank.

    A word is copied once, from the page cache to its place in the batch.
    """

    def __init__(
        self, content: np.memmap, rows: int, batch_size: int, tables: Sequence[int], sizes: Sequence[int], ranks: Ranks
    ) -> None:
        self._rows, self._size, self._ranks = rows, batch_size, ranks
        self._total = batch_size * ranks.size
        self._tables, self._sizes = list(tables), np.array([sizes[table] for table in tables], np.int64)
        self._columns = [FIRST_TABLE + table for table in tables]
        # A slice of a memmap takes twice the time of a slice of a plain array.
        self._lines = np.asarray(content).reshape(-1, BLOCK_ROWS)
        self._path = Path(str(content.filename))
        self._file = self._path.open("rb")
        words = len(tables) * self._total + len(OWN_COLUMNS) * batch_size
        self.most_steps = max(1, TASK_WORDS // words)

    @property
    def words(self) -> Tuple[int, int]:
        """Words of memory that a task takes: for the indices, and for the numbers and labels of this rank."""
        own = min(room(self.most_steps * self._total), self.most_steps * room(self._size))
        return len(self._tables) * room(self.most_steps * self._total), len(OWN_COLUMNS) * own

    def tasks(self, first_step: int) -> Iterator[Task]:
        """Yield the tasks of a run from a step on, without end."""
        steps_per_epoch, step = -(-self._rows // self._total), first_step
        while True:
            epoch, place = divmod(step, steps_per_epoch)
            # The step that ends an epoch may begin it again, and is read by itself.
            task = Task(epoch, place, max(1, min(self.most_steps, self._rows // self._total - place)))
            yield task
            step += task.steps

    def ask_for(self, order: np.ndarray, task: Task) -> None:
        """Let the system begin to read the blocks behind ``task`` from the disk; else each page is waited for.

        The ranks of a node share its page cache, and the blocks to ask for.
        """
        first, last = (step * self._total for step in (task.step + task.steps, task.step + 2 * task.steps))
        wanted = order[first // BLOCK_ROWS : -(-last // BLOCK_ROWS)]
        for block in wanted[self._ranks.local_rank :: self._ranks.local_size].tolist():
            os.posix_fadvise(self._file.fileno(), block * BLOCK_BYTES, BLOCK_BYTES, os.POSIX_FADV_WILLNEED)

    def fill(self, order: np.ndarray, task: Task, indices: np.ndarray, own: np.ndarray) -> List[Tuple[Rows, Rows]]:
        """Read the rows of a task.

        Args:
            order: blocks of the task's epoch.
            task: steps.
            indices: int32, as large as ``words`` says, to be filled.
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
        if firsts[-1] + count > self._rows:
            return [self._copy_around(order, firsts[0], count, columns, into)]
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

    # Copy the rows of a batch that begins again at the first row.
    def _copy_around(self, order: np.ndarray, first: int, count: int, columns: Sequence[int], into: np.ndarray) -> Rows:
        rows = Rows(count, 0, count)
        lines = rows.of(into, len(columns))
        for block, lanes, here in spans(order, self._rows, first, count):
            lines[:, here] = self._lines[block * COLUMNS + np.array(columns, int), lanes]
        return rows

    # End where an index is outside its table: it would train another table's row.
    # Nothing may read the data set before the clock starts (MLPerf training rules, "run results"), so the rows are
    # checked as they come.
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
