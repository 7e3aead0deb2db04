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
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, Dict, List, NamedTuple, Optional, Tuple

from benchmarks.common import passport as passports
from benchmarks.common import workers
from benchmarks.common.passport import FILE_NAME, PARTS, SKIPPED_NAMES, Passport, Split
from benchmarks.common.preparing import Problem, Progress, check_room, disk_problem
from benchmarks.resnet.images import CorruptImage, Encoding, encode, require_pillow
from benchmarks.resnet.parts import Part, finished, join, plan, write_part
from benchmarks.resnet.sources import list_source
from benchmarks.resnet.sources.listing import Item, Source, check_classes, read_item

BENCHMARK = "resnet"
VERSION = "1"
"""Raise it when the same source and options give other bytes: unfinished parts are then made again."""
SPLITS = ("train", "val")
FILES = tuple(f"{split}.{suffix}" for split in SPLITS for suffix in ("rec", "idx"))
SAMPLED_IMAGES = 32
"""Images encoded on trial to estimate the room needed."""
BYTES_BESIDE_IMAGE = 64
"""Record frame 8, image header 24, padding up to 3, index line and part facts: rounded up."""
LISTED = 20
"""Corrupt images told by name."""


class Task(NamedTuple):
    """One preparation: where to, what from and how."""

    to: Path
    source: Source
    encoding: Encoding
    fingerprint: str
    parts: Dict[str, List[Part]]

    @property
    def scratch(self) -> Path:
        """Folder of what is not finished."""
        return self.to / PARTS

    def joined(self, split: str) -> Path:
        """The growing record file of a split."""
        return self.scratch / f"{split}.rec"

    def done(self, split: str) -> Dict[Path, object]:
        """Facts of the finished parts of a split."""
        return dict(finished(self.parts[split], self.joined(split)))


def prepare(args: argparse.Namespace, progress: Progress) -> int:
    """Makes the data set that the command line asks for, or goes on making it."""
    require_pillow()
    encoding = Encoding(args.resize, args.quality, args.trust)
    check_places(args.to, args.origin)
    source = list_source(
        args.origin, args.seed, args.validation_fraction, lambda count: progress.update("index", count)
    )
    source = source._replace(name=args.name or source.name)
    counts = {"train": len(source.train), "val": len(source.val)}
    progress.update("index", sum(counts.values()), sum(counts.values()))
    for finding in passports.check_counts(source.name, len(source.classes), counts):
        raise Problem(*finding)
    if source.left_out:
        progress.note(f"{source.left_out:,} files left out: no images by their suffix")
    fingerprint = fingerprint_of(source, encoding)
    if is_complete(args.to, fingerprint, args.overwrite):
        path = args.to / FILE_NAME
        progress.note(f"nothing to do: {args.to} was made from the same source with the same options")
        progress.end(path, str(path))
        return 0
    scratch = args.to / PARTS
    parts = {
        split: plan(items, split, scratch, encoding)
        for split, items in zip(SPLITS, (source.train, source.val))
    }
    task = Task(args.to, source, encoding, fingerprint, parts)
    with begin(task, progress):
        convert(task, args.workers, progress)
        skipped = judge_corrupt(task, args.skip_corrupt, progress)
        path = finish(task, skipped, args.seed, progress)
    progress.end(path, f"{path}: {source.name}, {len(source.train):,} + {len(source.val):,} images listed")
    return 0


