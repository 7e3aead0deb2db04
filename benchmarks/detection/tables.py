"""A part's JSON file as COCO publishes it, each annotation checked, and its objects as arrays.

The file is parsed whole, as pycocotools does: instances_train2017.json, 450 MB, takes some GB for half a minute. What
stays are the objects, whose polygons are arrays.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.text_files import load_json
from benchmarks.detection.annotations import array_file
from benchmarks.detection.sources import AGAIN, Place, content

# Kinds of errors of an annotation
OUTSIDE = "box outside its image"
NO_AREA = "box without area"
NO_IMAGE = "annotation of an image without entry"
NO_CATEGORY = "unknown category"
NO_OUTLINE = "empty annotation"
FEW_POINTS = "polygon of less than three points"
BAD_POLYGON = "polygon that is no list of x, y pairs"
BAD_RLE = "RLE that does not fit its image"
RLE_INSTANCE = "RLE mask with iscrowd=0 (training needs polygons: convert it)"
INCOMPLETE = "incomplete annotation"

REACH_OUT = "boxes that reach out by rounding, and by how many pixels"
MAX_COORDINATE = 1 << 16  # pixels; pycocotools rasterizes a polygon point by point, also outside of the image
ROUNDING = 1.0  # pixels that a box may reach out of its image: published boxes are rounded, and look like drawn ones


class Entry(NamedTuple):
    id: int
    name: str
    width: int
    height: int


class Object(NamedTuple):
    """One object, in pixels."""

    image_id: int
    number: int  # id of the annotation
    label: int
    box: Tuple[float, ...]  # x, y, width, height
    area: float
    crowd: bool
    polygons: List[np.ndarray]  # float32 (2 * points,) each; none where the segmentation is an RLE
    reaches_out: float  # pixels by which the box reaches out of its image
    is_flawed: bool  # whether something of it is wrong
    place: int = 0  # in the file's list of annotations


class Table(NamedTuple):
    """The content of one JSON file."""

    json: Place
    entries: Tuple[Entry, ...]  # in the order of their ids
    categories: Tuple[Tuple[int, str], ...]  # ids and names, in the order of the ids
    objects: List[Object]  # that can be used, in the order of their images and ids
    errors: Dict[str, List[str]]  # annotations with an error, by its kind
    annotated: FrozenSet[int]  # ids of images with an annotation

    def without(self, names: FrozenSet[str], drops_flawed: bool) -> Table:
        """Return the table without some images and, if ``drops_flawed``, without objects that have an error."""
        entries = tuple(entry for entry in self.entries if entry.name not in names)
        ids = frozenset(entry.id for entry in entries)
        kept = [each for each in self.objects if each.image_id in ids and not (drops_flawed and each.is_flawed)]
        _refuse_twice(self.json, "annotation id", [each.number for each in kept])
        return self._replace(entries=entries, objects=kept, annotated=self.annotated & ids)

    @property
    def reaching_out(self) -> List[float]:
        """Number of boxes that reach out of their image by no more than rounding explains, and pixels at most."""
        out = [each.reaches_out for each in self.objects if each.reaches_out > 0]
        return [len(out), round(max(out, default=0.0), 3)]


def load(place: Place) -> Dict[str, Any]:
    """Return a JSON file's content; Problem if it is no whole JSON object."""
    try:
        found = load_json(content(place), str(place))
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__} where an object is expected")
    except ValueError as error:
        raise Problem(f"{place} cannot be read: {error}", "COCO's JSON of instances", AGAIN) from None
    return found


