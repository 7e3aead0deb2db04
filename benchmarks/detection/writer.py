"""Writes a data set of COCO's form: checks annotations and images, places the files, and writes arrays and manifest."""

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

from benchmarks.common.data import source_checks
from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.files import read_facts, write_facts
from benchmarks.common.data.images import CorruptImage, check_pixels, opened
from benchmarks.common.data.manifest import describe_file
from benchmarks.common.data.prepare import Content, Listing, Split, check_room
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.common.data.workers import Report, Workers
from benchmarks.detection import scenes, sources, tables
from benchmarks.detection.annotations import PARTS, array_file, boxes_file, images_folder, json_file, load
from benchmarks.detection.preparation import ARRAYS, COCO, PUBLISHED, check_counts
from benchmarks.detection.tables import REACH_OUT, Entry, Table

VERSION = "3"  # raise it when the same source and options give other bytes: unfinished parts are then made again
PART_IMAGES = 1024  # images of a task: about 170 MB and some ten seconds of one core for COCO, lost at most per worker
TOLERATED = (tables.OUTSIDE, tables.NO_AREA, tables.FEW_POINTS)
SHOWN = 5  # errors of one kind that a message names
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
        """Whether objects with errors are skipped; those of COCO 2017 itself are known and kept."""
        return self.skips and self.name != COCO

    def without(self, skipped: NameSets) -> Dict[str, Table]:
        return {part: table.without(skipped[part], self.drops_flawed) for part, table in self.tables.items()}


def list_source(args: argparse.Namespace, progress: Progress) -> Listing:
    """Find images and annotations; all that decides what is written goes into the fingerprint."""
    if args.origin is None:
        facts: Any = (VERSION, scenes.NAME, args.name, args.seed, args.scenes)
        return Listing(None, hashlib.sha256(repr(facts).encode()).hexdigest())
    source = sources.find(args.origin)
    facts = (VERSION, args.name, args.seed, args.origin.resolve().name, source.fingerprint)
    return Listing(source, hashlib.sha256(repr(facts).encode()).hexdigest())


def write(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Content:
    task = _plan(listing, args, scratch, progress)
    missing = _without_file(task)
    kept = task.without(missing)
    _check_objects(task, kept)
    _count(task, kept)
    found = _place_images(task, kept)
    damaged = {part: [f"{name}: {why}" for name, why in found[part].items() if isinstance(why, str)] for part in PARTS}
    lines = [line for part in PARTS for line in _line(f"{part}: images with errors", damaged[part])]
    _refuse(task, lines, "images that can be decoded, of the size that their entries have")
    usable = {
        part: {name: facts for name, facts in found[part].items() if not isinstance(facts, str)} for part in PARTS
    }
    skipped = {part: missing[part] | (found[part].keys() - usable[part].keys()) for part in PARTS}
    train, val = ({name: digest for name, (_, digest) in usable[part].items()} for part in PARTS)
    common = source_checks.overlap(val.items(), train.values(), "images", args.allow_overlap, progress)
    kept = task.without(skipped)
    for part in PARTS:
        tables.write_arrays(kept[part], part, scratch)
        sizes, digests = zip(*(usable[part][entry.name] for entry in kept[part].entries))
        checksums = np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, 32)
        write_array(scratch / array_file(part, "bytes"), np.array(sizes, np.int64))
        write_array(scratch / array_file(part, "checksums"), checksums)
        _place_json(task, part, kept[part])
        _write_boxes(scratch, part, kept[part])
    return _content(task, args, kept, skipped, common)


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
            f"train and val have different categories: {_some(different)}",
            "the same ids and names in both JSON files",
            f"give {source.annotations['train']} and {source.annotations['val']} one list of categories",
        )
    if name is None:
        is_coco = all(len(read[part].entries) == PUBLISHED[f"images in {part}"] for part in PARTS)
        name = COCO if is_coco and not args.skip_flawed else args.origin.resolve().name
        name = f"{name}-own" if name == COCO and not is_coco else name
    return Task(source, read, name, args.skip_flawed, scratch, args.workers, progress)


# -- errors ---------------------------------------------------------------------------------------------


def _without_file(task: Task) -> NameSets:
    # The names of the entries that have no file, where they are skipped
    missing: NameSets = {}
    lines: List[str] = []
    for part, table in task.tables.items():
        container, files = task.source.images[part].container, task.source.images[part].sizes.keys()
        entries = {entry.name for entry in table.entries}
        missing[part] = frozenset(entries - files)
        lines += _line(f"images without file in {container}", sorted(missing[part]))
        lines += _line(f"files in {container} without entry in {table.json}", sorted(files - entries))
    _refuse(task, lines, "one entry in the JSON file for each image file")
    for part, table in task.tables.items():
        if len(missing[part]) == len(table.entries):
            container = task.source.images[part].container
            raise Problem(f"{container} has none of the images of {table.json}", "all of them", sources.AGAIN)
    return missing


