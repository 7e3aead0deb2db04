"""Writes COCO's images and annotations: read the JSON files, look at every image, write the objects' arrays.

Refused always: JSON files that are not COCO's, categories that differ between the parts, an id that comes twice.
Refused unless ``--skip-flawed`` skips them: images without a file, files without an entry, damaged images, images of
another size than their entry has, and annotations with an error that objects.py names.

Only reported, because published COCO has them: images without objects (1,021 of train2017), boxes that reach out of
their image by a pixel or less, images that are no JPEG but can be read. In COCO 2017 itself, which its counts identify,
the errors of single objects that TOLERATED names are reported too: training skips what cannot be used, and the
evaluation compares with the file as published.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import PIL

from benchmarks.common.data import source_checks
from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.passport import describe_file
from benchmarks.common.data.prepare import Content, Split, check_room
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.progress import Progress
from benchmarks.common.data.workers import Workers
from benchmarks.detection import objects, pictures, scenes, sources, tables
from benchmarks.detection.annotations import PARTS, array_file, boxes_file, images_folder, json_file, load
from benchmarks.detection.preparation import ARRAYS, COCO, PUBLISHED, check_counts
from benchmarks.detection.sources import AGAIN, Source
from benchmarks.detection.tables import REACH_OUT, Table

VERSION = "2"  # raise it when the same source and options give other bytes: unfinished parts are then made again
TOLERATED = (objects.OUTSIDE, objects.NO_AREA, objects.FEW_POINTS)
SHOWN = 5  # errors of one kind that a message names
SKIP = "fix them, or add --skip-flawed to skip them: what is done already is kept"
NameSets = Dict[str, FrozenSet[str]]  # names of images by part


class Listing(NamedTuple):
    """What there is to prepare."""

    source: Optional[Source]  # None for the toy data set, which is not written yet
    fingerprint: str


class Task(NamedTuple):
    """One preparation: from what and how."""

    source: Source
    tables: Dict[str, Table]
    name: str
    skips: bool  # whether images and objects with errors are skipped
    scratch: Path
    processes: int
    progress: Progress

    @property
    def is_published(self) -> bool:
        """Whether it is COCO 2017 itself, whose known errors are no reason to refuse it."""
        return self.name == COCO

    def without(self, skipped: NameSets) -> Dict[str, Table]:
        """Return what is kept of both parts where some images are skipped."""
        drops_wrong = self.skips and not self.is_published
        return {part: table.without(skipped[part], drops_wrong) for part, table in self.tables.items()}


def list_source(args: argparse.Namespace, progress: Progress) -> Listing:
    """Find images and annotations; all that decides what is written goes into the fingerprint."""
    if args.origin is None:
        facts: Any = (VERSION, scenes.NAME, args.name, args.seed, args.scenes)
        return Listing(None, hashlib.sha256(repr(facts).encode()).hexdigest())
    source = sources.find(args.origin)
    facts = (VERSION, args.name, args.seed, args.origin.resolve().name, source.fingerprint)
    return Listing(source, hashlib.sha256(repr(facts).encode()).hexdigest())


def write(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Content:
    """Write images, annotations and arrays."""
    task = _plan(listing, args, scratch, progress)
    missing = _without_file(task)
    kept = task.without(missing)
    _check_objects(task, kept)
    _check_counts(task, kept)
    found = _write_pictures(task, kept)
    damaged = _damaged(task, found)
    skipped = {part: missing[part] | damaged[part] for part in PARTS}
    train, val = ({name: found[part][name][1] for name in found[part] if name not in skipped[part]} for part in PARTS)
    common = source_checks.overlap(val.items(), train.values(), "images", args.allow_overlap, progress)
    kept = task.without(skipped)
    for part in PARTS:
        tables.write_arrays(kept[part], part, scratch)
        _write_image_facts(scratch, part, [found[part][entry.name] for entry in kept[part].entries])
        _write_json(task, part, kept[part])
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
        found = f"train and val have different categories: {_some(different)}"
        hint = f"give {source.annotations['train']} and {source.annotations['val']} one list of categories"
        raise Problem(found, "the same ids and names in both JSON files", hint)
    if name is None:
        is_coco = all(len(read[part].entries) == PUBLISHED[f"images in {part}"] for part in PARTS)
        name = COCO if is_coco and not args.skip_flawed else args.origin.resolve().name
        name = f"{name}-own" if name == COCO and not is_coco else name
    return Task(source, read, name, args.skip_flawed, scratch, args.workers, progress)


# -- errors ---------------------------------------------------------------------------------------------


def _without_file(task: Task) -> NameSets:
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
            raise Problem(f"{container} has none of the images of {table.json}", "all of them", AGAIN)
    return missing


def _check_objects(task: Task, kept: Mapping[str, Table]) -> None:
    lines: List[str] = []
    for part, table in kept.items():
        for kind, errors in sorted(table.errors.items()):
            line = _line(f"{part}: {kind}", errors)
            if task.is_published and kind in TOLERATED:
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


def _damaged(task: Task, found: Mapping[str, Mapping[str, Any]]) -> NameSets:
    damaged = {part: {name: why for name, why in found[part].items() if isinstance(why, str)} for part in PARTS}
    errors = {part: [f"{name}: {why}" for name, why in damaged[part].items()] for part in PARTS}
    lines = [line for part in PARTS for line in _line(f"{part}: images with errors", errors[part])]
    _refuse(task, lines, "images that can be decoded, of the size that their entries have")
    return {part: frozenset(damaged[part]) for part in PARTS}


def _refuse(task: Task, lines: Sequence[str], expected: str) -> None:
    if lines and not task.skips:
        raise Problem("\n    ".join(lines), expected, SKIP, keeps=True)
    for line in lines:
        task.progress.note(f"skipped: {line}")


def _line(what: str, names: Sequence[str]) -> List[str]:
    return [f"{len(names):,} {what}: {_some(names)}"] if names else []


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return "; ".join(names[:SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def _check_counts(task: Task, kept: Mapping[str, Table]) -> Dict[str, int]:
    # The counts that the passport states, by the names of PUBLISHED, which COCO itself must have
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


def _write_pictures(task: Task, kept: Mapping[str, Table]) -> Dict[str, Dict[str, Any]]:
    every: Dict[str, List[pictures.Pictures]] = {}
    for part, table in kept.items():
        folder = images_folder(part)
        (task.scratch / folder).mkdir(exist_ok=True)
        every[part] = pictures.plan(part, task.source.images[part], table.entries, task.scratch, folder)
    both = [each for part in PARTS for each in every[part]]
    waiting = [each for each in both if not each.done_path.exists()]
    needed = sum(sum(each.images.sizes.values()) for each in waiting if not _can_link(each, task.scratch))
    check_room(task.scratch.parent, needed)
    pool = Workers(task.processes, task.scratch.parent, task.progress)
    pool.run("images", "images", pictures.write_pictures, both, lambda each: len(each.entries))
    facts = {part: [json.loads(each.done_path.read_text(encoding="utf-8")) for each in every[part]] for part in PARTS}
    return {part: {name: each[name] for each in facts[part] for name in each} for part in PARTS}


def _can_link(task: pictures.Pictures, scratch: Path) -> bool:
    container = Path(task.images.container)
    return not task.images.is_zip and container.stat().st_dev == scratch.stat().st_dev


def _write_image_facts(scratch: Path, part: str, facts: Sequence[Tuple[int, str]]) -> None:
    write_array(scratch / array_file(part, "bytes"), np.array([size for size, _ in facts], np.int64))
    digests = np.frombuffer(b"".join(bytes.fromhex(digest) for _, digest in facts), np.uint8).reshape(-1, 32)
    write_array(scratch / array_file(part, "checksums"), digests)


# -- JSON files -----------------------------------------------------------------------------------------


def _write_json(task: Task, part: str, kept: Table) -> None:
    place, path = kept.json, task.scratch / json_file(part)
    path.parent.mkdir(exist_ok=True)
    path.unlink() if path.exists() else None
    drops_wrong = task.skips and not task.is_published and bool(kept.errors)
    if drops_wrong or len(kept.entries) < len(task.tables[part].entries):
        content, images = tables.load(place), {entry.id for entry in kept.entries}
        content["images"] = [each for each in content["images"] if int(each["id"]) in images]
        # By their places: an annotation that cannot be used may have the id of one that can.
        content["annotations"] = [
            content["annotations"][place] for place in sorted(each.place for each in kept.objects)
        ]
        path.write_text(json.dumps(content), encoding="utf-8")
    elif place.member:
        with sources.opened(Path(place.path)) as archive, archive.open(place.member) as member, path.open("wb") as file:
            shutil.copyfileobj(member, file)
    else:
        try:
            os.link(os.path.realpath(place.path), path)
        except OSError:
            shutil.copyfile(place.path, path)


def _write_boxes(scratch: Path, part: str, kept: Table) -> None:
    # Write images and boxes alone, which are a seventh of COCO's file, as v0.7's prepare-json.py does
    images = [
        {"id": each.id, "file_name": each.name, "width": each.width, "height": each.height} for each in kept.entries
    ]
    annotations = [
        {"id": number, "image_id": each.image_id, "category_id": kept.categories[each.label - 1][0], "bbox": box}
        # The shortest decimals that are the same number in fp32.
        for number, (each, box) in enumerate(
            zip(kept.objects, ([*map(float, map(str, row))] for row in load(scratch, part, "boxes"))), 1
        )
    ]
    listed = [{"id": number, "name": name} for number, name in kept.categories]
    content = {"images": images, "annotations": annotations, "categories": listed}
    (scratch / boxes_file(part)).write_text(json.dumps(content, separators=(",", ":")), encoding="ascii")


# -- passport -------------------------------------------------------------------------------------------


def _content(
    task: Task, args: argparse.Namespace, kept: Mapping[str, Table], skipped: NameSets, common: int
) -> Content:
    counts, splits, described = _check_counts(task, kept), {}, []
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
