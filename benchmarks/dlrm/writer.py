"""Writes click logs as blocks of columns: parse the text, list the values of each table, shuffle the rows."""

from __future__ import annotations

import argparse
import hashlib
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from benchmarks.common.data import source_checks
from benchmarks.common.data.files import read_facts
from benchmarks.common.data.prepare import Content, Split, check_room
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.common.data.workers import Workers
from benchmarks.dlrm import blocks, sources, stages, synthetic
from benchmarks.dlrm.blocks import BLOCK_ROWS, ROW_BYTES, TABLES
from benchmarks.dlrm.sources import Source
from benchmarks.dlrm.stages import Bucket, Facts, Part, Table

VERSION = "1"  # raise it when the same source and options give other bytes: unfinished parts are then made again
SPLITS = ("train", "val")
VALUES = "tables.bin"  # the values behind the rows of all tables, in order: what encodes further data in the same way
MALFORMED_SHARE = 1e-4  # share of malformed rows that is left out without asking


class Listing(NamedTuple):
    """The source of a preparation."""

    source: Optional[Source]  # none for the toy data set, whose text is not written yet
    fingerprint: str


class Task(NamedTuple):
    """One preparation: from what and how."""

    source: Source
    scratch: Path
    parts: Dict[str, Tuple[Part, ...]]
    tables: Tuple[Table, ...]
    workers: Workers


def list_source(args: argparse.Namespace, progress: Progress) -> Listing:
    """Find the text; all that decides what is written goes into the fingerprint."""
    options = (args.seed, args.index_limit, args.frequency_threshold)
    source = None
    facts: Any = (VERSION, synthetic.NAME, args.name, *options)
    if args.origin is not None:
        counter = progress.counter("scan")
        source = sources.list_source(args.origin, args.validation_fraction, counter, progress.note)
        source = source._replace(name=args.name or source.name)
        facts = [VERSION, source.name, source.made, *options]
        for path, begin, end in (*source.train, *source.val):
            facts.append((Path(path).name, begin, end, Path(path).stat().st_mtime_ns))
    return Listing(source, hashlib.sha256(repr(facts).encode()).hexdigest())


