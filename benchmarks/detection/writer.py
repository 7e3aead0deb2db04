"""Writes COCO's images and annotations: read the JSON files, write the objects' arrays, look at every image."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import PIL

from benchmarks.common.data import source_checks, workers
from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.passport import describe_file
from benchmarks.common.data.prepare import Content, Split, check_room
from benchmarks.common.data.progress import Progress
from benchmarks.detection import flaws, objects, pictures, scenes, sources, stream, tables
from benchmarks.detection.annotations import PARTS, Names, array_file, boxes_file, images_folder, json_file, load
from benchmarks.detection.preparation import ARRAYS, COCO, PUBLISHED, check_counts
from benchmarks.detection.sources import Source
from benchmarks.detection.tables import Header

VERSION = "2"
"""Raise it when the same source and options give other bytes: unfinished parts are then made again."""


class Listing(NamedTuple):
    """What there is to prepare."""

    source: Optional[Source]
    """None for the small set, which is not written yet."""
    fingerprint: str


class Task(NamedTuple):
    """One preparation: from what and how."""

    source: Source
    headers: Mapping[str, Header]
    name: str
    skips: bool
    """Whether images and objects with flaws are left out."""
    scratch: Path
    processes: int
    progress: Progress

    @property
    def is_published(self) -> bool:
        """Whether it is COCO 2017 itself, whose known flaws are no reason to refuse it."""
        return self.name == COCO

    def run(self, stage: workers.Stage, every: Sequence[Any]) -> None:
        """Let the worker processes do what is not done yet."""
        waiting = [each for each in every if not each.done_path.exists()]
        workers.run(stage, every, waiting, self.processes, self.scratch.parent, self.progress)


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
    missing = flaws.judge_names(task.source, task.headers, task.skips, progress)
    arrays = _write_arrays(task, missing)
    flaws.judge_objects(arrays, task.is_published, task.skips, progress)
    _check_counts(task, arrays)
    found = _write_pictures(task, missing)
    damaged = flaws.judge_pictures(found, task.skips, progress)
    left_out = {part: missing[part] | damaged[part] for part in PARTS}
    train, val = ({name: found[part][name][1] for name in found[part] if name not in left_out[part]} for part in PARTS)
    common = source_checks.overlap(val.items(), train.values(), "images", args.allow_overlap, progress)
    if left_out != missing:
        arrays = _write_arrays(task, left_out)
    for part in PARTS:
        _write_image_facts(task, part, found[part], left_out[part])
        _write_json(task, part, left_out[part], has_flaws=bool(arrays[part]["flaw_counts"]))
        _write_boxes(task, part)
    return _content(task, args, arrays, left_out, _check_counts(task, arrays), common)


def _plan(listing: Listing, args: argparse.Namespace, scratch: Path, progress: Progress) -> Task:
    source, name = listing.source, args.name
    if source is None:
        raw = scratch / scenes.NAME
        scenes.write_scenes(raw, args.seed, args.scenes)  # written anew after an interruption, they are the same
        source, name = sources.find(raw), name or scenes.NAME
    headers = {part: tables.read_header(source.annotations[part]) for part in PARTS}
    flaws.judge_headers(source, headers)
    if name is None:
        is_coco = all(len(headers[part].entries) == PUBLISHED[f"images in {part}"] for part in PARTS)
        name = COCO if is_coco and not args.skip_flawed else args.origin.resolve().name
        name = f"{name}-own" if name == COCO and not is_coco else name
    return Task(source, headers, name, args.skip_flawed, scratch, args.workers, progress)


def _check_counts(task: Task, arrays: Mapping[str, Mapping[str, Any]]) -> Dict[str, int]:
    counts = flaws.count(task.headers, arrays)
    for problem in check_counts(task.name, counts):
        raise problem
    return counts


# -- arrays ---------------------------------------------------------------------------------------------


def _write_arrays(task: Task, left_out: Mapping[str, FrozenSet[str]]) -> Dict[str, Dict[str, Any]]:
    """Write the objects of both parts and return their facts."""
    every = {part: _table(task, part, left_out[part]) for part in PARTS}
    stage = workers.Stage("annotations", "bytes", tables.write_arrays, lambda each: each.json.size)
    task.run(stage, list(every.values()))
    return {part: json.loads(each.done_path.read_text(encoding="utf-8")) for part, each in every.items()}


def _table(task: Task, part: str, left_out: FrozenSet[str]) -> tables.Task:
    drops = task.skips and not task.is_published
    return tables.Task(part, task.source.annotations[part], task.scratch, task.headers[part], left_out, drops)


def _write_image_facts(task: Task, part: str, found: Mapping[str, Any], left_out: FrozenSet[str]) -> None:
    kept = [found[entry.name] for entry in task.headers[part].entries if entry.name not in left_out]
    write_array(task.scratch / array_file(part, "bytes"), np.array([size for size, _ in kept], np.int64))
    digests = np.frombuffer(b"".join(bytes.fromhex(digest) for _, digest in kept), np.uint8).reshape(-1, 32)
    write_array(task.scratch / array_file(part, "checksums"), digests)


# -- images ---------------------------------------------------------------------------------------------


def _write_pictures(task: Task, missing: Mapping[str, FrozenSet[str]]) -> Dict[str, Dict[str, Any]]:
    """Put the images into the data folder; return, by part and name, bytes and sha256 or what is wrong."""
    every: Dict[str, List[pictures.Pictures]] = {}
    for part in PARTS:
        folder = images_folder(part)
        (task.scratch / folder).mkdir(exist_ok=True)
        present = [entry for entry in task.headers[part].entries if entry.name not in missing[part]]
        every[part] = pictures.plan(part, task.source.images[part], present, task.scratch, folder)
    both = [each for part in PARTS for each in every[part]]
    waiting = [each for each in both if not each.done_path.exists()]
    needed = sum(sum(each.images.sizes.values()) for each in waiting if not _can_link(each, task.scratch))
    check_room(task.scratch.parent, needed)
    task.run(workers.Stage("images", "images", pictures.write_pictures, lambda each: len(each.entries)), both)
    return {
        part: {
            name: facts
            for each in every[part]
            for name, facts in json.loads(each.done_path.read_text(encoding="utf-8")).items()
        }
        for part in PARTS
    }


def _can_link(task: pictures.Pictures, scratch: Path) -> bool:
    container = Path(task.images.container)
    return not task.images.is_zip and container.stat().st_dev == scratch.stat().st_dev


# -- JSON files -----------------------------------------------------------------------------------------


def _write_json(task: Task, part: str, left_out: FrozenSet[str], has_flaws: bool) -> None:
    """Place a part's annotations as they are, or without what was left out."""
    place, path = task.source.annotations[part], task.scratch / json_file(part)
    path.parent.mkdir(exist_ok=True)
    path.unlink() if path.exists() else None
    table = _table(task, part, left_out)
    if left_out or (has_flaws and table.drops_flawed):
        path.write_text(json.dumps(_filtered(table)), encoding="utf-8")
        return
    if not place.member:
        with suppress(OSError):
            os.link(os.path.realpath(place.path), path)
            return
        shutil.copyfile(place.path, path)
        return
    with sources.opened(Path(place.path)) as archive, archive.open(place.member) as member, path.open("wb") as file:
        shutil.copyfileobj(member, file)


