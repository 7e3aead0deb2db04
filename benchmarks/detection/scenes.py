"""Toy data set: handwritten digits of scikit-learn in generated scenes, in COCO's published format.

A scene is 96 to 160 pixels wide and high, with a dark blurred background and up to MOST_DIGITS bright digits at
random positions and sizes. Polygons outline the visible part of the digit, in pixel corners; as in COCO, a hole
belongs to the object. Some scenes have a crowd, a cluster of small digits of the same class with one RLE, and some
are without objects.
"""

import io
import json
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Tuple

import numpy as np
from PIL import Image

from benchmarks.common.data.problem import Problem
from benchmarks.detection.layout import images_folder, json_file

NAME = "digit-scenes"
VAL_SHARE = 0.12  # validation scenes per training scene
HELD_OUT = 297  # digits that only the scenes to evaluate on show, of 1,797
# Names by id; the ids have gaps, as COCO's have
CATEGORIES = dict(
    zip(
        (1, 2, 3, 5, 6, 8, 9, 11, 13, 16),
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    )
)
SIDES = (96, 160)  # minimum and maximum width and height of scenes in pixels
DIGIT_SIDES = (28, 72)  # minimum and maximum height of digits in pixels
CROWD_SIDES = (10, 14)
CROWD_DIGITS = (4, 8)
MOST_DIGITS = 4
EMPTY_SHARE, CROWD_SHARE = 0.02, 0.06  # fraction of scenes without objects, and with a crowd
OVERLAP = 0.15  # maximum overlap with another digit, as a fraction of the smaller box
INK = 0.4  # opacity from which on a pixel belongs to a digit
QUALITY = 90  # JPEG quality


class Patch(NamedTuple):
    label: int  # 0 to 9
    x: int
    y: int
    opacity: np.ndarray  # float32 (height, width), 0 to 1


class Picture(NamedTuple):
    """Image to write, with objects in COCO's annotation format."""

    id: int
    width: int
    height: int
    jpeg: bytes
    objects: List[Dict[str, Any]]


class Digits(NamedTuple):
    images: np.ndarray  # float (N, 8, 8), 0 to 16
    labels: np.ndarray  # int (N,)


def write_scenes(folder: Path, seed: int, train: int) -> None:
    """Write images and JSON files in ``folder``; the scenes are determined by ``seed``."""
    all_digits = _load_digits()
    order = np.random.default_rng([seed, 0]).permutation(len(all_digits.labels))
    val_digits, train_digits = order[:HELD_OUT], order[HELD_OUT:]
    parts = (("train", train_digits, train), ("val", val_digits, max(1, round(train * VAL_SHARE))))
    for number, (part, indices, count) in enumerate(parts, 1):
        digits = Digits(all_digits.images[indices], all_digits.labels[indices])
        _write_part(folder, part, digits, count, np.random.default_rng([seed, number]))


def _load_digits() -> Digits:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise Problem(
            f"{error.name} is not installed in this Python", "scikit-learn", "pip install scikit-learn"
        ) from None
    dataset = load_digits()
    return Digits(dataset.images, dataset.target)


def _write_part(folder: Path, part: str, digits: Digits, count: int, generator: np.random.Generator) -> None:
    def draw_pictures() -> Iterator[Picture]:
        # Unordered ids with gaps, as in COCO
        for image_id in (generator.permutation(4 * count)[:count] + 1).tolist():
            width, height = (int(length) for length in generator.integers(*SIDES, size=2, endpoint=True))
            pixels, objects = draw_scene(digits, width, height, generator)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
            yield Picture(image_id, width, height, file.getvalue(), objects)

    write_part(folder, part, draw_pictures(), CATEGORIES, {"info": {"description": f"Encore's {NAME}"}})


