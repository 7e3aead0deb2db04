"""COCO's JSON file for a part: checks for all annotations, and conversion to arrays.

The file is parsed completely, like in pycocotools: instances_train2017.json (450 MB) needs some GB for half a
minute. Only the objects are kept, with polygons as arrays.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from benchmarks.common.data.arrays import write_array
from benchmarks.common.data.problem import Problem
from benchmarks.common.data.text_files import load_json
from benchmarks.detection.layout import array_file
from benchmarks.detection.sources import AGAIN, SourceFile, read_content

# Errors of annotations
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

OUTSIDE_BY_ROUNDING = "boxes that reach out by rounding, and by how many pixels"
MAX_COORDINATE = 1 << 16  # pixels; pycocotools rasterizes a polygon point by point, also outside of the image
MIN_SIDE = 1e-3  # pixels; in fp32 a smaller box may have no area, and SSD's target is the logarithm of its size
MAX_AREA = 1e10  # COCOeval's limit, above which it does not count an object
ROUNDING = 1.0  # pixels that a box may extend beyond the image: published boxes are rounded


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
    polygons: List[np.ndarray]  # float32 (2 * points,); empty for an RLE
    overhang: float  # pixels that the box extends beyond the image
    is_flawed: bool  # whether something of it is wrong
    entry: int = 0  # Position in the list of annotations of the file


class Table(NamedTuple):
    """JSON file content."""

    json: SourceFile
    entries: Tuple[Entry, ...]  # in ascending order of ids
    categories: Tuple[Tuple[int, str], ...]  # ids and names, in the order of the ids
    objects: List[Object]  # usable objects, in ascending order of image id and id
    errors: Dict[str, List[str]]  # annotations with an error, by error
    annotated: FrozenSet[int]  # ids of images with an annotation

    def without(self, names: FrozenSet[str], drops_flawed: bool) -> Table:
        """Return the table without some images and, if ``drops_flawed``, without objects that have an error."""
        entries = tuple(entry for entry in self.entries if entry.name not in names)
        ids = frozenset(entry.id for entry in entries)
        objects = [item for item in self.objects if item.image_id in ids and not (drops_flawed and item.is_flawed)]
        _reject_duplicates(self.json, "annotation id", [item.number for item in objects])
        return self._replace(entries=entries, objects=objects, annotated=self.annotated & ids)

    @property
    def boxes_outside(self) -> List[float]:
        """Number of boxes that extend beyond the image within the rounding tolerance, and the maximum in pixels."""
        out = [item.overhang for item in self.objects if item.overhang > 0]
        return [len(out), round(max(out, default=0.0), 3)]


def load(file: SourceFile) -> Dict[str, Any]:
    """Return the JSON object in a file; raises Problem if the JSON is incomplete or not an object."""
    try:
        document = load_json(read_content(file), str(file))
        if not isinstance(document, dict):
            raise ValueError(f"a {type(document).__name__} where an object is expected")
    except ValueError as error:
        raise Problem(f"{file} cannot be read: {error}", "COCO's JSON of instances", AGAIN) from None
    return document


def read(file: SourceFile) -> Table:
    """Read and check a JSON file.

    Raises:
        Problem: the file is not a complete JSON object in COCO's format, or has a duplicate image or category id.
    """
    document, keys = load(file), ("images", "categories", "annotations")
    try:
        images, kinds, annotations = (list(document.get(key, ())) for key in keys)
        entries = [
            Entry(
                _integer(record, "id"),
                _text(record, "file_name"),
                _integer(record, "width"),
                _integer(record, "height"),
            )
            for record in images
        ]
        categories = [(_integer(record, "id"), _text(record, "name")) for record in kinds]
    except (ValueError, KeyError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise Problem(f"{file} cannot be read: {reason}", "COCO's JSON of instances", AGAIN) from None
    for key in keys:
        if not document.get(key):
            raise Problem(f"{file} has no {key}", "COCO's JSON of instances", AGAIN)
    _reject_duplicates(file, "image id", [entry.id for entry in entries])
    _reject_duplicates(file, "image file", [entry.name for entry in entries])
    _reject_duplicates(file, "category id", [number for number, _ in categories])
    sizes = {entry.id: (entry.width, entry.height) for entry in entries}
    labels = {number: label for label, (number, _) in enumerate(sorted(categories), 1)}
    usable: List[Object] = []
    errors: Dict[str, List[str]] = {}
    for number, record in enumerate(annotations):
        item, item_errors = check(record, sizes, labels)
        if item is not None:
            usable.append(item._replace(entry=number))
        for kind, text in item_errors.items():
            errors.setdefault(kind, []).append(text)
    usable.sort(key=lambda record: record[:2])
    images_of = (record.get("image_id") for record in annotations if isinstance(record, dict))
    annotated = frozenset(record for record in images_of if isinstance(record, int))
    return Table(file, tuple(sorted(entries)), tuple(sorted(categories)), usable, errors, annotated)


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


def _reject_duplicates(file: SourceFile, kind: str, values: List[Any]) -> None:
    ((value, count),) = Counter(values).most_common(1) or [(None, 0)]
    if count > 1:
        raise Problem(f"{file} has the {kind} {value} twice", f"each {kind} once", "remove one of them")


# -- one annotation ---------------------------------------------------------------------------------------


def check(
    annotation: Any, sizes: Mapping[int, Tuple[int, int]], labels: Mapping[int, int]
) -> Tuple[Optional[Object], Dict[str, str]]:
    """Return an annotation's object (None if it is unusable) and errors by kind.

    ``sizes``: width and height by image id; ``labels``: 1 to C by category id.
    """
    name = f"annotation {annotation.get('id', '?') if isinstance(annotation, dict) else '?'}"
    try:
        number, image, category = (_integer(annotation, key) for key in ("id", "image_id", "category_id"))
        box = tuple(_number(value, "bbox") for value in annotation["bbox"])
        area, is_crowd = _number(annotation["area"], "area"), annotation["iscrowd"]
        segmentation = annotation["segmentation"]
        if len(box) != 4:
            raise ValueError("bbox must be x, y, width and height")
        if not 0 <= area <= MAX_AREA:
            raise ValueError(f"area must be 0 to {MAX_AREA:g} (got {area:g})")
        if is_crowd not in (0, 1):
            raise ValueError(f"iscrowd must be 0 or 1 (got {is_crowd!r})")
    except KeyError as error:
        return None, {INCOMPLETE: f"{name} has no {error.args[0]}"}
    except (TypeError, ValueError, OverflowError) as error:
        return None, {INCOMPLETE: f"{name}: {error}"}
    if image not in sizes:
        return None, {NO_IMAGE: f"{name}, image {image}"}
    (x, y, width, height), (columns, rows) = box, sizes[image]
    description = f"{name}, [{', '.join(f'{value:g}' for value in box)}]"
    overhang = max(-x, -y, x + width - columns, y + height - rows, 0.0)
    polygons, wrong = _outline(segmentation, bool(is_crowd), columns, rows)
    errors = {}
    if category not in labels:
        errors[NO_CATEGORY] = f"{name}, category {category}"
    if min(width, height) < MIN_SIDE:
        errors[NO_AREA] = description
    elif overhang > ROUNDING:
        errors[OUTSIDE] = f"{description} in an image of {columns} x {rows}"
    if wrong:
        errors[wrong] = f"{name} of image {image}"
    touches_image = x < columns and y < rows and x + width > 0 and y + height > 0
    if NO_CATEGORY in errors or NO_AREA in errors or not touches_image or not segmentation:
        return None, errors
    return Object(image, number, labels[category], box, area, bool(is_crowd), polygons, overhang, bool(errors)), errors


def _outline(segmentation: Any, is_crowd: bool, columns: int, rows: int) -> Tuple[List[np.ndarray], str]:
    # Usable polygons in a segmentation, and the first error (empty: none)
    if not segmentation:
        return [], NO_OUTLINE
    if isinstance(segmentation, dict):
        if not _is_valid_rle(segmentation, columns, rows):
            return [], BAD_RLE
        return [], "" if is_crowd else RLE_INSTANCE
    if not isinstance(segmentation, list):
        return [], BAD_POLYGON
    errors = [_polygon_error(polygon) for polygon in segmentation]
    polygons = [np.array(polygon, np.float32) for polygon, error in zip(segmentation, errors) if not error]
    return polygons, next(filter(None, errors), "")


def _polygon_error(polygon: Any) -> str:
    is_list = isinstance(polygon, list) and len(polygon) % 2 == 0
    # False for NaN as well
    if not is_list or not all(type(value) in (int, float) and abs(value) < MAX_COORDINATE for value in polygon):
        return BAD_POLYGON
    return FEW_POINTS if len(polygon) < 6 else ""  # pycocotools reads four numbers as a box


def _is_valid_rle(rle: Mapping[str, Any], columns: int, rows: int) -> bool:
    # pycocotools writes beyond the end of the mask if the counts exceed the size
    size, counts = rle.get("size"), rle.get("counts")
    if size != [rows, columns] or not all(type(length) is int for length in size):
        return False
    if isinstance(counts, str):
        counts = _decompress_rle(counts)
    if not isinstance(counts, list) or not all(type(count) is int and count >= 0 for count in counts):
        return False
    return sum(counts) == columns * rows


def _decompress_rle(text: str) -> List[int]:
    # Six bits per character, the sixth means "continued"; from the fourth count, differences from the count two
    # positions before (rleFrString in pycocotools' maskApi.c). Invalid text returns a negative count.
    counts: List[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 60:  # counts are 64-bit integers
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
    objects = table.objects
    polygons = [polygon for item in objects for polygon in item.polygons]
    owners = np.searchsorted([entry.id for entry in table.entries], [item.image_id for item in objects])
    encoded = [entry.name.encode("utf-8", "surrogateescape") for entry in table.entries]
    arrays: Dict[str, np.ndarray] = {
        "image_ids": np.array([entry.id for entry in table.entries], np.int64),
        "files": np.array(encoded, np.bytes_),
        "sizes": np.array([(entry.width, entry.height) for entry in table.entries], np.int32),
        "offsets": _ends(np.bincount(owners, minlength=len(table.entries))),
        "boxes": np.array([item.box for item in objects], np.float32),
        "areas": np.array([item.area for item in objects], np.float32),
        "labels": np.array([item.label for item in objects], np.int16),
        "crowds": np.array([item.crowd for item in objects], bool),
        "polygon_offsets": _ends(len(item.polygons) for item in objects),
        "point_offsets": _ends(map(len, polygons)),
        "points": np.concatenate([np.zeros(0, np.float32), *polygons]),
    }
    for name, values in arrays.items():
        write_array(scratch / array_file(part, name), values)


def _ends(counts: Iterable[int]) -> np.ndarray:
    # Offsets of groups, including the end of the last group
    return np.cumsum([0, *counts], dtype=np.int64)
