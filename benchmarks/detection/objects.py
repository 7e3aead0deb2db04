"""One annotation of COCO's: checked, and as numbers."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

OUTSIDE = "box outside its image"
NO_AREA = "box without area"
NO_IMAGE = "annotation of an image without entry"
NO_CATEGORY = "unknown category"
NO_OUTLINE = "empty annotation"
FEW_POINTS = "polygon of less than three points"
BAD_POLYGON = "polygon that is no list of x, y pairs"
BAD_RLE = "RLE that does not fit its image"
INCOMPLETE = "incomplete annotation"

ROUNDING = 1.0
"""Pixels that a box may reach out of its image: published boxes are rounded, and cannot be told from drawn ones."""
KEYS = ("id", "image_id", "category_id", "bbox", "area", "iscrowd", "segmentation")


class Flaw(NamedTuple):
    """What is wrong with one object or one image."""

    kind: str
    what: str
    """Which one, and what it has."""
    number: int = -1
    """Id of the annotation, -1 for an image's."""


class Object(NamedTuple):
    """One object, in pixels."""

    number: int
    """Id of the annotation."""
    image_id: int
    label: int
    box: Tuple[float, float, float, float]
    area: float
    crowd: bool
    polygons: Sequence[Sequence[float]]
    """None where the segmentation is an RLE."""
    reaches_out: float
    """Pixels by which the box reaches out of its image."""


def check(
    annotation: Any, sizes: Mapping[int, Tuple[int, int]], labels: Mapping[int, int]
) -> Tuple[Optional[Object], List[Flaw]]:
    """Return the object of an annotation with all of its flaws; no object where a flaw leaves none.

    ``sizes`` are width and height by image id, ``labels`` 1 to C by category id.
    """
    facts, problem = _parsed(annotation)
    if facts is None:
        return None, [problem]
    number, image_id = facts["id"], facts["image_id"]
    name = f"annotation {number}"
    if image_id not in sizes:
        return None, [Flaw(NO_IMAGE, f"{name}, image {image_id}", number)]
    flaws: List[Flaw] = []
    size = sizes[image_id]
    if facts["category_id"] not in labels:
        flaws.append(Flaw(NO_CATEGORY, f"{name}, category {facts['category_id']}", number))
    box = facts["bbox"]
    x, y, width, height = box
    out = max(-x, -y, x + width - size[0], y + height - size[1], 0.0)
    if min(width, height) <= 0:
        flaws.append(Flaw(NO_AREA, f"{name}, {_numbers(box)}", number))
    elif out > ROUNDING:
        flaws.append(Flaw(OUTSIDE, f"{name}, {_numbers(box)} in an image of {size[0]} x {size[1]}", number))
    polygons, wrong = _outline(facts["segmentation"], size)
    if wrong:
        flaws.append(Flaw(wrong, f"{name} of image {image_id}", number))
    inside = x < size[0] and y < size[1] and x + width > 0 and y + height > 0
    if facts["category_id"] not in labels or min(width, height) <= 0 or not inside or not facts["segmentation"]:
        return None, flaws
    label = labels[facts["category_id"]]
    return Object(number, image_id, label, box, facts["area"], facts["iscrowd"], polygons, out), flaws


def _parsed(annotation: Any) -> Tuple[Optional[Dict[str, Any]], Flaw]:
    """Return the fields in their types, or None with what is wrong."""
    number = annotation.get("id", "?") if isinstance(annotation, dict) else "?"
    try:
        facts = {key: annotation[key] for key in KEYS}
        for key in ("id", "image_id", "category_id"):
            facts[key] = int(facts[key])
        facts["bbox"] = tuple(float(value) for value in facts["bbox"])
        facts["area"], facts["iscrowd"] = float(facts["area"]), bool(facts["iscrowd"])
        if len(facts["bbox"]) != 4 or not all(map(math.isfinite, (*facts["bbox"], facts["area"]))):
            raise ValueError("bbox is no x, y, width and height")
    except KeyError as error:
        return None, Flaw(INCOMPLETE, f"annotation {number} has no {error.args[0]}", _id(number))
    except (TypeError, ValueError) as error:
        return None, Flaw(INCOMPLETE, f"annotation {number}: {error}", _id(number))
    return facts, Flaw("", "")


def _id(number: Any) -> int:
    return number if isinstance(number, int) else -1


def _numbers(box: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:g}" for value in box) + "]"


def _outline(segmentation: Any, size: Tuple[int, int]) -> Tuple[List[Sequence[float]], str]:
    """Return the usable polygons of a segmentation and the kind of its first flaw, empty without one."""
    if not segmentation:
        return [], NO_OUTLINE
    if isinstance(segmentation, dict):
        return [], "" if _fits(segmentation, size) else BAD_RLE
    if not isinstance(segmentation, list):
        return [], BAD_POLYGON
    kept: List[Sequence[float]] = []
    wrong = ""
    for polygon in segmentation:
        if not isinstance(polygon, list) or len(polygon) % 2 or not _are_numbers(polygon):
            wrong = wrong or BAD_POLYGON
        elif len(polygon) < 6:
            # pycocotools takes four numbers for a box.
            wrong = wrong or FEW_POINTS
        else:
            kept.append(polygon)
    return kept, wrong


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(type(value) in (int, float) and math.isfinite(value) for value in values)


def _fits(rle: Mapping[str, Any], size: Tuple[int, int]) -> bool:
    """Return whether an RLE is of the image's height and width; compressed counts are not summed."""
    counts = rle.get("counts")
    if rle.get("size") != [size[1], size[0]]:
        return False
    if isinstance(counts, list):
        return all(type(count) is int and count >= 0 for count in counts) and sum(counts) == size[0] * size[1]
    return isinstance(counts, str) and bool(counts)
