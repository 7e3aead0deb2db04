"""COCO's images and objects as samples for benchmarks/common/data/sample_checks.py."""

from pathlib import Path
from typing import Any, Iterator, List, Mapping, Tuple

import numpy as np

from benchmarks.common.data import sample_checks
from benchmarks.detection.annotations import Part, load, open_data

LEAST_INSIDE = 0.9  # minimum fraction of images with all boxes inside; a few published boxes extend beyond the image
ROUNDING = 1.5  # pixels


def _part(directory: Path, name: str, part: Part) -> sample_checks.Part:
    checksums = load(directory, name, "checksums")

    def keys(indices: np.ndarray) -> List[bytes]:
        return [bytes(row.tobytes()) for row in checksums[indices]]

    return sample_checks.Part(len(part), keys)


def _own(name: str, part: Part, categories: int) -> Iterator[Tuple[str, str]]:
    if (np.diff(part.image_ids) <= 0).any():
        yield f"{name}: images are not in the order of their ids", "ascending ids, as the evaluation reads them"
    labels = np.asarray(part.labels)
    seen = np.bincount(labels.clip(0), minlength=categories + 1)
    if len(labels) and not (labels.min() >= 1 and labels.max() <= categories):
        yield f"{name}: labels from {labels.min()} to {labels.max()}", f"1 to {categories}"
    elif len(labels) >= sample_checks.EXPECTED_OF_CLASS * categories and (seen[1:] == 0).any():
        yield f"{name}: category {int(np.argmin(seen[1:])) + 1} has no object", f"objects of all {categories}"
    right = {}
    for image in sample_checks.spread(len(part)).tolist():
        boxes = part.boxes[part.offsets[image] : part.offsets[image + 1]]
        if len(boxes):
            right[image] = bool((boxes[:, :2] + boxes[:, 2:] <= part.sizes[image] + ROUNDING).all())
    expected = "boxes in their image: they may be those of another one"
    yield from sample_checks.agreement(right, f"images of {name} have boxes outside of them", expected, LEAST_INSIDE)


def view(directory: Path, manifest: Mapping[str, Any]) -> sample_checks.View:
    data = open_data(directory)
    parts = {"train": data.train, "val": data.val}

    def extra_checks() -> Iterator[Tuple[str, str]]:
        for name, part in parts.items():
            yield from _own(name, part, len(data.categories))

    return sample_checks.View(
        {name: _part(directory, name, part) for name, part in parts.items()}, extra_checks=extra_checks
    )
