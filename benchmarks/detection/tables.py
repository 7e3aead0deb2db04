"""Turns a part's JSON file into arrays, in memory that grows with the numbers alone and not with their text."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.workers import Report
from benchmarks.detection import objects, stream
from benchmarks.detection.annotations import array_file
from benchmarks.detection.objects import Object
from benchmarks.detection.sources import AGAIN, Place, opened_text

LISTED = 200
"""Flaws of a kind that are kept by name; more are counted."""
STICKS_OUT = "sticks_out"
"""Counted and kept: boxes that reach out of their image by no more than rounding explains."""


class Entry(NamedTuple):
    """What a JSON file has of one image."""

    id: int
    name: str
    width: int
    height: int


class Header(NamedTuple):
    """All of a JSON file but its annotations."""

    entries: Tuple[Entry, ...]
    """In the order of their ids."""
    categories: Tuple[Tuple[int, str], ...]
    """Ids and names, in the order of the ids."""
    annotations: int


@dataclass(frozen=True)
class Task:
    """A part whose arrays are to be written; crosses to a worker process."""

    part: str
    json: Place
    scratch: Path
    header: Header
    left_out: FrozenSet[str]
    """Names of images that are left out with their objects."""
    drops_flawed: bool
    """Whether an object with a flaw is left out, and not what can be used of it kept."""

    @property
    def done_path(self) -> Path:
        """The file of the facts, which is written last."""
        options = repr((sorted(self.left_out), self.drops_flawed)).encode("utf-8", "surrogateescape")
        return self.scratch / f"{self.part}-arrays-{hashlib.sha256(options).hexdigest()[:16]}.json"

    @property
    def sizes(self) -> Dict[int, Tuple[int, int]]:
        """Width and height by image id."""
        return {entry.id: (entry.width, entry.height) for entry in self.header.entries}

    @property
    def labels(self) -> Dict[int, int]:
        """Labels, 1 to C, by category id."""
        return {number: label for label, (number, _) in enumerate(self.header.categories, 1)}


def read_header(place: Place) -> Header:
    """Read images and categories, and count the annotations.

    Raises:
        Problem: the file is no whole JSON object of COCO's form, or an id comes twice.
    """
    images: List[Entry] = []
    categories: List[Tuple[int, str]] = []
    annotations = 0
    try:
        with opened_text(place) as file:
            for key, value in stream.entries(file):
                if key == "images":
                    name = str(value["file_name"])
                    images.append(Entry(int(value["id"]), name, int(value["width"]), int(value["height"])))
                elif key == "categories":
                    categories.append((int(value["id"]), str(value["name"])))
                elif key == "annotations":
                    annotations += 1
    except (ValueError, KeyError, TypeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else error
        raise Problem(f"{place} cannot be read: {why}", "COCO's JSON of instances", AGAIN) from None
    for key, found in (("images", images), ("categories", categories), ("annotations", annotations)):
        if not found:
            raise Problem(f"{place} has no {key}", "COCO's JSON of instances", AGAIN)
    _refuse_twice(place, "image id", [entry.id for entry in images])
    _refuse_twice(place, "image file", [entry.name for entry in images])
    _refuse_twice(place, "category id", [number for number, _ in categories])
    return Header(tuple(sorted(images)), tuple(sorted(categories)), annotations)


def _refuse_twice(place: Place, what: str, values: Sequence[Any]) -> None:
    seen = set()
    for value in values:
        if value in seen:
            raise Problem(f"{place} has the {what} {value} twice", f"each {what} once", "remove one of them")
        seen.add(value)


class _Columns:
    """The objects of a part in the order of the file, as numbers."""

    def __init__(self) -> None:
        self.keys, self.boxes, self.areas = array("q"), array("f"), array("f")
        self.labels, self.crowds = array("h"), array("b")
        self.polygon_counts, self.point_counts, self.points = array("i"), array("i"), array("f")

    def add(self, position: int, each: Object) -> None:
        """Keep an object of the image at ``position``."""
        self.keys.extend((position, each.number))
        self.boxes.extend(each.box)
        self.areas.append(each.area)
        self.labels.append(each.label)
        self.crowds.append(each.crowd)
        self.polygon_counts.append(len(each.polygons))
        for polygon in each.polygons:
            self.point_counts.append(len(polygon))
            self.points.extend(polygon)


def write_arrays(task: Task, report: Report) -> Tuple[int, int]:
    """Check the annotations of a part and write its objects; a function of worker processes."""
    entries = [entry for entry in task.header.entries if entry.name not in task.left_out]
    columns, facts = _read(task, entries, report)
    positions = np.array(columns.keys, np.int64).reshape(-1, 2)
    order = np.lexsort((positions[:, 1], positions[:, 0]))
    counts = np.bincount(positions[:, 0], minlength=len(entries)) if len(positions) else np.zeros(len(entries), int)
    encoded = [entry.name.encode("utf-8", "surrogateescape") for entry in entries]
    arrays: Dict[str, np.ndarray] = {
        "image_ids": np.array([entry.id for entry in entries], np.int64),
        "files": np.array(encoded, np.bytes_),
        "sizes": np.array([(entry.width, entry.height) for entry in entries], np.int32),
        "offsets": _ends(counts),
        "boxes": np.array(columns.boxes, np.float32).reshape(-1, 4)[order],
        "areas": np.array(columns.areas, np.float32)[order],
        "labels": np.array(columns.labels, np.int16)[order],
        "crowds": np.array(columns.crowds, bool)[order],
    }
    arrays.update(_reordered(columns, order))
    for name, values in arrays.items():
        write_array(task.scratch / array_file(task.part, name), values)
    facts.update(images=len(entries), objects=len(order), with_objects=int(np.count_nonzero(counts)))
    temporary = task.done_path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(facts), encoding="utf-8")
    temporary.replace(task.done_path)
    return task.json.size, task.json.size


def _read(task: Task, entries: Sequence[Entry], report: Report) -> Tuple[_Columns, Dict[str, Any]]:
    """Return the objects of the images, and how many flaws of which kind there are."""
    positions = {entry.id: position for position, entry in enumerate(entries)}
    sizes, labels = task.sizes, task.labels
    columns = _Columns()
    flaws: Dict[str, List[Tuple[int, str]]] = {}
    counts: Dict[str, int] = {}
    sticks_out, farthest, annotated, crowds = 0, 0.0, set(), 0
    numbers = set()
    with opened_text(task.json) as file:
        for key, value in stream.entries(file, lambda characters: report(characters, characters)):
            if key != "annotations":
                continue
            found, wrong = objects.check(value, sizes, labels)
            for flaw in wrong:
                counts[flaw.kind] = counts.get(flaw.kind, 0) + 1
                flaws.setdefault(flaw.kind, [])
                if len(flaws[flaw.kind]) < LISTED:
                    flaws[flaw.kind].append((flaw.number, flaw.what))
            if isinstance(value, dict) and value.get("image_id") in positions:
                annotated.add(value["image_id"])
            if found is None or found.image_id not in positions or (wrong and task.drops_flawed):
                continue
            if found.number in numbers:
                raise _twice(task, found.number)
            numbers.add(found.number)
            columns.add(positions[found.image_id], found)
            crowds += found.crowd
            if found.reaches_out > 0:
                sticks_out, farthest = sticks_out + 1, max(farthest, found.reaches_out)
    facts: Dict[str, Any] = {"flaws": flaws, "flaw_counts": counts, "annotated": len(annotated), "crowds": crowds}
    return columns, {**facts, STICKS_OUT: [sticks_out, round(farthest, 3)]}


def _twice(task: Task, number: int) -> Problem:
    return Problem(f"{task.json} has the annotation id {number} twice", "each id once", "remove one of them")


def _ends(counts: Any) -> np.ndarray:
    """Return where each of some groups begins, and where the last one ends."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def _reordered(columns: _Columns, order: np.ndarray) -> Mapping[str, np.ndarray]:
    """Return the polygons in the order of the objects."""
    polygon_counts = np.array(columns.polygon_counts, np.int64)
    point_counts = np.array(columns.point_counts, np.int64)
    polygons = _gathered(_ends(polygon_counts)[:-1][order], polygon_counts[order])
    first_points = _ends(point_counts)[:-1]
    points = np.frombuffer(columns.points, np.float32)  # no copy: COCO has some 60 million numbers
    chosen = np.empty(len(points), np.float32)
    place = 0
    for polygon in polygons.tolist():
        begin, count = first_points[polygon], point_counts[polygon]
        chosen[place : place + count] = points[begin : begin + count]
        place += count
    return {
        "polygon_offsets": _ends(polygon_counts[order]),
        "point_offsets": _ends(point_counts[polygons]),
        "points": chosen,
    }


def _gathered(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return begin, begin + 1, ... of each group, one group after the other."""
    ends = _ends(counts)
    return np.arange(ends[-1]) - np.repeat(ends[:-1] - begins, counts)
