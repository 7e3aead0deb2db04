"""The toy data set: scikit-learn's real handwritten digits pasted into generated scenes, written as COCO is published.

A scene is 96 to 160 pixels wide and high, with a soft dark background and up to MOST_DIGITS bright digits at random
places and sizes. A digit's polygons are the outlines of what is seen of it, in whole pixels; as in COCO, a hole counts
as a part of its digit. Now and then a cluster of small digits of one kind is annotated as a crowd, by one RLE, and some
scenes have no object at all.
"""

import io
import json
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Tuple

import numpy as np
from PIL import Image

from benchmarks.common.data.problem import Problem
from benchmarks.detection.annotations import images_folder, json_file

NAME = "digit-scenes"
VAL_SHARE = 0.12  # scenes to evaluate on, for each to train on
HELD_OUT = 297  # digits that only the scenes to evaluate on show, of 1,797
# Names by id; the ids have gaps, as COCO's have
CATEGORIES = dict(
    zip(
        (1, 2, 3, 5, 6, 8, 9, 11, 13, 16),
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    )
)
SIDES = (96, 160)  # least and greatest width and height of a scene in pixels
DIGIT_SIDES = (28, 72)  # least and greatest height of a digit in pixels
CROWD_SIDES = (10, 14)
CROWD_DIGITS = (4, 8)
MOST_DIGITS = 4
EMPTY_SHARE, CROWD_SHARE = 0.02, 0.06  # shares of the scenes that have no object and that have a crowd
OVERLAP = 0.15  # a digit may cover this share of the box of another at most
INK = 0.4  # opacity from which on a pixel belongs to a digit
QUALITY = 90  # JPEG quality


class Patch(NamedTuple):
    label: int  # 0 to 9
    x: int
    y: int
    opacity: np.ndarray  # float32 (height, width), 0 to 1


class Picture(NamedTuple):
    """An image to write, and its objects as annotations have them."""

    id: int
    width: int
    height: int
    jpeg: bytes
    objects: List[Dict[str, Any]]


class Digits(NamedTuple):
    images: np.ndarray  # float (N, 8, 8), 0 to 16
    labels: np.ndarray  # int (N,)


def write_scenes(folder: Path, seed: int, train: int) -> None:
    """Write images and JSON files below ``folder``; the same seed gives the same scenes."""
    every = _load_digits()
    order = np.random.default_rng([seed, 0]).permutation(len(every.labels))
    held, shown = order[:HELD_OUT], order[HELD_OUT:]
    parts = (("train", shown, train), ("val", held, max(1, round(train * VAL_SHARE))))
    for number, (part, chosen, count) in enumerate(parts, 1):
        digits = Digits(every.images[chosen], every.labels[chosen])
        _write_part(folder, part, digits, count, np.random.default_rng([seed, number]))


def _load_digits() -> Digits:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise Problem(
            f"{error.name} is not installed in this Python", "scikit-learn", "pip install scikit-learn"
        ) from None
    every = load_digits()
    return Digits(every.images, every.target)


def _write_part(folder: Path, part: str, digits: Digits, count: int, generator: np.random.Generator) -> None:
    def drawn() -> Iterator[Picture]:
        # Neither in the order of their ids nor without gaps, as COCO's images are.
        for image_id in (generator.permutation(4 * count)[:count] + 1).tolist():
            width, height = (int(side) for side in generator.integers(*SIDES, size=2, endpoint=True))
            pixels, objects = draw_scene(digits, width, height, generator)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
            yield Picture(image_id, width, height, file.getvalue(), objects)

    write_part(folder, part, drawn(), CATEGORIES, {"info": {"description": f"Encore's {NAME}"}})


