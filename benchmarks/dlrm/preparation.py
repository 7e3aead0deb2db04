"""One preparation from listing to passport, able to go on after any interruption."""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from benchmarks.common import file_passport, workers
from benchmarks.common.passport import FILE_NAME, PARTS
from benchmarks.common.preparing import Problem, Progress, check_room, disk_problem
from benchmarks.dlrm import blocks, made, sources, stages
from benchmarks.dlrm.blocks import BLOCK_ROWS, ROW_BYTES, TABLES
from benchmarks.dlrm.sources import Source
from benchmarks.dlrm.stages import Bucket, Part, Table

BENCHMARK = "dlrm"
VERSION = "1"
"""Raise it when the same source and options give other bytes: unfinished parts are then made again."""
SPLITS = ("train", "val")
VALUES = "tables.bin"
"""The values behind the rows of all tables, in order: what encodes further data in the same way."""
FILES = (*(f"{split}.bin" for split in SPLITS), VALUES)
MALFORMED_SHARE = 1e-4
"""Share of malformed rows that is left out without asking."""


class Task(NamedTuple):
    """One preparation: where to, what from and how."""

    to: Path
    source: Source
    fingerprint: str
    parts: Dict[str, Tuple[Part, ...]]
    tables: Tuple[Table, ...]
    seed: int

    @property
    def scratch(self) -> Path:
        """Folder of what is not finished."""
        return self.to / PARTS


def prepare(args: argparse.Namespace, progress: Progress) -> int:
    """Make the data set that the command line asks for, or go on making it."""
    _make_folder(args.to, args.origin)
    with ExitStack() as stack:
        origin = args.origin
        if origin is None:
            if is_complete(args.to, _fingerprint_of_made(args), args.overwrite):
                return _nothing_to_do(args.to, progress)
            origin = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="made-clicks-")))
            made.write_text(origin, args.seed)
        looked = 0

        def tell(count: int) -> None:
            nonlocal looked
            looked += count
            progress.update("scan", looked, None, looked)

        source = sources.list_source(origin, args.validation_fraction, tell)
        name = args.name or (made.NAME if args.origin is None else source.name)
        task = plan(args, source._replace(name=name))
        if is_complete(args.to, task.fingerprint, args.overwrite):
            return _nothing_to_do(args.to, progress)
        with begin(task, progress):
            parse(task, args.workers, progress)
            judge_malformed(task, args.skip_corrupt, progress)
            count(task, args.workers, progress)
            rows = shuffle(task, args.workers, progress)
            path = finish(task, rows, progress)
    progress.end(path, f"{path}: {name}, {rows['train']:,} + {rows['val']:,} rows")
    return 0


def _nothing_to_do(to: Path, progress: Progress) -> int:
    progress.note(f"nothing to do: {to} was made from the same source with the same options")
    progress.end(to / FILE_NAME, str(to / FILE_NAME))
    return 0