def check_places(to: Path, origin: Optional[Path]) -> None:
    """Makes the folder to write in, and refuses one that lies within the source."""
    if origin is not None and not origin.is_dir():
        raise Problem(
            f"{origin} is no folder" if origin.exists() else f"no folder {origin}",
            "a folder of images, or the folder that holds ImageNet's tars",
            "name that folder with --from",
        )
    if origin is not None and origin.resolve() in (to.resolve(), *to.resolve().parents):
        raise Problem(f"{to} lies within the source {origin}", "a folder outside it", "choose another --to")
    try:
        to.mkdir(parents=True, exist_ok=True)
        if not os.access(to, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise Problem(
            f"cannot write in {to}: {error.strerror}",
            "a folder that can be written in",
            "choose another --to",
        ) from None


def fingerprint_of(source: Source, encoding: Encoding) -> str:
    """Hash of all that decides what is written: version, options and listing, but not the place."""
    digest = hashlib.sha256(repr((VERSION, tuple(encoding), source.name, source.classes)).encode())
    for items in (source.train, source.val):
        digest.update(b"split\n")
        for item in items:
            # The bytes of a made image follow from its name; its encoder's version must not matter here.
            facts = (0, 0) if item.payload else (item.size, item.changed)
            digest.update(
                repr((item.name, item.label, item.offset, *facts)).encode("utf-8", "backslashreplace")
            )
    return digest.hexdigest()


def is_complete(to: Path, fingerprint: str, overwrite: bool) -> bool:
    """Whether ``to`` already holds this data set; refuses to touch another one unless told to."""
    try:
        present = passports.read(to)
    except passports.PassportError:
        present = None
    ours = (to / PARTS / "plan.json").exists()
    strange = [name for name in (*FILES, FILE_NAME) if (to / name).exists()]
    if present is not None and present.source == fingerprint and not passports.verify(to, quick=True):
        return not overwrite
    if overwrite or not strange or (ours and present is None):
        return False
    if present is None:
        found = f"{to} holds {', '.join(strange)} without a passport"
    elif present.source == fingerprint:
        found = f"{to} holds this data set, but its files have changed since"
    else:
        found = f"{to} holds the data set {present.name}, made from another source or with other options"
    raise Problem(found, "an empty folder, or this data set", "choose another --to, or add --overwrite")


def begin(task: Task, progress: Progress) -> BinaryIO:
    """Claims the folder and decides whether to go on or to start over; the claim ends when it is closed."""
    task.scratch.mkdir(exist_ok=True)
    claim = (task.scratch / "lock").open("wb")
    try:
        fcntl.lockf(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        claim.close()
        raise Problem(
            f"another preparation is writing in {task.to}", "one at a time", "wait for its end"
        ) from None
    plan_path = task.scratch / "plan.json"
    before = read_plan(plan_path)
    if before != task.fingerprint:
        leftovers = [path for path in task.scratch.iterdir() if path.name != "lock"]
        if before is not None:
            progress.note("starting over: the source or the options have changed since the interruption")
        for path in (*leftovers, *(task.to / name for name in (FILE_NAME, *FILES))):
            if path.exists():
                path.unlink()
        plan_path.write_text(json.dumps({"source": task.fingerprint}), encoding="utf-8")
    for path in task.scratch.iterdir():
        if path.suffix[1:].isdigit():  # what a killed worker was writing
            path.unlink()
    for split in SPLITS:  # moved already when the last preparation ended
        if (task.to / f"{split}.rec").exists():
            (task.to / f"{split}.rec").replace(task.joined(split))
    return claim


def read_plan(path: Path) -> object:
    """Fingerprint of the unfinished preparation, None when there is none, empty when it is unreadable."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["source"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return ""


def convert(task: Task, worker_count: int, progress: Progress) -> None:
    """Writes all parts that are not there yet."""
    every = [part for split in SPLITS for part in task.parts[split]]
    done = {path for split in SPLITS for path in task.done(split)}
    waiting = [part for part in every if part.records not in done]
    if done:
        progress.note(f"going on: {len(done):,} of {len(every):,} parts were finished before")
    total = sum(len(part.items) for part in every)
    counts = [0] * len(waiting)
    sizes = [0] * len(waiting)
    before = total - sum(len(part.items) for part in waiting)
    if waiting:
        present = sum(path.stat().st_size for path in task.scratch.iterdir() if path.suffix == ".rec")
        check_room(task.to, estimate_bytes(task.source, task.encoding) - present)
    progress.update("convert", before, total)
    with closing(workers.run(write_part, waiting, worker_count)) as events:
        for event in events:
            counts[event.task], sizes[event.task] = event.count, event.size
            progress.update("convert", before + sum(counts), total, sum(sizes))


def estimate_bytes(source: Source, encoding: Encoding) -> int:
    """Size of the data set, from what some images of the training split become."""
    sample = source.train[:: max(1, len(source.train) // SAMPLED_IMAGES)]
    before = sum(item.size for item in sample) or 1
    after = sum(_encoded_size(item, encoding) for item in sample)
    count = len(source.train) + len(source.val)
    return round(source.bytes * after / before) + count * BYTES_BESIDE_IMAGE


def _encoded_size(item: Item, encoding: Encoding) -> int:
    try:
        return len(encode(read_item(item), encoding))
    except CorruptImage:
        return item.size


def judge_corrupt(task: Task, skip: bool, progress: Progress) -> Dict[str, List[str]]:
    """Names of the corrupt images in each split, when they may be skipped."""
    corrupt: Dict[str, List[Tuple[str, str]]] = {}
    for split in SPLITS:
        facts = finished(task.parts[split], task.joined(split))
        corrupt[split] = [image for part in task.parts[split] for image in facts[part.records].corrupt]
    told = [f"{split}: {name}: {why}" for split in SPLITS for name, why in corrupt[split]]
    if told:
        lines = told[:LISTED] + ([f"and {len(told) - LISTED:,} more"] if len(told) > LISTED else [])
        listing = "\n    ".join([f"{len(told):,} corrupt images", *lines])
        if not skip:
            raise Problem(
                listing,
                "images that can be decoded",
                "mend or delete them, or give the same command with --skip-corrupt: "
                "the images already converted are kept",
            )
        progress.note("skipped " + listing)
    names = {split: [name for name, _ in corrupt[split]] for split in SPLITS}
    bad = {split: frozenset(names[split]) for split in SPLITS}
    check_classes(
        task.source._replace(
            train=[item for item in task.source.train if item.name not in bad["train"]],
            val=[item for item in task.source.val if item.name not in bad["val"]],
        )
    )
    return names


def finish(task: Task, skipped: Dict[str, List[str]], seed: int, progress: Progress) -> Path:
    """Joins the parts, moves the files to their place and writes the passport."""
    facts = [fact for split in SPLITS for fact in finished(task.parts[split], task.joined(split)).values()]
    total = sum(fact.bytes for fact in facts)
    done = 0

    def tell(size: int) -> None:
        nonlocal done
        done += size
        progress.update("join", done, total, done)

    splits = {}
    for split in SPLITS:
        records, index = join(task.parts[split], task.joined(split), tell)
        joined = task.joined(split)
        count, first, last, _ = passports.inspect(joined, joined.with_suffix(".idx"))
        names = skipped[split]
        splits[split] = Split(
            count, records, index, first, last, len(names), tuple(sorted(names)[:SKIPPED_NAMES])
        )
    passport = describe(task, splits, seed)
    try:
        for name in FILES:
            (task.scratch / name).replace(task.to / name)
        path = passports.write(passport, task.to)
    except OSError as error:
        raise disk_problem(error, task.to) from None
    shutil.rmtree(task.scratch)
    return path


def describe(task: Task, splits: Dict[str, Split], seed: int) -> Passport:
    """The passport of the finished data set."""
    import PIL

    source, encoding = task.source, task.encoding
    options = {
        "made": source.made,
        "resize": encoding.resize,
        "quality": encoding.quality,
        "decoded": not encoding.trust,
        "seed": seed,
    }
    tool = {
        "name": "benchmarks.resnet.prepare",
        "version": VERSION,
        "python": platform.python_version(),
        "pillow": PIL.__version__,
    }
    return Passport(
        schema=passports.SCHEMA,
        benchmark=BENCHMARK,
        name=source.name,
        id=passports.data_id(BENCHMARK, source.classes, splits),
        classes=source.classes,
        splits=splits,
        options=options,
        source=task.fingerprint,
        tool=tool,
    )