def write_part(
    folder: Path, part: str, pictures: Iterable[Picture], categories: Mapping[int, str], head: Mapping[str, Any]
) -> None:
    """Write images and their JSON file, which begins with ``head``, as COCO is published."""
    place, path = folder / images_folder(part), folder / json_file(part)
    for each in (place, path.parent):
        each.mkdir(parents=True, exist_ok=True)
    images: List[Dict[str, Any]] = []
    annotations: List[Dict[str, Any]] = []
    for picture in pictures:
        name = f"{picture.id:012}.jpg"
        (place / name).write_bytes(picture.jpeg)
        images.append({"id": picture.id, "file_name": name, "width": picture.width, "height": picture.height})
        for facts in picture.objects:
            annotations.append({"id": len(annotations) + 1, "image_id": picture.id, **facts})
    listed = [{"id": number, "name": name} for number, name in categories.items()]
    content = {**head, "images": images, "annotations": annotations, "categories": listed}
    path.write_text(json.dumps(content), encoding="utf-8")


def draw_scene(
    digits: Digits, width: int, height: int, generator: np.random.Generator
) -> Tuple[np.ndarray, List[Dict[str, Any]]]:
    """Return the pixels, uint8 (height, width, 3), and the objects as COCO's annotations have them."""
    # Soft spots of dark colours
    spots = Image.fromarray(generator.integers(0, 90, size=(5, 5, 3), dtype=np.uint8))
    pixels = np.asarray(spots.resize((width, height), Image.BICUBIC)).astype(np.float32)
    if generator.random() < EMPTY_SHARE:
        return pixels.round().astype(np.uint8), []
    crowd = _crowd(digits, width, height, generator) if generator.random() < CROWD_SHARE else []
    patches = _place(digits, crowd, width, height, generator)
    seen: List[np.ndarray] = []
    for patch in (*crowd, *patches):
        colour = generator.integers(150, 255, size=3, endpoint=True)
        rows, columns = patch.opacity.shape
        window = pixels[patch.y : patch.y + rows, patch.x : patch.x + columns]
        window += (colour - window) * patch.opacity[:, :, None]
        mask = np.zeros((height, width), bool)
        mask[patch.y : patch.y + rows, patch.x : patch.x + columns] = patch.opacity > INK
        for before in seen:
            before &= ~mask
        seen.append(mask)
    objects = []
    for patch, mask in zip(patches, seen[len(crowd) :]):
        found = outlines(mask)
        area = sum(map(_doubled_area, found)) / 2
        objects.append(_annotation(patch.label, [outline.ravel().tolist() for outline in found], mask, area, 0))
    if crowd:
        mask = np.logical_or.reduce(seen[: len(crowd)])
        # COCO's RLE counts pixels column by column, and begins with those outside.
        flat = mask.ravel(order="F")
        bounds = np.concatenate(([0], np.flatnonzero(np.diff(flat)) + 1, [len(flat)]))
        counts = [0] * int(flat[0]) + np.diff(bounds).tolist()
        segmentation = {"counts": counts, "size": list(mask.shape)}
        objects.append(_annotation(crowd[0].label, segmentation, mask, float(mask.sum()), 1))
    return pixels.round().clip(0, 255).astype(np.uint8), objects


def _enlarge(digit: np.ndarray, rows: int, columns: int) -> np.ndarray:
    # A digit's opacity at another size, cut to the box of its ink
    large = Image.fromarray((digit / 16).astype(np.float32)).resize((columns, rows), Image.BICUBIC)
    opacity = np.asarray(large).clip(0, 1)
    ink = opacity > INK
    y, x = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    return opacity[y[0] : y[-1] + 1, x[0] : x[-1] + 1]


def _place(digits: Digits, crowd: List[Patch], width: int, height: int, generator: np.random.Generator) -> List[Patch]:
    placed: List[Patch] = []
    for _ in range(int(generator.integers(1, MOST_DIGITS, endpoint=True))):
        number = int(generator.integers(len(digits.labels)))
        rows = int(generator.integers(*DIGIT_SIDES, endpoint=True))
        columns = max(8, round(rows * generator.uniform(0.7, 1.1)))
        opacity = _enlarge(digits.images[number], rows, columns)
        for _ in range(10):
            y = int(generator.integers(height - opacity.shape[0], endpoint=True))
            x = int(generator.integers(width - opacity.shape[1], endpoint=True))
            patch = Patch(int(digits.labels[number]), x, y, opacity)
            near = max((_covered(patch, other) for other in placed), default=0.0)
            if near <= OVERLAP and not any(_covered(patch, other) for other in crowd):
                placed.append(patch)
                break
    return placed


