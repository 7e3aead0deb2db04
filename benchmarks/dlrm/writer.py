"""Writes click logs as blocks of columns: parse the text, list the values of each table, shuffle the rows."""

from __future__ import annotations

import argparse
import hashlib
import shutil
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from benchmarks.common.data import workers
from benchmarks.common.data.prepare import Content, Split, check_room
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.dlrm import blocks, sources, stages, synthetic
from benchmarks.dlrm.blocks import BLOCK_ROWS, ROW_BYTES, TABLES
from benchmarks.dlrm.sources import Source
from benchmarks.dlrm.stages import Bucket, Part, Table

VERSION = "1"
"""Raise it when the same source and options give other bytes: unfinished parts are then made again."""
SPLITS = ("train", "val")
VALUES = "tables.bin"
"""The values behind the rows of all tables, in order: what encodes further data in the same way."""
MALFORMED_SHARE = 1e-4
"""Share of malformed rows that is left out without asking."""


class Listing(NamedTuple):
    """What there is to prepare."""

    source: Optional[Source]
    """None for the small set, whose text is not written yet."""
    fingerprint: str


class Task(NamedTuple):
    """One preparation: what from and how."""

    source: Source
    scratch: Path
    parts: Dict[str, Tuple[Part, ...]]
    tables: Tuple[Table, ...]
    processes: int
    progress: Progress

    def run(self, stage: workers.Stage, every: List[Any], waiting: List[Any]) -> None:
        """Let the worker processes do what is not done yet."""
        workers.run(stage, every, waiting, self.processes, self.scratch.parent, self.progress)


def list_source(args: argparse.Namespace, progress: Progress) -> Listing:
    """Find the text; all that decides what is written goes into the fingerprint."""
    limits = (args.index_limit, args.frequency_threshold)
    if args.origin is None:
        return Listing(None, _fingerprint((VERSION, synthetic.NAME, args.name, args.seed, *limits)))
    source = sources.list_source(args.origin, args.validation_fraction, progress.counter("scan"))
    source = source._replace(name=args.name or source.name)
    facts: List[Any] = [VERSION, source.name, source.made, args.seed, *limits]
    for each in (*source.train, *source.val):
        change = Path(each.path).stat().st_mtime_ns
        facts.append((Path(each.path).name, each.begin, each.end, change))
    return Listing(source, _fingerprint(facts))


def _fingerprint(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def write(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Content:
    """Write rows, tables and their facts."""
    task = plan(listing.source or _synthetic_source(args, scratch), args, scratch, progress)
    parse(task)
    malformed = judge_malformed(task, args.skip_corrupt)
    count(task)
    rows = shuffle(task, args.seed)
    with (scratch / VALUES).open("wb") as output:
        for table in task.tables:
            with table.values.open("rb") as values:
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
        how={"made": task.source.made},
        tool={"version": VERSION, "numpy": np.__version__},
    )


def _synthetic_source(args: argparse.Namespace, scratch: Path) -> Source:
    """The text of the small set; written anew after an interruption, it is the same."""
    folder = scratch / synthetic.NAME
    folder.mkdir(exist_ok=True)
    synthetic.write_text(folder, args.seed)
    source = sources.list_source(folder, args.validation_fraction, lambda size: None)
    return source._replace(name=args.name or synthetic.NAME)


def plan(source: Source, args: argparse.Namespace, scratch: Path, progress: Progress) -> Task:
    """Cut the text into parts."""
    parts: Dict[str, Tuple[Part, ...]] = {}
    for number, (split, whole) in enumerate(zip(SPLITS, (source.train, source.val))):
        buckets = -(-sum(each.end - each.begin for each in whole) // stages.BUCKET_BYTES)
        pieces = enumerate(sources.ranges(whole, stages.PART_BYTES))
        options = (args.index_limit, args.seed)
        parts[split] = tuple(
            Part(text, number, place, buckets, scratch / f"{split}-{place:05}.rows", *options) for place, text in pieces
        )
    every = (*parts["train"], *parts["val"])
    limits = (args.index_limit, args.frequency_threshold)
    tables = tuple(Table(number, every, scratch / f"table-{number:02}.values", *limits) for number in range(TABLES))
    return Task(source, scratch, parts, tables, args.workers, progress)


def parse(task: Task) -> None:
    """Text to rows."""
    every = [part for split in SPLITS for part in task.parts[split]]
    waiting = [part for part in every if not part.facts_path.exists()]
    if waiting:
        present = sum(path.stat().st_size for path in task.scratch.iterdir())
        check_room(task.scratch.parent, 2 * ROW_BYTES * estimate_rows(task.source) - present)
    stage = workers.Stage("parse", "bytes", stages.parse_part, lambda part: part.text.end - part.text.begin)
    task.run(stage, every, waiting)


def estimate_rows(source: Source) -> int:
    """Rows of all text, by the length of its first lines."""
    with open(source.train[0].path, "rb") as file:
        sample = file.read(1 << 20)
    return round(source.bytes * sample.count(b"\n") / max(1, len(sample)))


def judge_malformed(task: Task, skip: bool) -> int:
    """Malformed rows; refuse more of them than an accident explains."""
    malformed = lines = 0
    first = ""
    for split in SPLITS:
        for part in task.parts[split]:
            facts = stages.read_facts(part)
            malformed += facts.malformed
            lines += facts.lines
            if facts.malformed and not first:
                first = f"the first is line {facts.first_malformed + 1:,} after byte {part.text.begin:,} of "
                first += part.text.path
        if sum(stages.read_facts(part).rows for part in task.parts[split]) == 0:
            expected = "a label, 13 integers, 26 hexadecimal values"
            remedy = f"look at {task.parts[split][0].text.path}"
            raise Problem(f"no well-formed row in {split}", expected, remedy)
    found = f"{malformed:,} of {lines:,} rows are malformed; {first}"
    if malformed > lines * MALFORMED_SHARE and not skip:
        raise Problem(
            found,
            f"at most {MALFORMED_SHARE:.2%}: label 0 or 1, 13 integers, 26 hexadecimal values, tabs between",
            "mend the file, or give the same command with --skip-corrupt to leave them out",
        )
    if malformed:
        task.progress.note(f"left out: {found}")
    return malformed


def count(task: Task) -> None:
    """Rows of the tables."""
    waiting = [table for table in task.tables if not table.values.exists()]
    task.run(workers.Stage("tables", "tables", stages.list_values, lambda table: 1), [*task.tables], waiting)


def shuffle(task: Task, seed: int) -> Dict[str, int]:
    """Rows to their final place; returns the rows of each split."""
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
    waiting = [bucket for bucket in every if not bucket.done_path.exists()]
    stage = workers.Stage("shuffle", "bytes", stages.write_bucket, lambda bucket: bucket.rows * ROW_BYTES)
    task.run(stage, every, waiting)
    return rows


def check_terabyte(name: str, rows: Dict[str, int]) -> None:
    """The full data set is that only with all of its rows."""
    if name != sources.TERABYTE or rows == sources.TERABYTE_ROWS:
        return
    raise Problem(
        f"{name} with {rows['train']:,} + {rows['val']:,} rows",
        f"{sources.TERABYTE_ROWS['train']:,} + {sources.TERABYTE_ROWS['val']:,}, as in the submitted logs",
        "complete day_0 to day_23, or give the data set another name with --name",
    )
