"""Writes click logs as blocks of columns in three stages of worker processes: parse, tables, shuffle.

Parse: a byte range of the text is converted to a part file with chunks of up to CHUNK_ROWS rows in 40 columns; rows
are assigned to random buckets and sorted by bucket. Tables: a worker counts a category's values in all parts and
lists the values with a table row. Shuffle: a worker reads a bucket's rows from all chunks, column by column, and
writes them in random order to the final file. Both steps together are a uniform shuffle. A stage needs memory for
only a chunk or a bucket column.
"""

import argparse
import hashlib
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from benchmarks.common.data import published, source_checks
from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.files import in_one_step, read_facts, write_facts
from benchmarks.common.data.prepare import Content, Listing, Split, check_room
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.common.data.text_files import raw_lines
from benchmarks.common.data.workers import Report, Workers
from benchmarks.dlrm import blocks, criteo, synthetic
from benchmarks.dlrm.blocks import BLOCK_ROWS, COLUMNS, FIRST_TABLE, ROW_BYTES, TABLES, WORD
from benchmarks.dlrm.criteo import Range, Source

# Increase it if the output changes for the same source and options; unfinished parts are then discarded
VERSION = "1"
SPLITS = ("train", "val")
# Values by table row, for all tables in order, to encode other data in the same way
VALUES = "tables.bin"
MALFORMED_SHARE = 1e-4  # maximum fraction of malformed rows that is skipped automatically
PART_BYTES = 1 << 30  # text per part
CHUNK_ROWS = 1 << 19  # rows per chunk: 84 MB
BUCKET_BYTES = 1 << 32  # text per bucket: about 17 million rows, 70 MB per column
MAX_COUNT = 255  # counts are clipped, to fit into a byte


class Plan(NamedTuple):
    """How rows are written; crosses to the worker processes."""

    scratch: Path
    index_limit: int
    threshold: int  # values seen less often in training share row 0; up to 1 every value has a row
    seed: int


class Part(NamedTuple):
    """Byte range of the text, and the file for the rows."""

    text: Range
    split: int  # 0 train, 1 val
    number: int  # among the parts of the split
    buckets: int
    rows: Path
    plan: Plan

    @property
    def done_path(self) -> Path:
        return self.rows.with_suffix(".json")

    @property
    def offsets_path(self) -> Path:
        """First row by bucket in the chunks, (chunks, buckets + 1)."""
        return self.rows.with_suffix(".npy")


class Facts(NamedTuple):
    rows: int
    malformed: int
    first_malformed: int  # line in the part, counted from 0; -1: none
    lines: int


class Table(NamedTuple):
    """Category; ``done_path`` has the values with a table row, in ascending order."""

    number: int
    parts: Tuple[Part, ...]
    done_path: Path
    plan: Plan


class Bucket(NamedTuple):
    """A bucket's rows and their location in the final file; ``done_path`` exists after they are written."""

    number: int
    parts: Tuple[Part, ...]
    tables: Tuple[Table, ...]
    first_row: int
    rows: int
    file: Path
    file_rows: int
    done_path: Path
    plan: Plan


# -- the stages ----------------------------------------------------------------------------------------


def parse_part(part: Part, report: Report) -> Tuple[int, int]:
    generator = np.random.default_rng([part.plan.seed, part.split, part.number])
    waiting: List[np.ndarray] = []
    offsets = [np.zeros((0, part.buckets + 1), np.int64)]
    rows = malformed = lines = read = 0
    first = -1
    with in_one_step(part.rows, durable=True) as file:
        for text in criteo.read_lines(part.text):
            columns = criteo.parse(text, part.plan.index_limit)
            if columns.malformed and first < 0:
                first = lines + columns.first_malformed
            malformed += columns.malformed
            lines += columns.lines
            rows += columns.columns.shape[1]
            waiting.append(columns.columns)
            if sum(chunk.shape[1] for chunk in waiting) >= CHUNK_ROWS:
                offsets.append(_write_chunk(file, waiting, part.buckets, generator))
            read += len(text)
            report(read, read)
        if waiting:
            offsets.append(_write_chunk(file, waiting, part.buckets, generator))
    write_array(part.offsets_path, np.concatenate(offsets))
    write_facts(part.done_path, Facts(rows, malformed, first, lines))
    return part.text.size, part.text.size


