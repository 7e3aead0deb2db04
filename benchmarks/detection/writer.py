"""Writes a data set in COCO's format: checks annotations and images, stores files, arrays and dataset.json."""

import argparse
import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import PIL

from benchmarks.common.data import published, source_checks
from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.files import read_facts, write_facts
from benchmarks.common.data.images import CorruptImage, check_pixels, opened
from benchmarks.common.data.manifest import describe_file
from benchmarks.common.data.prepare import Content, Listing, Split, check_room
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.common.data.source_checks import first_names
from benchmarks.common.data.workers import Report, Workers
from benchmarks.detection import scenes, sources, tables
from benchmarks.detection.annotations import load
from benchmarks.detection.layout import ARRAYS, PARTS, array_file, boxes_file, images_folder, json_file
from benchmarks.detection.preparation import COCO
from benchmarks.detection.tables import OUTSIDE_BY_ROUNDING, Entry, Table

VERSION = "3"  # Increase it if the output changes for the same source and options; unfinished parts are then discarded
PART_IMAGES = 1024  # images per task: about 170 MB and ten seconds on a core for COCO, the maximum loss per worker
TOLERATED = (tables.OUTSIDE, tables.NO_AREA, tables.FEW_POINTS)
FORMATS = ("JPEG", "MPO", "PNG", "BMP")  # DALI decodes others differently, such as gray TIFF and PGM, or not at all
SHOWN = 5  # errors listed per kind in a message
SKIP = "fix them, or add --skip-flawed to skip them: what is done already is kept"
NameSets = Dict[str, FrozenSet[str]]  # names of images by part


class Task(NamedTuple):
    source: sources.Source
    tables: Dict[str, Table]
    name: str
    skips: bool  # whether images and objects with errors are skipped
    scratch: Path
    processes: int
    progress: Progress

    @property
    def drops_flawed(self) -> bool:
        """Whether objects with errors are skipped; the known errors of COCO 2017 are kept."""
        return self.skips and self.name != COCO

    def without(self, skipped: NameSets) -> Dict[str, Table]:
        return {part: table.without(skipped[part], self.drops_flawed) for part, table in self.tables.items()}


def list_source(args: argparse.Namespace, progress: Progress) -> Listing:
    """List images and annotations; the fingerprint covers everything that determines the output."""
    if args.origin is None:
        key: Any = (VERSION, scenes.NAME, args.name, args.seed, args.scenes)
        return Listing(None, hashlib.sha256(repr(key).encode()).hexdigest())
    source = sources.find(args.origin)
    key = (VERSION, args.name, args.seed, args.origin.resolve().name, source.fingerprint)
    return Listing(source, hashlib.sha256(repr(key).encode()).hexdigest())


def write(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Content:
    task = _plan(listing, args, scratch, progress)
    missing = _find_missing(task)
    part_tables = task.without(missing)
    _check_objects(task, part_tables)
    _count(task, part_tables)
    placed = _place_images(task, part_tables)
    damaged = {
        part: [f"{name}: {reason}" for name, reason in placed[part].items() if isinstance(reason, str)]
        for part in PARTS
    }
    lines = [line for part in PARTS for line in _line(f"{part}: images with errors", damaged[part])]
    _reject(task, lines, "images that can be decoded, of the size in their entries")
    usable = {
        part: {name: digest_entry for name, digest_entry in placed[part].items() if not isinstance(digest_entry, str)}
        for part in PARTS
    }
    skipped = {part: missing[part] | (placed[part].keys() - usable[part].keys()) for part in PARTS}
    train, val = ({name: digest for name, (_, digest) in usable[part].items()} for part in PARTS)
    common = source_checks.overlap(val.items(), train.values(), "images", args.allow_overlap, progress)
    part_tables = task.without(skipped)
    for part in PARTS:
        tables.write_arrays(part_tables[part], part, scratch)
        sizes, digests = zip(*(usable[part][entry.name] for entry in part_tables[part].entries))
        checksums = np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, 32)
        write_array(scratch / array_file(part, "bytes"), np.array(sizes, np.int64))
        write_array(scratch / array_file(part, "checksums"), checksums)
        _place_json(task, part, part_tables[part])
        _write_boxes(scratch, part, part_tables[part])
    return _content(task, args, part_tables, skipped, common)