def _make_folder(to: Path, origin: Optional[Path]) -> None:
    if origin is not None and origin.is_dir() and origin.resolve() in (to.resolve(), *to.resolve().parents):
        raise Problem(f"{to} lies within the source {origin}", "a folder outside it", "choose another --to")
    try:
        to.mkdir(parents=True, exist_ok=True)
        if not os.access(to, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        found = f"cannot write in {to}: {error.strerror}"
        raise Problem(found, "a folder that can be written in", "choose another --to") from None


def plan(args: argparse.Namespace, source: Source) -> Task:
    """Cut the text into parts; all that decides what is written goes into the fingerprint."""
    scratch = args.to / PARTS
    parts: Dict[str, Tuple[Part, ...]] = {}
    for number, (split, whole) in enumerate(zip(SPLITS, (source.train, source.val))):
        text = sum(each.end - each.begin for each in whole)
        buckets = -(-text // stages.BUCKET_BYTES)
        parts[split] = tuple(
            Part(
                each,
                number,
                place,
                buckets,
                scratch / f"{split}-{place:05}.rows",
                args.index_limit,
                args.seed,
            )
            for place, each in enumerate(sources.ranges(whole, stages.PART_BYTES))
        )
    every = (*parts["train"], *parts["val"])
    limits = (args.index_limit, args.frequency_threshold)
    tables = tuple(
        Table(number, every, scratch / f"table-{number:02}.values", *limits) for number in range(TABLES)
    )
    if args.origin is None:
        fingerprint = _fingerprint_of_made(args)
    else:
        facts: List[Any] = [VERSION, source.name, source.made, args.seed, *limits]
        for each in (*source.train, *source.val):
            change = Path(each.path).stat().st_mtime_ns
            facts.append((Path(each.path).name, each.begin, each.end, change))
        fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()
    return Task(args.to, source, fingerprint, parts, tables, args.seed)


def _fingerprint_of_made(args: argparse.Namespace) -> str:
    facts = (VERSION, made.NAME, args.name, args.seed, args.index_limit, args.frequency_threshold)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def is_complete(to: Path, fingerprint: str, overwrite: bool) -> bool:
    """Whether ``to`` already holds this data set; refuses to touch another one unless told to."""
    present = None
    if (to / FILE_NAME).exists():
        try:
            present = file_passport.read(to)
        except ValueError:
            present = {"name": "with a damaged passport", "how": {}}
    same = present is not None and present["how"].get("source") == fingerprint
    if same and not file_passport.verify(to, quick=True):
        return not overwrite
    strange = [name for name in FILES if (to / name).exists()]
    ours = (to / PARTS / "plan.json").exists()
    if overwrite or (present is None and (ours or not strange)):
        return False
    if present is None:
        found = f"{to} holds {', '.join(strange)} without a passport"
    elif same:
        found = f"{to} holds this data set, but its files have changed since"
    else:
        found = f"{to} holds the data set {present['name']}, made from another source or with other options"
    raise Problem(found, "an empty folder, or this data set", "choose another --to, or add --overwrite")


def begin(task: Task, progress: Progress) -> BinaryIO:
    """Claim the folder and decide whether to go on or to start over; the claim ends when it is closed."""
    task.scratch.mkdir(exist_ok=True)
    claim = (task.scratch / "lock").open("wb")
    try:
        fcntl.lockf(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        claim.close()
        found = f"another preparation is writing in {task.to}"
        raise Problem(found, "one at a time", "wait for its end") from None
    plan_path = task.scratch / "plan.json"
    try:
        before = json.loads(plan_path.read_text(encoding="utf-8"))["source"]
    except FileNotFoundError:
        before = None
    except (ValueError, KeyError, TypeError):
        before = ""
    if before != task.fingerprint:
        if before is not None:
            progress.note("starting over: the source or the options have changed since the interruption")
        leftovers = [path for path in task.scratch.iterdir() if path.name != "lock"]
        for path in (*leftovers, *(task.to / name for name in (FILE_NAME, *FILES))):
            if path.exists():
                path.unlink()
        plan_path.write_text(json.dumps({"source": task.fingerprint}), encoding="utf-8")
    for path in task.scratch.iterdir():
        if path.suffix[1:].isdigit():  # what a killed worker was writing
            path.unlink()
    return claim


def run_stage(
    phase: str,
    function: Callable[..., Any],
    every: Sequence[Any],
    waiting: Sequence[Any],
    size: Callable[[Any], int],
    worker_count: int,
    progress: Progress,
) -> None:
    """Let workers do what is not done yet, and tell how far all of it is; ``size`` is in the phase's unit."""
    total = sum(size(each) for each in every)
    before = total - sum(size(each) for each in waiting)
    if before:
        progress.note(
            f"going on: {len(every) - len(waiting):,} of {len(every):,} pieces of {phase} were done"
        )
    counts, sizes = [0] * len(waiting), [0] * len(waiting)
    progress.update(phase, before, total)
    with closing(workers.run(function, waiting, worker_count)) as events:
        for event in events:
            counts[event.task], sizes[event.task] = event.count, event.size
            progress.update(phase, min(total, before + sum(counts)), total, sum(sizes))


def parse(task: Task, worker_count: int, progress: Progress) -> None:
    """Text to rows."""
    every = [part for split in SPLITS for part in task.parts[split]]
    waiting = [part for part in every if not part.facts_path.exists()]
    if waiting:
        present = sum(path.stat().st_size for path in task.scratch.iterdir())
        check_room(task.to, 2 * ROW_BYTES * estimate_rows(task.source) - present)
    run_stage(
        "parse",
        stages.parse_part,
        every,
        waiting,
        lambda p: p.text.end - p.text.begin,
        worker_count,
        progress,
    )


def estimate_rows(source: Source) -> int:
    """Rows of all text, by the length of its first lines."""
    with open(source.train[0].path, "rb") as file:
        sample = file.read(1 << 20)
    return round(source.bytes * sample.count(b"\n") / max(1, len(sample)))


def judge_malformed(task: Task, skip: bool, progress: Progress) -> None:
    """Refuse more malformed rows than an accident explains; tell how many there are otherwise."""
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
            remedy = f"look at {task.parts[split][0].text.path}"
            raise Problem(
                f"no well-formed row in {split}", "a label, 13 integers, 26 hexadecimal values", remedy
            )
    if not malformed:
        return
    found = f"{malformed:,} of {lines:,} rows are malformed; {first}"
    if malformed > lines * MALFORMED_SHARE and not skip:
        raise Problem(
            found,
            f"at most {MALFORMED_SHARE:.2%}: label 0 or 1, 13 integers, 26 hexadecimal values, tabs between",
            "mend the file, or give the same command with --skip-corrupt to leave them out",
        )
    progress.note(f"left out: {found}")


def count(task: Task, worker_count: int, progress: Progress) -> None:
    """Rows of the tables."""
    waiting = [table for table in task.tables if not table.values.exists()]
    run_stage("tables", stages.list_values, task.tables, waiting, lambda table: 1, worker_count, progress)


def shuffle(task: Task, worker_count: int, progress: Progress) -> Dict[str, int]:
    """Rows to their final place; returns the rows of each split."""
    every: List[Bucket] = []
    rows = {}
    for number, split in enumerate(SPLITS):
        parts, file = task.parts[split], task.scratch / f"{split}.bin"
        sizes = stages.bucket_sizes(parts)
        firsts = np.concatenate(([0], np.cumsum(sizes)))
        rows[split] = int(firsts[-1])
        every += [
            Bucket(number, k, parts, task.tables, int(firsts[k]), int(sizes[k]), file, rows[split], task.seed)
            for k in range(len(sizes))
        ]
        if not file.exists() or file.stat().st_size != blocks.file_bytes(rows[split]):
            blocks.create(file, rows[split])
            for old in task.scratch.glob(f"{split}-*.done"):
                old.unlink()
    check_terabyte(task.source.name, rows)
    waiting = [bucket for bucket in every if not bucket.done_path.exists()]
    run_stage(
        "shuffle", stages.write_bucket, every, waiting, lambda b: b.rows * ROW_BYTES, worker_count, progress
    )
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


def finish(task: Task, rows: Dict[str, int], progress: Progress) -> Path:
    """Move the files to their place and write the passport."""
    sizes = [stages.table_size(table) for table in task.tables]
    done, total = 0, sum(blocks.file_bytes(count) for count in rows.values())

    def tell(size: int) -> None:
        nonlocal done
        done += size
        progress.update("verify", done, None if done > total else total, done)

    try:
        with (task.scratch / VALUES).open("wb") as output:
            for table in task.tables:
                with table.values.open("rb") as values:
                    shutil.copyfileobj(values, output)
        for name in FILES:
            (task.scratch / name).replace(task.to / name)
        path = file_passport.write(
            task.to,
            BENCHMARK,
            task.source.name,
            {split: file_passport.Split(rows[split], (f"{split}.bin", VALUES)) for split in SPLITS},
            describe(task, sizes),
            {"source": task.fingerprint, "made": task.source.made, "tool": tool_versions()},
            tell,
        )
    except OSError as error:
        raise disk_problem(error, task.to) from None
    shutil.rmtree(task.scratch)
    return path


def describe(task: Task, sizes: List[int]) -> Dict[str, Any]:
    """What training must know of the data set."""
    table = task.tables[0]
    return {
        "block_rows": BLOCK_ROWS,
        "table_sizes": sizes,
        "index_limit": table.index_limit,
        "frequency_threshold": table.threshold,
        "malformed": sum(stages.read_facts(part).malformed for split in SPLITS for part in task.parts[split]),
        "seed": task.seed,
    }


def tool_versions() -> Dict[str, str]:
    """What made the data set."""
    return {
        "name": "benchmarks.dlrm.prepare",
        "version": VERSION,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