# Assign rows to random buckets and write them, sorted by bucket; return the bucket offsets
def _write_chunk(file: BinaryIO, waiting: List[np.ndarray], buckets: int, generator: np.random.Generator) -> np.ndarray:
    columns = np.concatenate(waiting, axis=1)
    waiting.clear()
    dealt = generator.integers(buckets, size=columns.shape[1])
    order = np.argsort(dealt, kind="stable")
    for column in columns:
        file.write(column.astype(WORD)[order])  # not tofile, which ignores an error in the last write
    return np.concatenate(([0], np.cumsum(np.bincount(dealt, minlength=buckets))))[None]


def read_column(part: Part, column: int, bucket: int = -1) -> Iterator[np.ndarray]:
    """Yield a part's column chunk by chunk: all rows, or a bucket's rows."""
    first = 0
    with part.rows.open("rb") as file:
        for chunk in np.load(part.offsets_path):
            rows = int(chunk[-1])
            start, end = (0, rows) if bucket < 0 else (int(chunk[bucket]), int(chunk[bucket + 1]))
            file.seek(first + (column * rows + start) * WORD.itemsize)
            yield np.fromfile(file, WORD, end - start)
            first += rows * ROW_BYTES


def list_values(table: Table, report: Report) -> Tuple[int, int]:
    """Count a category's values and write the values with a table row.

    Without a threshold the values in both splits get rows, as in the submitted tables; otherwise only values that
    are frequent enough in the training rows.
    """
    threshold, counts = table.plan.threshold, np.zeros(table.plan.index_limit, np.uint8)
    for part in table.parts:
        if threshold > 1 and part.split != 0:
            continue
        for chunk in read_column(part, FIRST_TABLE + table.number):
            if threshold <= 1:
                counts[chunk] = 1
                continue
            values, times = np.unique(chunk, return_counts=True)
            counts[values] = np.minimum(counts[values] + times, MAX_COUNT)
    frequent = np.flatnonzero(counts >= max(1, threshold)).astype(WORD)
    with in_one_step(table.done_path) as file:
        file.write(frequent.data)
    return 1, frequent.nbytes


def indices_of(values: np.ndarray, frequent: np.ndarray, plan: Plan) -> np.ndarray:
    """Return the values' table rows: position in ``frequent``, plus 1 for the shared row 0 if there is a threshold."""
    shift = int(plan.threshold > 1)
    if not len(frequent):
        return np.zeros(len(values), WORD)
    if len(values) * 16 < plan.index_limit:
        index = np.minimum(np.searchsorted(frequent, values), len(frequent) - 1)
        return np.where(frequent[index] == values, index + shift, 0).astype(WORD)
    rows = np.zeros(plan.index_limit, WORD)
    rows[frequent] = np.arange(shift, len(frequent) + shift)
    return rows[values]


def write_bucket(bucket: Bucket, report: Report) -> Tuple[int, int]:
    """Write a bucket's rows in random order to the final file, in the format for training."""
    generator = np.random.default_rng([bucket.plan.seed, bucket.parts[0].split, bucket.number, TABLES])
    order = generator.permutation(bucket.rows).astype(np.int32 if bucket.rows < 2**31 else np.int64)
    target = blocks.open_blocks(bucket.file, bucket.file_rows, writable=True)
    for column in range(COLUMNS):
        values = np.concatenate([piece for part in bucket.parts for piece in read_column(part, column, bucket.number)])
        if column >= FIRST_TABLE:
            frequent = np.fromfile(str(bucket.tables[column - FIRST_TABLE].done_path), WORD)
            values = indices_of(values, frequent, bucket.plan)
        blocks.write_column(target, column, bucket.first_row, criteo.transform(column, values)[order])
        free_bytes = (column + 1) * bucket.rows * WORD.itemsize
        report(free_bytes, free_bytes)
    target.flush()
    bucket.done_path.touch()
    return bucket.rows * ROW_BYTES, bucket.rows * ROW_BYTES