def read(place: Place) -> Table:
    """Read and check a JSON file.

    Raises:
        Problem: the file is no whole JSON object of COCO's form, or an id of an image or category comes twice.
    """
    whole, keys = load(place), ("images", "categories", "annotations")
    try:
        images, kinds, annotations = (list(whole.get(key, ())) for key in keys)
        entries = [
            Entry(_integer(each, "id"), _text(each, "file_name"), _integer(each, "width"), _integer(each, "height"))
            for each in images
        ]
        categories = [(_integer(each, "id"), _text(each, "name")) for each in kinds]
    except (ValueError, KeyError, TypeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else error
        raise Problem(f"{place} cannot be read: {why}", "COCO's JSON of instances", AGAIN) from None
    for key in keys:
        if not whole.get(key):
            raise Problem(f"{place} has no {key}", "COCO's JSON of instances", AGAIN)
    _refuse_twice(place, "image id", [entry.id for entry in entries])
    _refuse_twice(place, "image file", [entry.name for entry in entries])
    _refuse_twice(place, "category id", [number for number, _ in categories])
    sizes = {entry.id: (entry.width, entry.height) for entry in entries}
    labels = {number: label for label, (number, _) in enumerate(sorted(categories), 1)}
    usable: List[Object] = []
    errors: Dict[str, List[str]] = {}
    for number, each in enumerate(annotations):
        found, wrong = check(each, sizes, labels)
        if found is not None:
            usable.append(found._replace(place=number))
        for kind, text in wrong.items():
            errors.setdefault(kind, []).append(text)
    usable.sort(key=lambda each: each[:2])
    images_of = (each.get("image_id") for each in annotations if isinstance(each, dict))
    annotated = frozenset(each for each in images_of if isinstance(each, int))
    return Table(place, tuple(sorted(entries)), tuple(sorted(categories)), usable, errors, annotated)


def _integer(entry: Mapping[str, Any], key: str) -> int:
    # pycocotools compares ids as they are: 1 is not "1"
    if type(entry[key]) is not int or entry[key].bit_length() > 63:
        raise TypeError(f"{key} is {entry[key]!r}, not a 64-bit integer")
    return int(entry[key])


def _text(entry: Mapping[str, Any], key: str) -> str:
    if not isinstance(entry[key], str):
        raise TypeError(f"{key} is {entry[key]!r}, not a string")
    entry[key].encode()  # UnicodeEncodeError, a ValueError, for an unpaired surrogate
    return str(entry[key])


def _number(value: Any, key: str) -> float:
    if type(value) not in (int, float) or not abs(value) < float("inf"):
        raise TypeError(f"{key} has {value!r}, not a finite number")
    return float(value)


def _refuse_twice(place: Place, what: str, values: List[Any]) -> None:
    ((value, count),) = Counter(values).most_common(1) or [(None, 0)]
    if count > 1:
        raise Problem(f"{place} has the {what} {value} twice", f"each {what} once", "remove one of them")


# -- one annotation ---------------------------------------------------------------------------------------


def check(
    annotation: Any, sizes: Mapping[int, Tuple[int, int]], labels: Mapping[int, int]
) -> Tuple[Optional[Object], Dict[str, str]]:
    """Return the object of an annotation, None where nothing of it can be used, and what is wrong by kind of error.

    ``sizes`` are width and height by image id, ``labels`` 1 to C by category id.
    """
    name = f"annotation {annotation.get('id', '?') if isinstance(annotation, dict) else '?'}"
    try:
        number, image, category = (_integer(annotation, key) for key in ("id", "image_id", "category_id"))
        box = tuple(_number(value, "bbox") for value in annotation["bbox"])
        area, is_crowd = _number(annotation["area"], "area"), annotation["iscrowd"]
        segmentation = annotation["segmentation"]
        if len(box) != 4:
            raise ValueError("bbox must be x, y, width and height")
        if is_crowd not in (0, 1):
            raise ValueError(f"iscrowd must be 0 or 1 (got {is_crowd!r})")
    except KeyError as error:
        return None, {INCOMPLETE: f"{name} has no {error.args[0]}"}
    except (TypeError, ValueError, OverflowError) as error:
        return None, {INCOMPLETE: f"{name}: {error}"}
    if image not in sizes:
        return None, {NO_IMAGE: f"{name}, image {image}"}
    (x, y, width, height), (columns, rows) = box, sizes[image]
    shown = f"{name}, [{', '.join(f'{value:g}' for value in box)}]"
    out = max(-x, -y, x + width - columns, y + height - rows, 0.0)
    polygons, wrong = _outline(segmentation, bool(is_crowd), columns, rows)
    errors = {}
    if category not in labels:
        errors[NO_CATEGORY] = f"{name}, category {category}"
    if min(width, height) <= 0:
        errors[NO_AREA] = shown
    elif out > ROUNDING:
        errors[OUTSIDE] = f"{shown} in an image of {columns} x {rows}"
    if wrong:
        errors[wrong] = f"{name} of image {image}"
    inside = x < columns and y < rows and x + width > 0 and y + height > 0
    if NO_CATEGORY in errors or NO_AREA in errors or not inside or not segmentation:
        return None, errors
    return Object(image, number, labels[category], box, area, bool(is_crowd), polygons, out, bool(errors)), errors


def _outline(segmentation: Any, is_crowd: bool, columns: int, rows: int) -> Tuple[List[np.ndarray], str]:
    # The usable polygons of a segmentation and the kind of its first error, empty without one
    if not segmentation:
        return [], NO_OUTLINE
    if isinstance(segmentation, dict):
        if not _fits(segmentation, columns, rows):
            return [], BAD_RLE
        return [], "" if is_crowd else RLE_INSTANCE
    if not isinstance(segmentation, list):
        return [], BAD_POLYGON
    errors = [_polygon_error(polygon) for polygon in segmentation]
    kept = [np.array(polygon, np.float32) for polygon, error in zip(segmentation, errors) if not error]
    return kept, next(filter(None, errors), "")


def _polygon_error(polygon: Any) -> str:
    is_list = isinstance(polygon, list) and len(polygon) % 2 == 0
    # False for NaN as well
    if not is_list or not all(type(value) in (int, float) and abs(value) < MAX_COORDINATE for value in polygon):
        return BAD_POLYGON
    return FEW_POINTS if len(polygon) < 6 else ""  # pycocotools takes four numbers for a box


def _fits(rle: Mapping[str, Any], columns: int, rows: int) -> bool:
    # pycocotools writes beyond the end of the mask if the counts exceed the size
    size, counts = rle.get("size"), rle.get("counts")
    if size != [rows, columns] or not all(type(side) is int for side in size):
        return False
    if isinstance(counts, str):
        counts = _uncompressed(counts)
    if not isinstance(counts, list) or not all(type(count) is int and count >= 0 for count in counts):
        return False
    return sum(counts) == columns * rows


def _uncompressed(text: str) -> List[int]:
    # Six bits per character, the sixth for "continued"; from the fourth on, differences from the count before the last
    # (rleFrString in pycocotools' maskApi.c). An invalid text gives a negative count.
    counts: List[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64:
            return [-1]
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (1 << shift) if bits & 16 else 0
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    return counts if not shift else [-1]


# -- arrays -----------------------------------------------------------------------------------------------


def write_arrays(table: Table, part: str, scratch: Path) -> None:
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
