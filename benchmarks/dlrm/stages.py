"""The three stages of a preparation, each a function that worker processes run: parse, tables, shuffle.

Parse: a piece of text becomes a part file of chunks; a chunk holds the 40 columns of up to CHUNK_ROWS rows, which
are already sorted by the bucket that each row was dealt into at random. Tables: one worker counts a category's
values over all parts and lists those that get a row of their own. Shuffle: one worker takes a bucket's rows from
all chunks, column by column, in a random order of their own, to their place in the final file. Dealing and
ordering together are a uniform shuffle, and no stage holds more than a chunk or a column of a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.files import in_one_step, write_facts
from benchmarks.common.data.workers import Report
from benchmarks.dlrm import blocks, criteo
from benchmarks.dlrm.blocks import COLUMNS, FIRST_TABLE, ROW_BYTES, TABLES, WORD
from benchmarks.dlrm.criteo import NEWLINE
from benchmarks.dlrm.sources import Range

PART_BYTES = 1 << 30  # text of a part
CHUNK_ROWS = 1 << 19  # rows of a chunk: 84 MB
BUCKET_BYTES = 1 << 32  # text that a bucket stands for: about 17 million rows, 70 MB a column
PIECE_BYTES = 8 << 20  # text that is parsed at once
MOST_COUNTED = 255  # counts of values stop here, so that they fit into a byte


@dataclass(frozen=True)
class Part:
    """A piece of text and the file of its rows."""

    text: Range
    split: int  # 0 train, 1 val
    number: int  # among the parts of the split
    buckets: int
    rows: Path
    index_limit: int
    seed: int

    @property
    def done_path(self) -> Path:
        """The file of the facts, which is written last."""
        return self.rows.with_suffix(".json")

    @property
    def offsets_path(self) -> Path:
        """First row of each bucket in each chunk, (chunks, buckets + 1)."""
        return self.rows.with_suffix(".npy")


class Facts(NamedTuple):
    """Counts of a finished part."""

    rows: int
    malformed: int
    first_malformed: int  # line of the part, from 0; -1 when there is none
    lines: int


# -- parse ---------------------------------------------------------------------------------------------


def read_lines(text: Range) -> Iterator[bytes]:
    """Yield pieces of whole lines: those that begin in the range, up to the line that crosses its end."""
    with open(text.path, "rb") as file:
        file.seek(max(0, text.begin - 1))
        if text.begin > 0 and file.read(1)[0] != NEWLINE:
            file.readline()
        while file.tell() < text.end:
            piece = file.read(min(PIECE_BYTES, text.end - file.tell()))
            if piece[-1] != NEWLINE:
                piece += file.readline()
            yield piece if piece[-1] == NEWLINE else piece + b"\n"


def parse_part(part: Part, report: Report) -> Tuple[int, int]:
    """Write the rows of one part."""
    generator = np.random.default_rng([part.seed, part.split, part.number])
    waiting: List[np.ndarray] = []
    offsets = [np.zeros((0, part.buckets + 1), np.int64)]
    rows = malformed = lines = read = 0
    first = -1
    with in_one_step(part.rows, durable=True) as file:
        for text in read_lines(part.text):
            found = criteo.parse(text, part.index_limit)
            if found.malformed and first < 0:
                first = lines + found.first_malformed
            malformed += found.malformed
            lines += found.lines
            rows += found.columns.shape[1]
            waiting.append(found.columns)
            if sum(each.shape[1] for each in waiting) >= CHUNK_ROWS:
                offsets.append(_write_chunk(file, waiting, part.buckets, generator))
            read += len(text)
            report(read, read)
        if waiting:
            offsets.append(_write_chunk(file, waiting, part.buckets, generator))
    write_array(part.offsets_path, np.concatenate(offsets))
    write_facts(part.done_path, Facts(rows, malformed, first, lines))
    return part.text.size, part.text.size


# Deal the waiting rows into buckets and write them; return where each bucket begins.
def _write_chunk(file: BinaryIO, waiting: List[np.ndarray], buckets: int, generator: np.random.Generator) -> np.ndarray:
    columns = np.concatenate(waiting, axis=1)
    waiting.clear()
    dealt = generator.integers(buckets, size=columns.shape[1])
    order = np.argsort(dealt, kind="stable")
    for column in columns:
        file.write(column.astype(WORD)[order])  # not tofile: it loses the error of its last write
    counts = np.bincount(dealt, minlength=buckets)
    return np.concatenate(([0], np.cumsum(counts)))[None]


def read_column(part: Part, column: int, bucket: int = -1) -> Iterator[np.ndarray]:
    """Yield a column of a part, chunk by chunk: all of its rows, or those of one bucket."""
    offsets = np.load(part.offsets_path)
    first = 0
    with part.rows.open("rb") as file:
        for chunk in offsets:
            rows = int(chunk[-1])
            begin, end = (0, rows) if bucket < 0 else (int(chunk[bucket]), int(chunk[bucket + 1]))
            file.seek(first + (column * rows + begin) * WORD.itemsize)
            yield np.fromfile(file, WORD, end - begin)
            first += rows * ROW_BYTES


# -- tables --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """One category, with its values that get a row of their own."""

    number: int
    parts: Tuple[Part, ...]
    done_path: Path  # file of the values, in ascending order
    index_limit: int
    threshold: int  # values seen less often share row 0; up to 1 every value has a row


def list_values(table: Table, report: Report) -> Tuple[int, int]:
    """Count the values of one category and write those that are kept.

    Without a threshold the values of both splits get rows, as in the submissions' tables; with one, what the
    training rows hold often enough.
    """
    counts = np.zeros(table.index_limit, np.uint8)
    for part in table.parts:
        if table.threshold > 1 and part.split != 0:
            continue
        for chunk in read_column(part, FIRST_TABLE + table.number):
            if table.threshold <= 1:
                counts[chunk] = 1
                continue
            values, times = np.unique(chunk, return_counts=True)
            counts[values] = np.minimum(counts[values] + times, MOST_COUNTED)
    kept = np.flatnonzero(counts >= max(1, table.threshold)).astype(WORD)
    with in_one_step(table.done_path) as file:
        file.write(kept.data)
    return 1, kept.nbytes


def table_size(table: Table) -> int:
    """Return the number of rows of the embedding table."""
    return table.done_path.stat().st_size // WORD.itemsize + (table.threshold > 1)


def indices_of(values: np.ndarray, kept: np.ndarray, threshold: int, index_limit: int) -> np.ndarray:
    """Return table rows of values: their rank among ``kept``, behind the shared row 0 where there is a threshold."""
    shift = int(threshold > 1)
    if not len(kept):
        return np.zeros(len(values), WORD)
    if len(values) * 16 < index_limit:
        place = np.minimum(np.searchsorted(kept, values), len(kept) - 1)
        return np.where(kept[place] == values, place + shift, 0).astype(WORD)
    rows = np.zeros(index_limit, WORD)
    rows[kept] = np.arange(shift, len(kept) + shift)
    return rows[values]


# -- shuffle -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """Rows of one bucket and their place in the final file."""

    split: int
    number: int
    parts: Tuple[Part, ...]
    tables: Tuple[Table, ...]
    first_row: int
    rows: int
    file: Path
    file_rows: int
    seed: int

    @property
    def done_path(self) -> Path:
        """Exists when the bucket has been written."""
        return self.file.with_name(f"{self.file.stem}-{self.number:05}.done")


def bucket_sizes(parts: Sequence[Part]) -> np.ndarray:
    """Return the rows of each bucket of a split."""
    return sum(np.diff(np.load(part.offsets_path)).sum(axis=0) for part in parts)


def write_bucket(bucket: Bucket, report: Report) -> Tuple[int, int]:
    """Put the rows of a bucket in random order, as training reads them, into the final file."""
    generator = np.random.default_rng([bucket.seed, bucket.split, bucket.number, TABLES])
    order = generator.permutation(bucket.rows).astype(np.int32 if bucket.rows < 2**31 else np.int64)
    place = blocks.open_blocks(bucket.file, bucket.file_rows, writable=True)
    for column in range(COLUMNS):
        pieces = [piece for part in bucket.parts for piece in read_column(part, column, bucket.number)]
        values = np.concatenate(pieces)
        if column >= FIRST_TABLE:
            table = bucket.tables[column - FIRST_TABLE]
            kept = np.fromfile(str(table.done_path), WORD)
            values = indices_of(values, kept, table.threshold, table.index_limit)
        blocks.write_column(place, column, bucket.first_row, criteo.transformed(column, values)[order])
        written = (column + 1) * bucket.rows * WORD.itemsize
        report(written, written)
    place.flush()
    bucket.done_path.touch()
    return bucket.rows * ROW_BYTES, bucket.rows * ROW_BYTES