def write(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Content:
    """Write rows, tables and their facts."""
    task = plan(listing.source or _synthetic_source(args, scratch), args, scratch, progress)
    parse(task)
    malformed = check_malformed(task, args.skip_corrupt)
    common = check_overlap(task, args.allow_overlap)
    check_labels(task.parts["val"])
    task.workers.run("tables", "tables", stages.list_values, task.tables, lambda table: 1)
    rows = shuffle(task, args.seed)
    with (scratch / VALUES).open("wb") as output:
        for table in task.tables:
            with table.done_path.open("rb") as values:
                shutil.copyfileobj(values, output)
    return Content(
        name=task.source.name,
        splits={split: Split(rows[split], (f"{split}.bin", VALUES)) for split in SPLITS},
        summary=f"{rows['train']:,} + {rows['val']:,} rows",
        facts={
            "block_rows": BLOCK_ROWS,
            "table_sizes": [stages.table_size(table) for table in task.tables],
            "index_limit": args.index_limit,
            "frequency_threshold": args.frequency_threshold,
            "malformed": malformed,
            "seed": args.seed,
        },
        how={"made": task.source.made, "in_both": common},
        tool={"version": VERSION, "numpy": np.__version__},
    )


# Write the text of the toy data set; written anew after an interruption, it is the same.
def _synthetic_source(args: argparse.Namespace, scratch: Path) -> Source:
    folder = scratch / synthetic.NAME
    folder.mkdir(exist_ok=True)
    synthetic.write_text(folder, args.seed)
    source = sources.list_source(folder, args.validation_fraction, lambda size: None, lambda text: None)
    return source._replace(name=args.name or synthetic.NAME)


def plan(source: Source, args: argparse.Namespace, scratch: Path, progress: Progress) -> Task:
    """Cut the text into parts."""
    parts: Dict[str, Tuple[Part, ...]] = {}
    for number, (split, whole) in enumerate(zip(SPLITS, (source.train, source.val))):
        buckets = -(-sum(each.size for each in whole) // stages.BUCKET_BYTES)
        parts[split] = tuple(
            Part(text, number, place, buckets, scratch / f"{split}-{place:05}.rows", args.index_limit, args.seed)
            for place, text in enumerate(sources.ranges(whole, stages.PART_BYTES))
        )
    every = (*parts["train"], *parts["val"])
    limits = (args.index_limit, args.frequency_threshold)
    tables = tuple(Table(number, every, scratch / f"table-{number:02}.values", *limits) for number in range(TABLES))
    return Task(source, scratch, parts, tables, Workers(args.workers, scratch.parent, progress))


def parse(task: Task) -> None:
    """Turn text into rows."""
    every = [part for split in SPLITS for part in task.parts[split]]
    if not all(part.done_path.exists() for part in every):
        # The rows of all text, by the length of its first lines.
        with open(task.source.train[0].path, "rb") as file:
            sample = file.read(1 << 20)
        rows = round(sum(part.text.size for part in every) * sample.count(b"\n") / max(1, len(sample)))
        present = sum(path.stat().st_size for path in task.scratch.iterdir())
        check_room(task.scratch.parent, 2 * ROW_BYTES * rows - present)
    task.workers.run("parse", "bytes", stages.parse_part, every, lambda part: part.text.size)


def check_malformed(task: Task, skip: bool) -> int:
    """Count malformed rows; refuse more of them than an accident explains."""
    malformed = lines = 0
    first = ""
    lines_before: Dict[str, int] = defaultdict(int)  # of each file; its parts come in order
    for split in SPLITS:
        rows = 0
        for part in task.parts[split]:
            facts = Facts(*read_facts(part.done_path))
            malformed, lines, rows = malformed + facts.malformed, lines + facts.lines, rows + facts.rows
            if facts.malformed and not first:
                number = lines_before[part.text.path] + facts.first_malformed + 1
                first = f"the first is line {number:,} of {part.text.path}"
            lines_before[part.text.path] += facts.lines
        if rows == 0:
            expected = "a label, 13 integers, 26 hexadecimal values"
            hint = f"look at {task.parts[split][0].text.path}"
            raise Problem(f"no well-formed row in {split}", expected, hint)
    found = f"{malformed:,} of {lines:,} rows are malformed; {first}"
    if malformed > lines * MALFORMED_SHARE and not skip:
        raise Problem(
            found,
            f"at most {MALFORMED_SHARE:.2%}: label 0 or 1, 13 integers, 26 hexadecimal values, tabs between",
            "fix the file, or give the same command with --skip-corrupt to leave them out",
            keeps=True,
        )
    if malformed:
        task.workers.progress.note(f"left out: {found}")
    return malformed


def check_overlap(task: Task, allowed: bool) -> int:
    """Return how many rows of a test file are rows of the training file too; days and ends of a log are other clicks.

    Raises:
        Problem: they are too many.
    """
    test = Path(task.source.val[0].path)
    if test.stem != "test":
        return 0
    with test.open("rb") as held, open(task.source.train[0].path, "rb") as train:
        named = ((f"line {number:,} of {test}", hash(line.rstrip())) for number, line in enumerate(held, 1))
        return source_checks.overlap(
            named, (hash(line.rstrip()) for line in train), "rows", allowed, task.workers.progress
        )


def check_labels(parts: Sequence[Part]) -> None:
    """Refuse evaluation rows of one label alone: their AUC has no value."""
    labels = {label for part in parts for piece in stages.read_column(part, 0) for label in np.unique(piece)}
    if len(labels) < 2:
        raise Problem(
            f"all rows to evaluate on, in {parts[0].text.path}, have label {int(labels.pop())}",
            "clicks (1) and none (0) among them: the AUC compares the two",
            "hold out other rows: another file, or another --validation-fraction",
        )


def shuffle(task: Task, seed: int) -> Dict[str, int]:
    """Bring the rows to their final place; return the rows of each split."""
    every: List[Bucket] = []
    rows = {}
    for number, split in enumerate(SPLITS):
        parts, file = task.parts[split], task.scratch / f"{split}.bin"
        sizes = stages.bucket_sizes(parts)
        firsts = np.concatenate(([0], np.cumsum(sizes)))
        rows[split] = int(firsts[-1])
        every += [
            Bucket(number, k, parts, task.tables, int(firsts[k]), int(sizes[k]), file, rows[split], seed)
            for k in range(len(sizes))
        ]
        if not file.exists() or file.stat().st_size != blocks.file_bytes(rows[split]):
            blocks.create(file, rows[split])
            for old in task.scratch.glob(f"{split}-*.done"):
                old.unlink()
    check_terabyte(task.source.name, rows)
    task.workers.run("shuffle", "bytes", stages.write_bucket, every, lambda bucket: bucket.rows * ROW_BYTES)
    return rows


def check_terabyte(name: str, rows: Dict[str, int]) -> None:
    """Refuse to call a data set the full one without all of its rows."""
    if name == sources.TERABYTE and rows != sources.TERABYTE_ROWS:
        raise Problem(
            f"{name} with {rows['train']:,} + {rows['val']:,} rows",
            f"{sources.TERABYTE_ROWS['train']:,} + {sources.TERABYTE_ROWS['val']:,}, as in the submitted logs",
            "complete day_0 to day_23, or give the data set another name with --name",
        )