def _write_boxes(task: Task, part: str) -> None:
    """Write images and boxes alone, which are a seventh of COCO's file, as v0.7's prepare-json.py does."""
    ids, sizes, offsets, boxes, labels = (
        load(task.scratch, part, name) for name in ("image_ids", "sizes", "offsets", "boxes", "labels")
    )
    categories = task.headers["train"].categories
    images = [
        {"id": number, "file_name": name, "width": width, "height": height}
        for number, name, (width, height) in zip(ids.tolist(), Names(load(task.scratch, part, "files")), sizes.tolist())
    ]
    owners = np.repeat(np.asarray(ids), np.diff(offsets)).tolist()
    annotations = [
        # The shortest decimals that are the same number in fp32.
        {"id": number, "image_id": owner, "category_id": categories[label - 1][0], "bbox": [*map(float, map(str, box))]}
        for number, (owner, label, box) in enumerate(zip(owners, labels.tolist(), np.asarray(boxes)), 1)
    ]
    listed = [{"id": number, "name": name} for number, name in categories]
    content = {"images": images, "annotations": annotations, "categories": listed}
    path = task.scratch / boxes_file(part)
    path.write_text(json.dumps(content, separators=(",", ":")), encoding="ascii")


def _filtered(table: tables.Task) -> Dict[str, Any]:
    """Return the content of a JSON file without the images and objects that are left out."""
    content: Dict[str, Any] = {"images": [], "annotations": []}
    kept = {entry.id for entry in table.header.entries if entry.name not in table.left_out}
    sizes, labels = table.sizes, table.labels
    with sources.opened_text(table.json) as file:
        for key, value in stream.entries(file):
            if key == "images" and int(value["id"]) not in kept:
                continue
            if key == "annotations":
                found, wrong = objects.check(value, sizes, labels)
                if found is None or wrong or found.image_id not in kept:
                    continue
            if key in ("images", "annotations", "categories", "licenses"):
                content.setdefault(key, []).append(value)
            else:
                content[key] = value
    return content


# -- passport -------------------------------------------------------------------------------------------


def _content(
    task: Task,
    args: argparse.Namespace,
    arrays: Mapping[str, Mapping[str, Any]],
    left_out: Mapping[str, FrozenSet[str]],
    counts: Mapping[str, int],
    common: int,
) -> Content:
    splits: Dict[str, Split] = {}
    described = []
    for part in PARTS:
        texts = (json_file(part), boxes_file(part))
        described += [{**describe_file(task.scratch / name), "name": name} for name in texts]
        sizes = np.load(str(task.scratch / array_file(part, "bytes")))
        files = (*(array_file(part, name) for name in ARRAYS), *texts)
        splits[part] = Split(len(sizes), files, {"unlisted_bytes": int(sizes.sum())})
    categories: Tuple[Tuple[int, str], ...] = task.headers["train"].categories
    numbers = " + ".join(f"{splits[part].samples:,}" for part in PARTS)
    return Content(
        name=task.name,
        splits=splits,
        summary=f"{numbers} images, {counts['objects in train']:,} + {counts['objects in val']:,} objects",
        classes=[name for _, name in categories],
        facts={"categories": [list(each) for each in categories], "counts": dict(counts)},
        how={"flaws": flaws.summary(arrays, left_out), "seed": args.seed, "in_both": common},
        tool={"version": VERSION, "numpy": np.__version__, "pillow": PIL.__version__},
        described=described,
    )