def write_part(
    folder: Path, part: str, pictures: Iterable[Picture], categories: Mapping[int, str], head: Mapping[str, Any]
) -> None:
    """Write images and the JSON file in COCO's published format; the JSON starts with ``head``."""
    image_directory, path = folder / images_folder(part), folder / json_file(part)
    for directory in (image_directory, path.parent):
        directory.mkdir(parents=True, exist_ok=True)
    images: List[Dict[str, Any]] = []
    annotations: List[Dict[str, Any]] = []
    for picture in pictures:
        name = f"{picture.id:012}.jpg"
        (image_directory / name).write_bytes(picture.jpeg)
        images.append({"id": picture.id, "file_name": name, "width": picture.width, "height": picture.height})
        for annotation in picture.objects:
            annotations.append({"id": len(annotations) + 1, "image_id": picture.id, **annotation})
    listed = [{"id": number, "name": name} for number, name in categories.items()]
    content = {**head, "images": images, "annotations": annotations, "categories": listed}
    path.write_text(json.dumps(content), encoding="utf-8")


def draw_scene(
    digits: Digits, width: int, height: int, generator: np.random.Generator
) -> Tuple[np.ndarray, List[Dict[str, Any]]]:
    """Return the pixels, uint8 (height, width, 3), and the objects in COCO's annotation format."""
    # Soft spots of dark colours
    spots = Image.fromarray(generator.integers(0, 90, size=(5, 5, 3), dtype=np.uint8))
    pixels = np.asarray(spots.resize((width, height), Image.BICUBIC)).astype(np.float32)
    if generator.random() < EMPTY_SHARE:
        return pixels.round().astype(np.uint8), []
    crowd = _crowd(digits, width, height, generator) if generator.random() < CROWD_SHARE else []
    patches = _place_digits(digits, crowd, width, height, generator)
    masks: List[np.ndarray] = []
    for patch in (*crowd, *patches):
        colour = generator.integers(150, 255, size=3, endpoint=True)
        rows, columns = patch.opacity.shape
        window = pixels[patch.y : patch.y + rows, patch.x : patch.x + columns]
        window += (colour - window) * patch.opacity[:, :, None]
        mask = np.zeros((height, width), bool)
        mask[patch.y : patch.y + rows, patch.x : patch.x + columns] = patch.opacity > INK
        for covered_mask in masks:
            covered_mask &= ~mask
        masks.append(mask)
    objects = []
    for patch, mask in zip(patches, masks[len(crowd) :]):
        polygons = outlines(mask)
        area = sum(map(_double_area, polygons)) / 2
        objects.append(_annotation(patch.label, [outline.ravel().tolist() for outline in polygons], mask, area, 0))
    if crowd:
        mask = np.logical_or.reduce(masks[: len(crowd)])
        # COCO's RLE counts pixels column by column, starting with background.
        flat = mask.ravel(order="F")
        bounds = np.concatenate(([0], np.flatnonzero(np.diff(flat)) + 1, [len(flat)]))
        counts = [0] * int(flat[0]) + np.diff(bounds).tolist()
        segmentation = {"counts": counts, "size": list(mask.shape)}
        objects.append(_annotation(crowd[0].label, segmentation, mask, float(mask.sum()), 1))
    return pixels.round().clip(0, 255).astype(np.uint8), objects


def _enlarge(digit: np.ndarray, rows: int, columns: int) -> np.ndarray:
    # Resize a digit's opacity and crop it to the ink
    large = Image.fromarray((digit / 16).astype(np.float32)).resize((columns, rows), Image.BICUBIC)
    opacity = np.asarray(large).clip(0, 1)
    ink = opacity > INK
    y, x = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    return opacity[y[0] : y[-1] + 1, x[0] : x[-1] + 1]


