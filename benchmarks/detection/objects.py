"""One annotation of COCO's: checked, and as numbers."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

OUTSIDE = "box outside its image"
NO_AREA = "box without area"
NO_IMAGE = "annotation of an image without entry"
NO_CATEGORY = "unknown category"
NO_OUTLINE = "empty annotation"
FEW_POINTS = "polygon of less than three points"
BAD_POLYGON = "polygon that is no list of x, y pairs"
BAD_RLE = "RLE that does not fit its image"
INCOMPLETE = "incomplete annotation"

ROUNDING = 1.0  # pixels that a box may reach out of its image: published boxes are rounded, and look like drawn ones


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
    place: int = 0  # in the file's list of annotations


def check(
    annotation: Any, sizes: Mapping[int, Tuple[int, int]], labels: Mapping[int, int]
) -> Tuple[Optional[Object], Dict[str, str]]:
    """Return the object of an annotation, None where nothing of it can be used, and what is wrong by kind of error.

    ``sizes`` are width and height by image id, ``labels`` 1 to C by category id.
    """
    name = f"annotation {annotation.get('id', '?') if isinstance(annotation, dict) else '?'}"
    try:
        number, image, category = (int(annotation[key]) for key in ("id", "image_id", "category_id"))
        box = tuple(float(value) for value in annotation["bbox"])
        area, crowd = float(annotation["area"]), bool(annotation["iscrowd"])
        segmentation = annotation["segmentation"]
        if len(box) != 4 or not all(map(math.isfinite, (*box, area))):
            raise ValueError("bbox is no x, y, width and height")
    except KeyError as error:
        return None, {INCOMPLETE: f"{name} has no {error.args[0]}"}
    except (TypeError, ValueError) as error:
        return None, {INCOMPLETE: f"{name}: {error}"}
    if image not in sizes:
        return None, {NO_IMAGE: f"{name}, image {image}"}
    (x, y, width, height), (columns, rows) = box, sizes[image]
    shown = f"{name}, [{', '.join(f'{value:g}' for value in box)}]"
    out = max(-x, -y, x + width - columns, y + height - rows, 0.0)
    polygons, wrong = _outline(segmentation, columns, rows)
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
    return Object(image, number, labels[category], box, area, crowd, polygons, out), errors


def _outline(segmentation: Any, columns: int, rows: int) -> Tuple[List[np.ndarray], str]:
    # The usable polygons of a segmentation and the kind of its first error, empty without one
    if not segmentation:
        return [], NO_OUTLINE
    if isinstance(segmentation, dict):
        return [], "" if _fits(segmentation, columns, rows) else BAD_RLE
    if not isinstance(segmentation, list):
        return [], BAD_POLYGON
    errors = [_polygon_error(polygon) for polygon in segmentation]
    kept = [np.array(polygon, np.float32) for polygon, error in zip(segmentation, errors) if not error]
    return kept, next(filter(None, errors), "")


def _polygon_error(polygon: Any) -> str:
    if not isinstance(polygon, list) or len(polygon) % 2 or not _are_numbers(polygon):
        return BAD_POLYGON
    return FEW_POINTS if len(polygon) < 6 else ""  # pycocotools takes four numbers for a box


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(type(value) in (int, float) and math.isfinite(value) for value in values)


def _fits(rle: Mapping[str, Any], columns: int, rows: int) -> bool:
    # Whether an RLE is of the image's height and width; compressed counts are not summed
    counts = rle.get("counts")
    if rle.get("size") != [rows, columns]:
        return False
    if isinstance(counts, list):
        return all(type(count) is int and count >= 0 for count in counts) and sum(counts) == columns * rows
    return isinstance(counts, str) and bool(counts)
