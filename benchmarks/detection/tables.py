"""A part's JSON file as COCO publishes it, checked, and its objects as arrays.

The file is parsed whole, as pycocotools does: instances_train2017.json, 450 MB, takes some GB for half a minute. What
stays are the objects, whose polygons are arrays.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any, Dict, FrozenSet, Iterable, List, NamedTuple, Tuple

import numpy as np

from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.problem import Problem
from benchmarks.detection import objects
from benchmarks.detection.annotations import array_file
from benchmarks.detection.objects import Object
from benchmarks.detection.sources import AGAIN, Place, opened_text

REACH_OUT = "boxes that reach out by rounding, and by how many pixels"


class Entry(NamedTuple):
    """What a JSON file has of one image."""

    id: int
    name: str
    width: int
    height: int


class Table(NamedTuple):
    """The content of one JSON file."""

    json: Place
    entries: Tuple[Entry, ...]  # in the order of their ids
    categories: Tuple[Tuple[int, str], ...]  # ids and names, in the order of the ids
    objects: List[Object]  # that can be used, in the order of their images and ids
    errors: Dict[str, List[str]]  # annotations with an error, by its kind
    wrong: FrozenSet[int]  # ids of objects with an error
    annotated: FrozenSet[int]  # ids of images with an annotation

    def without(self, names: FrozenSet[str], drops_wrong: bool) -> Table:
        """Return the table without some images and, if ``drops_wrong``, without objects that have an error."""
        entries = tuple(entry for entry in self.entries if entry.name not in names)
        ids = frozenset(entry.id for entry in entries)
        wrong = self.wrong if drops_wrong else frozenset()
        kept = [each for each in self.objects if each.image_id in ids and each.number not in wrong]
        _refuse_twice(self.json, "annotation id", [each.number for each in kept])
        return self._replace(entries=entries, objects=kept, annotated=self.annotated & ids)

    @property
    def reaching_out(self) -> List[float]:
        """Number of boxes that reach out of their image by no more than rounding explains, and pixels at most."""
        out = [each.reaches_out for each in self.objects if each.reaches_out > 0]
        return [len(out), round(max(out, default=0.0), 3)]


def load(place: Place) -> Dict[str, Any]:
    """Return a JSON file's content.

    Raises:
        Problem: it is no whole JSON object.
    """
    try:
        with opened_text(place) as file:
            content = json.load(file)
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__} where an object is expected")
    except ValueError as error:
        raise Problem(f"{place} cannot be read: {error}", "COCO's JSON of instances", AGAIN) from None
    return content


def read(place: Place) -> Table:
    """Read and check a JSON file.

    Raises:
        Problem: the file is no whole JSON object of COCO's form, or an id of an image or category comes twice.
    """
    content = load(place)
    try:
        images, kinds, annotations = (list(content.get(key, ())) for key in ("images", "categories", "annotations"))
        entries = [
            Entry(int(each["id"]), str(each["file_name"]), int(each["width"]), int(each["height"])) for each in images
        ]
        categories = [(int(each["id"]), str(each["name"])) for each in kinds]
    except (ValueError, KeyError, TypeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else error
        raise Problem(f"{place} cannot be read: {why}", "COCO's JSON of instances", AGAIN) from None
    for key in ("images", "categories", "annotations"):
        if not content.get(key):
            raise Problem(f"{place} has no {key}", "COCO's JSON of instances", AGAIN)
    _refuse_twice(place, "image id", [entry.id for entry in entries])
    _refuse_twice(place, "image file", [entry.name for entry in entries])
    _refuse_twice(place, "category id", [number for number, _ in categories])
    sizes = {entry.id: (entry.width, entry.height) for entry in entries}
    labels = {number: label for label, (number, _) in enumerate(sorted(categories), 1)}
    checked = [objects.check(each, sizes, labels) for each in annotations]
    errors: Dict[str, List[str]] = {}
    for kind, text in chain.from_iterable(found.items() for _, found in checked):
        errors.setdefault(kind, []).append(text)
    placed = (found._replace(place=place) for place, (found, _) in enumerate(checked) if found is not None)
    usable = sorted(placed, key=lambda each: each[:2])
    wrong = frozenset(found.number for found, its in checked if found is not None and its)
    images_of = (each.get("image_id") for each in annotations if isinstance(each, dict))
    annotated = frozenset(each for each in images_of if isinstance(each, int))
    return Table(place, tuple(sorted(entries)), tuple(sorted(categories)), usable, errors, wrong, annotated)


def _refuse_twice(place: Place, what: str, values: List[Any]) -> None:
    ((value, count),) = Counter(values).most_common(1) or [(None, 0)]
    if count > 1:
        raise Problem(f"{place} has the {what} {value} twice", f"each {what} once", "remove one of them")


def write_arrays(table: Table, part: str, scratch: Path) -> None:
    """Write a part's images and objects."""
    found = table.objects
    polygons = [polygon for each in found for polygon in each.polygons]
    owners = np.searchsorted([entry.id for entry in table.entries], [each.image_id for each in found])
    encoded = [entry.name.encode("utf-8", "surrogateescape") for entry in table.entries]
    arrays: Dict[str, np.ndarray] = {
        "image_ids": np.array([entry.id for entry in table.entries], np.int64),
        "files": np.array(encoded, np.bytes_),
        "sizes": np.array([(entry.width, entry.height) for entry in table.entries], np.int32),
        "offsets": _ends(np.bincount(owners, minlength=len(table.entries))),
        "boxes": np.array([each.box for each in found], np.float32),
        "areas": np.array([each.area for each in found], np.float32),
        "labels": np.array([each.label for each in found], np.int16),
        "crowds": np.array([each.crowd for each in found], bool),
        "polygon_offsets": _ends(len(each.polygons) for each in found),
        "point_offsets": _ends(map(len, polygons)),
        "points": np.concatenate([np.zeros(0, np.float32), *polygons]),
    }
    for name, values in arrays.items():
        write_array(scratch / array_file(part, name), values)


def _ends(counts: Iterable[int]) -> np.ndarray:
    # Where each of some groups begins, and where the last one ends
    return np.cumsum([0, *counts], dtype=np.int64)