def _plan(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Task:
    source, name = listing.source, args.name
    if source is None:
        raw = scratch / scenes.NAME
        scenes.write_scenes(raw, args.seed, args.scenes)  # written anew after an interruption, they are the same
        source, name = sources.find(raw), name or scenes.NAME
    read: Dict[str, Table] = {}
    total = sum(source.annotations[part].size for part in PARTS)
    for part in PARTS:
        progress.update("annotations", sum(table.json.size for table in read.values()), total)
        read[part] = tables.read(source.annotations[part])
    progress.update("annotations", total, total)
    first, second = (read[part].categories for part in PARTS)
    if first != second:
        different = [f"{number} {label}" for number, label in sorted(set(first) ^ set(second))]
        raise Problem(
            f"train and val have different categories: {first_names(different, '; ', SHOWN)}",
            "the same ids and names in both JSON files",
            f"give {source.annotations['train']} and {source.annotations['val']} one list of categories",
        )
    if name is None:
        expected = published.load()[COCO]["exactly"]
        is_coco = all(len(read[part].entries) == expected[f"facts.counts.images in {part}"] for part in PARTS)
        name = COCO if is_coco and not args.skip_flawed else args.origin.resolve().name
        name = f"{name}-own" if name == COCO and not is_coco else name
    return Task(source, read, name, args.skip_flawed, scratch, args.workers, progress)


# -- errors ---------------------------------------------------------------------------------------------


def _find_missing(task: Task) -> NameSets:
    # Names of entries without a file, if these are skipped
    missing: NameSets = {}
    lines: List[str] = []
    for part, table in task.tables.items():
        container, files = task.source.images[part].container, task.source.images[part].sizes.keys()
        entries = {entry.name for entry in table.entries}
        missing[part] = frozenset(entries - files)
        lines += _line(f"images without file in {container}", sorted(missing[part]))
        lines += _line(f"files in {container} without entry in {table.json}", sorted(files - entries))
    _reject(task, lines, "one entry in the JSON file for each image file")
    for part, table in task.tables.items():
        if len(missing[part]) == len(table.entries):
            container = task.source.images[part].container
            raise Problem(f"{container} has none of the images of {table.json}", "all of them", sources.AGAIN)
    return missing


def _check_objects(task: Task, part_tables: Mapping[str, Table]) -> None:
    lines: List[str] = []
    for part, table in part_tables.items():
        for kind, errors in sorted(table.errors.items()):
            line = _line(f"{part}: {kind}", errors, f" in {table.json}")
            if task.name == COCO and kind in TOLERATED:
                task.progress.note(f"published like this, and kept for the evaluation: {line[0]}")
            else:
                lines += line
        count, farthest = table.boxes_outside
        if count:
            task.progress.note(f"{part}: {count:,} boxes extend beyond their image, by {farthest:g} pixels at most")
        images = len(table.entries)
        empty = images - len({item.image_id for item in table.objects})
        if empty:
            task.progress.note(f"{part}: {empty:,} of {images:,} images have no objects")
    _reject(task, lines, "objects within images and categories that the file has")
    for part, table in part_tables.items():
        if not table.objects:
            raise Problem(f"{part} has no usable objects", "at least one", "check its annotations")


def _reject(task: Task, lines: Sequence[str], expected: str) -> None:
    if lines and not task.skips:
        raise Problem("\n    ".join(lines), expected, SKIP, keeps=True)
    for line in lines:
        task.progress.note(f"skipped: {line}")


def _line(kind: str, names: Sequence[str], suffix: str = "") -> List[str]:
    return [f"{len(names):,} {kind}: {first_names(names, '; ', SHOWN)}{suffix}"] if names else []


def _count(task: Task, part_tables: Mapping[str, Table]) -> Dict[str, int]:
    # Counts for dataset.json, checked for COCO
    counts = {"categories": len(part_tables["train"].categories)}
    for part, table in part_tables.items():
        counts[f"images in {part}"] = len(table.entries)
        counts[f"images with annotations in {part}"] = len(table.annotated)
        counts[f"objects in {part}"] = len(table.objects)
        counts[f"crowds in {part}"] = sum(item.crowd for item in table.objects)
    published.refuse({"name": task.name, "facts": {"counts": counts}})
    return counts


# -- images ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageBatch:
    """Images for a worker process."""

    images: sources.Images
    entries: Tuple[Entry, ...]
    folder: Path  # where they go
    done_path: Path  # the file of the facts, which is written last


def _place_images(task: Task, part_tables: Mapping[str, Table]) -> Dict[str, Dict[str, Any]]:
    # By part and name: bytes and sha256, or an error
    batches: Dict[str, List[ImageBatch]] = {part: [] for part in PARTS}
    for part, table in part_tables.items():
        folder, images = task.scratch / images_folder(part), task.source.images[part]
        folder.mkdir(exist_ok=True)
        for number, cut in enumerate(range(0, len(table.entries), PART_IMAGES)):
            batch_entries = table.entries[cut : cut + PART_IMAGES]
            batch_images = images._replace(sizes={entry.name: images.sizes[entry.name] for entry in batch_entries})
            batches[part].append(
                ImageBatch(batch_images, batch_entries, folder, task.scratch / f"{part}-images-{number:05}.json")
            )
    all_batches = [batch for part in PARTS for batch in batches[part]]
    waiting = [batch for batch in all_batches if not batch.done_path.exists()]
    check_room(
        task.scratch.parent,
        sum(sum(batch.images.sizes.values()) for batch in waiting if not _can_link(batch, task.scratch)),
    )
    pool = Workers(task.processes, task.scratch.parent, task.progress)
    pool.run("images", "images", write_images, all_batches, lambda batch: len(batch.entries))
    done = {part: [read_facts(batch.done_path) for batch in batches[part]] for part in PARTS}
    return {part: {name: size for entries in done[part] for name, size in entries.items()} for part in PARTS}


def _can_link(task: ImageBatch, scratch: Path) -> bool:
    return not task.images.is_zip and Path(task.images.container).stat().st_dev == scratch.stat().st_dev


def write_images(task: ImageBatch, report: Report) -> Tuple[int, int]:
    """Check and store a task's images, in a worker process.

    The results are, by name, bytes and sha256, or an error.
    """
    sizes = {entry.name: (entry.width, entry.height) for entry in task.entries}
    results: Dict[str, Any] = {}
    total = 0
    for name, data in sources.read_all(task.images, list(sizes)):
        wrong = image_error(data, sizes[name])
        if wrong is None:
            _store(task, name, data)
        results[name] = wrong or [len(data), hashlib.sha256(data).hexdigest()]
        total += len(data)
        report(len(results), total)
    write_facts(task.done_path, results)
    return len(task.entries), total


def image_error(data: bytes, size: Tuple[int, int]) -> Optional[str]:
    """Return an image's error, or None. The EXIF orientation is not applied, as in pycocotools."""
    if not data:
        return "unusable: no bytes"
    try:
        with opened(data) as image:
            pixels = image.size
            check_pixels(image)
            if image.format not in FORMATS:
                raise CorruptImage(f"{image.format} image: convert it to JPEG or PNG")
            # At one eighth of the size the decoder still walks through every coded bit.
            image.draft(None, (1, 1))
            image.load()
    except CorruptImage as error:
        return f"unusable: {error}"
    if pixels != size:
        return f"{pixels[0]} x {pixels[1]} pixels, its entry has {size[0]} x {size[1]}"
    return None


def _store(task: ImageBatch, name: str, data: bytes) -> None:
    # Use a hard link, which takes no space, if supported by the file system, else a copy
    path = task.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if task.images.is_zip or not _link(Path(task.images.container, name), path):
        temporary = task.done_path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(data)
        temporary.replace(path)


def _link(source: Path, path: Path) -> bool:
    path.unlink() if path.exists() else None
    with suppress(OSError):
        os.link(os.path.realpath(source), path)
        return True
    return False


# -- JSON files -----------------------------------------------------------------------------------------


def _place_json(task: Task, part: str, table: Table) -> None:
    # Unchanged, or without skipped entries
    source, path = table.json, task.scratch / json_file(part)
    path.parent.mkdir(exist_ok=True)
    path.unlink() if path.exists() else None
    if (task.drops_flawed and table.errors) or len(table.entries) < len(task.tables[part].entries):
        content, images = tables.load(source), {entry.id for entry in table.entries}
        content["images"] = [record for record in content["images"] if int(record["id"]) in images]
        # By index, since an unusable annotation may have the same id as a usable annotation
        indices = sorted(record.entry for record in table.objects)
        content["annotations"] = [content["annotations"][record] for record in indices]
        path.write_text(json.dumps(content), encoding="utf-8")
    elif source.member:
        path.write_bytes(sources.read_content(source))
    elif not _link(Path(source.path), path):
        shutil.copyfile(source.path, path)


def _write_boxes(scratch: Path, part: str, table: Table) -> None:
    # Only images and boxes, a seventh of COCO's file, as in v0.7's prepare-json.py
    images = [
        {"id": item.id, "file_name": item.name, "width": item.width, "height": item.height} for item in table.entries
    ]
    # The shortest decimals that are the same number in fp32
    boxes = ([*map(float, map(str, row))] for row in load(scratch, part, "boxes"))
    annotations = [
        {"id": number, "image_id": item.image_id, "category_id": table.categories[item.label - 1][0], "bbox": box}
        for number, (item, box) in enumerate(zip(table.objects, boxes), 1)
    ]
    listed = [{"id": number, "name": name} for number, name in table.categories]
    content = {"images": images, "annotations": annotations, "categories": listed}
    (scratch / boxes_file(part)).write_text(json.dumps(content, separators=(",", ":")), encoding="ascii")


# -- manifest -------------------------------------------------------------------------------------------


def _content(
    task: Task, args: argparse.Namespace, part_tables: Mapping[str, Table], skipped: NameSets, common: int
) -> Content:
    counts, splits, described = _count(task, part_tables), {}, []
    for part in PARTS:
        texts = (json_file(part), boxes_file(part))
        described += [{**describe_file(task.scratch / name), "name": name} for name in texts]
        sizes = load(task.scratch, part, "bytes")
        files = (*(array_file(part, name) for name in ARRAYS), *texts)
        splits[part] = Split(len(sizes), files, {"unlisted_bytes": int(sizes.sum())})
    errors = {
        part: {
            **{kind: len(names) for kind, names in table.errors.items()},
            OUTSIDE_BY_ROUNDING: table.boxes_outside,
            "images left out": sorted(skipped[part])[:SHOWN],
            "number of images left out": len(skipped[part]),
        }
        for part, table in part_tables.items()
    }
    numbers = " + ".join(f"{splits[part].samples:,}" for part in PARTS)
    return Content(
        name=task.name,
        splits=splits,
        summary=f"{numbers} images, {counts['objects in train']:,} + {counts['objects in val']:,} objects",
        classes=[name for _, name in part_tables["train"].categories],
        facts={"categories": [list(category) for category in part_tables["train"].categories], "counts": counts},
        how={"flaws": errors, "seed": args.seed, "in_both": common},
        tool={"version": VERSION, "numpy": np.__version__, "pillow": PIL.__version__},
        described=described,
    )