def _crowd(digits: Digits, width: int, height: int, generator: np.random.Generator) -> List[Patch]:
    label = int(generator.integers(10))
    same = np.flatnonzero(digits.labels == label)
    side = int(generator.integers(*CROWD_SIDES, endpoint=True))
    count = min(int(generator.integers(*CROWD_DIGITS, endpoint=True)), width // side)
    left = int(generator.integers(width - count * side, endpoint=True))
    top = int(generator.integers(height - side, endpoint=True))
    chosen = generator.choice(same, count)
    return [
        Patch(label, left + place * side, top, _enlarge(digits.images[number], side, side))
        for place, number in enumerate(chosen)
    ]


def _covered(one: Patch, other: Patch) -> float:
    (a, b), (c, d) = one.opacity.shape, other.opacity.shape
    rows = min(one.y + a, other.y + c) - max(one.y, other.y)
    columns = min(one.x + b, other.x + d) - max(one.x, other.x)
    return max(0, rows) * max(0, columns) / min(a * b, c * d)


# -- annotations ----------------------------------------------------------------------------------------


def _annotation(label: int, segmentation: Any, mask: np.ndarray, area: float, crowd: int) -> Dict[str, Any]:
    y, x = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    box = (x[0], y[0], x[-1] - x[0] + 1, y[-1] - y[0] + 1)
    return {
        "category_id": list(CATEGORIES)[label],
        "segmentation": segmentation,
        "bbox": [float(number) for number in box],
        "area": area,
        "iscrowd": crowd,
    }


def outlines(mask: np.ndarray) -> List[np.ndarray]:
    """Return the outer boundary of each region of a mask as corners of pixels, each int (points, 2) of x and y.

    Every pixel of a region gives its free sides as steps with the region at the right hand; steps are joined to loops.
    Where two pixels touch by a corner alone, two steps begin at it: the loop turns right, and keeps them apart.
    """
    top, left = (int(np.flatnonzero(mask.any(axis=axis))[0]) for axis in (1, 0))
    padded = np.pad(mask[top:, left:], 1)
    steps: Dict[Tuple[int, int], List[Tuple[int, int]]] = {}
    for (dy, dx), (begin, end) in _SIDES.items():
        free = padded[1:-1, 1:-1] & ~np.roll(padded, (-dy, -dx), (0, 1))[1:-1, 1:-1]
        for y, x in np.add(np.argwhere(free), (top, left)).tolist():
            steps.setdefault((x + begin[0], y + begin[1]), []).append((x + end[0], y + end[1]))
    found = []
    while steps:
        loop = _follow(steps)
        if _doubled_area(loop) > 0:  # a hole runs the other way
            found.append(loop)
    return found


def _doubled_area(loop: np.ndarray) -> int:
    x, y = loop[:, 0], loop[:, 1]
    return int(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1)))


# Neighbour of a pixel as (y, x), and the corners, (x, y) from its own, between which the side to it runs.
_SIDES = {
    (-1, 0): ((0, 0), (1, 0)),
    (0, 1): ((1, 0), (1, 1)),
    (1, 0): ((1, 1), (0, 1)),
    (0, -1): ((0, 1), (0, 0)),
}


def _follow(steps: Dict[Tuple[int, int], List[Tuple[int, int]]]) -> np.ndarray:
    # Take one loop out of ``steps`` and return its corners
    first = at = next(iter(steps))
    way = (0, 0)
    corners: List[Tuple[int, int]] = []
    while True:
        ends = steps[at]
        right = (at[0] - way[1], at[1] + way[0])
        end = ends.pop(ends.index(right) if right in ends else 0)
        if not ends:
            del steps[at]
        step = (end[0] - at[0], end[1] - at[1])
        if step != way:
            corners.append(at)
        at, way = end, step
        if at == first:
            return np.array(corners)