# -- one preparation -----------------------------------------------------------------------------------


def list_source(args: argparse.Namespace, progress: Progress) -> Listing:
    """Find the text; the toy data set has none yet."""
    options = (args.seed, args.index_limit, args.frequency_threshold)
    source = None
    key: Any = (VERSION, synthetic.NAME, args.name, *options)
    if args.origin is not None:
        source = criteo.list_source(args.origin, args.validation_fraction, progress.counter("scan"), progress.note)
        source = source._replace(name=args.name or source.name)
        key = [VERSION, source.name, source.description, *options]
        for path, start, end in (*source.train, *source.val):
            key.append((Path(path).name, start, end, Path(path).stat().st_mtime_ns))
    return Listing(source, hashlib.sha256(repr(key).encode()).hexdigest())


def write(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Content:
    source = listing.source or _synthetic_source(args, scratch)
    plan = Plan(scratch, args.index_limit, args.frequency_threshold, args.seed)
    parts = cut(source, plan)
    all_parts = (*parts["train"], *parts["val"])
    tables = tuple(Table(number, all_parts, scratch / f"table-{number:02}.values", plan) for number in range(TABLES))
    workers = Workers(args.workers, scratch.parent, progress)
    if not all(part.done_path.exists() for part in all_parts):
        # Estimate the number of rows from the length of the first lines.
        with open(source.train[0].path, "rb") as file:
            sample = file.read(1 << 20)
        rows = round(sum(part.text.size for part in all_parts) * sample.count(b"\n") / max(1, len(sample)))
        present = sum(path.stat().st_size for path in scratch.iterdir())
        check_room(scratch.parent, 2 * ROW_BYTES * rows - present)
    workers.run("parse", "bytes", parse_part, all_parts, lambda part: part.text.size)
    malformed = check_malformed(parts, args.skip_corrupt, progress)
    common = check_overlap(source, args.allow_overlap, progress)
    check_labels(parts["val"])
    workers.run("tables", "tables", list_values, tables, lambda table: 1)
    counts = {split: sum(Facts(*read_facts(part.done_path)).rows for part in parts[split]) for split in SPLITS}
    published.refuse({"name": source.name, "splits": {split: {"count": counts[split]} for split in SPLITS}})
    buckets = [bucket for split in SPLITS for bucket in deal(split, parts[split], tables, counts[split])]
    workers.run("shuffle", "bytes", write_bucket, buckets, lambda bucket: bucket.rows * ROW_BYTES)
    with (scratch / VALUES).open("wb") as output:
        for table in tables:
            with table.done_path.open("rb") as values:
                shutil.copyfileobj(values, output)
    shared = int(plan.threshold > 1)  # the row of rare values
    return Content(
        name=source.name,
        splits={split: Split(counts[split], (f"{split}.bin", VALUES)) for split in SPLITS},
        summary=f"{counts['train']:,} + {counts['val']:,} rows",
        facts={
            "block_rows": BLOCK_ROWS,
            "table_sizes": [table.done_path.stat().st_size // WORD.itemsize + shared for table in tables],
            "index_limit": args.index_limit,
            "frequency_threshold": args.frequency_threshold,
            "malformed": malformed,
            "seed": args.seed,
        },
        how={"made": source.description, "in_both": common},
        tool={"version": VERSION, "numpy": np.__version__},
    )


# Write the text of the toy data set; written anew after an interruption, it is the same.
def _synthetic_source(args: argparse.Namespace, scratch: Path) -> Source:
    folder = scratch / synthetic.NAME
    folder.mkdir(exist_ok=True)
    synthetic.write_text(folder, args.seed)
    source = criteo.list_source(folder, args.validation_fraction, lambda size: None, lambda text: None)
    return source._replace(name=args.name or synthetic.NAME)


def cut(source: Source, plan: Plan) -> Dict[str, Tuple[Part, ...]]:
    parts: Dict[str, Tuple[Part, ...]] = {}
    for number, (split, file_ranges) in enumerate(zip(SPLITS, (source.train, source.val))):
        buckets = -(-sum(file_range.size for file_range in file_ranges) // BUCKET_BYTES)
        parts[split] = tuple(
            Part(text, number, number_in_split, buckets, plan.scratch / f"{split}-{number_in_split:05}.rows", plan)
            for number_in_split, text in enumerate(criteo.ranges(file_ranges, PART_BYTES))
        )
    return parts


def deal(split: str, parts: Sequence[Part], tables: Tuple[Table, ...], rows: int) -> List[Bucket]:
    """Create a split's file, and return the buckets with their locations."""
    plan = parts[0].plan
    file = plan.scratch / f"{split}.bin"
    sizes = sum(np.diff(np.load(part.offsets_path)).sum(axis=0) for part in parts)
    firsts = np.concatenate(([0], np.cumsum(sizes)))
    if not file.exists() or file.stat().st_size != blocks.file_bytes(rows):
        blocks.create(file, rows)
        for old in plan.scratch.glob(f"{split}-*.done"):
            old.unlink()
    return [
        Bucket(k, tuple(parts), tables, int(first), int(size), file, rows, plan.scratch / f"{split}-{k:05}.done", plan)
        for k, (first, size) in enumerate(zip(firsts, sizes))
    ]


# -- checks --------------------------------------------------------------------------------------------


def check_malformed(parts: Dict[str, Tuple[Part, ...]], skip: bool, progress: Progress) -> int:
    """Count malformed rows, and reject more than MALFORMED_SHARE."""
    malformed = lines = 0
    first = ""
    lines_before: Dict[str, int] = defaultdict(int)  # by file; parts are in order
    for split, split_parts in parts.items():
        rows = 0
        for part in split_parts:
            part_facts = Facts(*read_facts(part.done_path))
            malformed, lines, rows = malformed + part_facts.malformed, lines + part_facts.lines, rows + part_facts.rows
            if part_facts.malformed and not first:
                number = lines_before[part.text.path] + part_facts.first_malformed + 1
                first = f"the first is line {number:,} of {part.text.path}"
            lines_before[part.text.path] += part_facts.lines
        if rows == 0:
            expected, hint = "a label, 13 integers, 26 hexadecimal values", f"look at {split_parts[0].text.path}"
            raise Problem(f"no well-formed row in {split}", expected, hint)
    problem = f"{malformed:,} of {lines:,} rows are malformed; {first}"
    if malformed > lines * MALFORMED_SHARE and not skip:
        raise Problem(
            problem,
            f"at most {MALFORMED_SHARE:.2%}: label 0 or 1, 13 integers, 26 hexadecimal values, tabs between",
            "correct the file, or run the same command with --skip-corrupt to skip them",
            keeps=True,
        )
    if malformed:
        progress.note(f"left out: {problem}")
    return malformed


def check_overlap(source: Source, allowed: bool, progress: Progress) -> int:
    """Return the number of test rows that are also in the training file. Not used if days or the end of the log are
    held out: the clicks differ.

    Raises:
        Problem: the number is too large.
    """
    test = Path(source.val[0].path)
    if test.stem != "test":
        return 0
    with test.open("rb") as test_file, open(source.train[0].path, "rb") as train:
        test_lines, train_lines = raw_lines(test_file, str(test)), raw_lines(train, source.train[0].path)
        hashed_lines = (
            (f"line {number:,} of {test}", hash(line.rstrip())) for number, line in enumerate(test_lines, 1)
        )
        return source_checks.overlap(
            hashed_lines, (hash(line.rstrip()) for line in train_lines), "rows", allowed, progress
        )


def check_labels(parts: Sequence[Part]) -> None:
    """Reject evaluation rows with only one label, for which the AUC is undefined."""
    labels = {label for part in parts for piece in read_column(part, 0) for label in np.unique(piece)}
    if len(labels) < 2:
        raise Problem(
            f"all rows to evaluate on, in {parts[0].text.path}, have label {int(labels.pop())}",
            "both labels, 0 and 1: the AUC compares them",
            "hold out other rows: another file, or another --validation-fraction",
        )