def _place_digits(
    digits: Digits, crowd: List[Patch], width: int, height: int, generator: np.random.Generator
) -> List[Patch]:
    patches_placed: List[Patch] = []
    for _ in range(int(generator.integers(1, MOST_DIGITS, endpoint=True))):
        number = int(generator.integers(len(digits.labels)))
        rows = int(generator.integers(*DIGIT_SIDES, endpoint=True))
        columns = max(8, round(rows * generator.uniform(0.7, 1.1)))
        opacity = _enlarge(digits.images[number], rows, columns)
        for _ in range(10):
            y = int(generator.integers(height - opacity.shape[0], endpoint=True))
            x = int(generator.integers(width - opacity.shape[1], endpoint=True))
            patch = Patch(int(digits.labels[number]), x, y, opacity)
            near = max((_overlap(patch, other) for other in patches_placed), default=0.0)
            if near <= OVERLAP and not any(_overlap(patch, other) for other in crowd):
                patches_placed.append(patch)
                break
    return patches_placed


def _crowd(digits: Digits, width: int, height: int, generator: np.random.Generator) -> List[Patch]:
    label = int(generator.integers(10))
    same = np.flatnonzero(digits.labels == label)
    size = int(generator.integers(*CROWD_SIDES, endpoint=True))
    count = min(int(generator.integers(*CROWD_DIGITS, endpoint=True)), width // size)
    x = int(generator.integers(width - count * size, endpoint=True))
    y = int(generator.integers(height - size, endpoint=True))
    members = generator.choice(same, count)
    return [
        Patch(label, x + column * size, y, _enlarge(digits.images[number], size, size))
        for column, number in enumerate(members)
    ]


def _overlap(first: Patch, second: Patch) -> float:
    (a, b), (c, d) = first.opacity.shape, second.opacity.shape
    rows = min(first.y + a, second.y + c) - max(first.y, second.y)
    columns = min(first.x + b, second.x + d) - max(first.x, second.x)
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
    """Return the outer boundaries of the regions in a mask as pixel corners, int (points, 2) of x and y.

    Free pixel sides are directed steps with the region on the right, and are joined to loops. At a corner that two
    pixels share diagonally there are two outgoing steps: the loop turns right, which separates the regions.
    """
    y_offset, x_offset = (int(np.flatnonzero(mask.any(axis=axis))[0]) for axis in (1, 0))
    padded = np.pad(mask[y_offset:, x_offset:], 1)
    steps: Dict[Tuple[int, int], List[Tuple[int, int]]] = {}
    for (dy, dx), (start, end) in _SIDES.items():
        free = padded[1:-1, 1:-1] & ~np.roll(padded, (-dy, -dx), (0, 1))[1:-1, 1:-1]
        for y, x in np.add(np.argwhere(free), (y_offset, x_offset)).tolist():
            steps.setdefault((x + start[0], y + start[1]), []).append((x + end[0], y + end[1]))
    loops = []
    while steps:
        loop = _trace_loop(steps)
        if _double_area(loop) > 0:  # a hole runs the other way
            loops.append(loop)
    return loops


def _double_area(loop: np.ndarray) -> int:
    x, y = loop[:, 0], loop[:, 1]
    return int(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1)))


# Neighbouring pixel as (dy, dx): start and end corner (x, y) of the side between them
_SIDES = {
    (-1, 0): ((0, 0), (1, 0)),
    (0, 1): ((1, 0), (1, 1)),
    (1, 0): ((1, 1), (0, 1)),
    (0, -1): ((0, 1), (0, 0)),
}


def _trace_loop(steps: Dict[Tuple[int, int], List[Tuple[int, int]]]) -> np.ndarray:
    # Remove one loop from ``steps`` and return the corners
    first = corner = next(iter(steps))
    direction = (0, 0)
    corners: List[Tuple[int, int]] = []
    while True:
        ends = steps[corner]
        right = (corner[0] - direction[1], corner[1] + direction[0])
        end = ends.pop(ends.index(right) if right in ends else 0)
        if not ends:
            del steps[corner]
        step = (end[0] - corner[0], end[1] - corner[1])
        if step != direction:
            corners.append(corner)
        corner, direction = end, step
        if corner == first:
            return np.array(corners)