def _check_objects(task: Task, kept: Mapping[str, Table]) -> None:
    lines: List[str] = []
    for part, table in kept.items():
        for kind, errors in sorted(table.errors.items()):
            line = _line(f"{part}: {kind}", errors, f" in {table.json}")
            if task.name == COCO and kind in TOLERATED:
                task.progress.note(f"published so, and kept for the evaluation: {line[0]}")
            else:
                lines += line
        count, farthest = table.reaching_out
        if count:
            task.progress.note(f"{part}: {count:,} boxes reach out of their image, by {farthest:g} pixels at most")
        images = len(table.entries)
        empty = images - len({each.image_id for each in table.objects})
        if empty:
            task.progress.note(f"{part}: {empty:,} of {images:,} images have no object")
    _refuse(task, lines, "objects within images and categories that the file has")
    for part, table in kept.items():
        if not table.objects:
            raise Problem(f"{part} has no object that can be used", "at least one", "look at its annotations")


def _refuse(task: Task, lines: Sequence[str], expected: str) -> None:
    if lines and not task.skips:
        raise Problem("\n    ".join(lines), expected, SKIP, keeps=True)
    for line in lines:
        task.progress.note(f"skipped: {line}")


def _line(what: str, names: Sequence[str], place: str = "") -> List[str]:
    return [f"{len(names):,} {what}: {_some(names)}{place}"] if names else []


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return "; ".join(names[:SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def _count(task: Task, kept: Mapping[str, Table]) -> Dict[str, int]:
    # The counts that the manifest states, by the names of PUBLISHED, which COCO itself must have
    counts = {"categories": len(kept["train"].categories)}
    for part, table in kept.items():
        counts[f"images in {part}"] = len(table.entries)
        counts[f"images with annotations in {part}"] = len(table.annotated)
        counts[f"objects in {part}"] = len(table.objects)
        counts[f"crowds in {part}"] = sum(each.crowd for each in table.objects)
    for problem in check_counts(task.name, counts):
        raise problem
    return counts


# -- images ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pictures:
    """Some images of a part; crosses to a worker process."""

    images: sources.Images
    entries: Tuple[Entry, ...]
    folder: Path  # where they go
    done_path: Path  # the file of the facts, which is written last


def _place_images(task: Task, kept: Mapping[str, Table]) -> Dict[str, Dict[str, Any]]:
    # By part and name, bytes and sha256 or what is wrong
    every: Dict[str, List[Pictures]] = {part: [] for part in PARTS}
    for part, table in kept.items():
        folder, images = task.scratch / images_folder(part), task.source.images[part]
        folder.mkdir(exist_ok=True)
        for number, cut in enumerate(range(0, len(table.entries), PART_IMAGES)):
            some = table.entries[cut : cut + PART_IMAGES]
            own = images._replace(sizes={entry.name: images.sizes[entry.name] for entry in some})
            every[part].append(Pictures(own, some, folder, task.scratch / f"{part}-images-{number:05}.json"))
    both = [each for part in PARTS for each in every[part]]
    waiting = [each for each in both if not each.done_path.exists()]
    check_room(
        task.scratch.parent, sum(sum(each.images.sizes.values()) for each in waiting if not _links(each, task.scratch))
    )
    pool = Workers(task.processes, task.scratch.parent, task.progress)
    pool.run("images", "images", write_pictures, both, lambda each: len(each.entries))
    done = {part: [read_facts(each.done_path) for each in every[part]] for part in PARTS}
    return {part: {name: size for facts in done[part] for name, size in facts.items()} for part in PARTS}


def _links(task: Pictures, scratch: Path) -> bool:
    return not task.images.is_zip and Path(task.images.container).stat().st_dev == scratch.stat().st_dev


def write_pictures(task: Pictures, report: Report) -> Tuple[int, int]:
    """Check and place the images of a task; a function of worker processes.

    The facts are, by name, bytes and sha256 or else what is wrong.
    """
    sizes = {entry.name: (entry.width, entry.height) for entry in task.entries}
    found: Dict[str, Any] = {}
    total = 0
    for name, data in sources.read_all(task.images, list(sizes)):
        wrong = look_at(data, sizes[name])
        if wrong is None:
            _put(task, name, data)
        found[name] = wrong or [len(data), hashlib.sha256(data).hexdigest()]
        total += len(data)
        report(len(found), total)
    write_facts(task.done_path, found)
    return len(task.entries), total


def look_at(data: bytes, size: Tuple[int, int]) -> Optional[str]:
    """Return what is wrong with an image, or None; its EXIF orientation is not applied, as pycocotools does not."""
    if not data:
        return "unusable: no bytes"
    try:
        with opened(data) as image:
            found = image.size
            check_pixels(image)
            if image.mode == "CMYK" and image.format != "JPEG":
                raise CorruptImage(f"{image.format} in CMYK, which DALI inverts: convert it to RGB")
            # At one eighth of the size the decoder still walks through every coded bit.
            image.draft(None, (1, 1))
            image.load()
    except CorruptImage as error:
        return f"unusable: {error}"
    if found != size:
        return f"{found[0]} x {found[1]} pixels, its entry has {size[0]} x {size[1]}"
    return None


def _put(task: Pictures, name: str, data: bytes) -> None:
    # As a hard link where the file system can, which takes no room, else as a copy
    path = task.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if task.images.is_zip or not _linked(Path(task.images.container, name), path):
        temporary = task.done_path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(data)
        temporary.replace(path)


def _linked(source: Path, path: Path) -> bool:
    path.unlink() if path.exists() else None
    with suppress(OSError):
        os.link(os.path.realpath(source), path)
        return True
    return False


# -- JSON files -----------------------------------------------------------------------------------------


def _place_json(task: Task, part: str, kept: Table) -> None:
    # As it is, or without what is skipped
    place, path = kept.json, task.scratch / json_file(part)
    path.parent.mkdir(exist_ok=True)
    path.unlink() if path.exists() else None
    if (task.drops_flawed and kept.errors) or len(kept.entries) < len(task.tables[part].entries):
        content, images = tables.load(place), {entry.id for entry in kept.entries}
        content["images"] = [each for each in content["images"] if int(each["id"]) in images]
        # By their places: an annotation that cannot be used may have the id of one that can.
        places = sorted(each.place for each in kept.objects)
        content["annotations"] = [content["annotations"][each] for each in places]
        path.write_text(json.dumps(content), encoding="utf-8")
    elif place.member:
        path.write_bytes(sources.content(place))
    elif not _linked(Path(place.path), path):
        shutil.copyfile(place.path, path)


def _write_boxes(scratch: Path, part: str, kept: Table) -> None:
    # Images and boxes alone, which are a seventh of COCO's file, as v0.7's prepare-json.py does
    images = [
        {"id": each.id, "file_name": each.name, "width": each.width, "height": each.height} for each in kept.entries
    ]
    # The shortest decimals that are the same number in fp32
    boxes = ([*map(float, map(str, row))] for row in load(scratch, part, "boxes"))
    annotations = [
        {"id": number, "image_id": each.image_id, "category_id": kept.categories[each.label - 1][0], "bbox": box}
        for number, (each, box) in enumerate(zip(kept.objects, boxes), 1)
    ]
    listed = [{"id": number, "name": name} for number, name in kept.categories]
    content = {"images": images, "annotations": annotations, "categories": listed}
    (scratch / boxes_file(part)).write_text(json.dumps(content, separators=(",", ":")), encoding="ascii")


# -- manifest -------------------------------------------------------------------------------------------


def _content(
    task: Task, args: argparse.Namespace, kept: Mapping[str, Table], skipped: NameSets, common: int
) -> Content:
    counts, splits, described = _count(task, kept), {}, []
    for part in PARTS:
        texts = (json_file(part), boxes_file(part))
        described += [{**describe_file(task.scratch / name), "name": name} for name in texts]
        sizes = load(task.scratch, part, "bytes")
        files = (*(array_file(part, name) for name in ARRAYS), *texts)
        splits[part] = Split(len(sizes), files, {"unlisted_bytes": int(sizes.sum())})
    errors = {
        part: {
            **{kind: len(names) for kind, names in table.errors.items()},
            REACH_OUT: table.reaching_out,
            "images left out": sorted(skipped[part])[:SHOWN],
            "number of images left out": len(skipped[part]),
        }
        for part, table in kept.items()
    }
    numbers = " + ".join(f"{splits[part].samples:,}" for part in PARTS)
    return Content(
        name=task.name,
        splits=splits,
        summary=f"{numbers} images, {counts['objects in train']:,} + {counts['objects in val']:,} objects",
        classes=[name for _, name in kept["train"].categories],
        facts={"categories": [list(each) for each in kept["train"].categories], "counts": counts},
        how={"flaws": errors, "seed": args.seed, "in_both": common},
        tool={"version": VERSION, "numpy": np.__version__, "pillow": PIL.__version__},
        described=described,
    )
