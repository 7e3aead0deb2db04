"""Detections as arrays and as a file, in an order that does not depend on the number of ranks."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Sequence

import numpy as np

from benchmarks.common.data.files import in_one_step

# Types of the arrays of Detections
DTYPES = {"images": np.int64, "boxes": np.float32, "scores": np.float32, "labels": np.int16}


@dataclass(frozen=True)
class Detections:
    """D detections in any order."""

    images: np.ndarray  # int64 (D,): image ids
    boxes: np.ndarray  # float32 (D, 4): x, y, width and height in pixels of the original image
    scores: np.ndarray  # float32 (D,)
    labels: np.ndarray  # int16 (D,): 1 to C
    # D masks in the size of the image as COCO's compressed RLE ("counts"); None if only boxes are detected
    masks: Optional[Sequence[bytes]] = None

    def __len__(self) -> int:
        return len(self.images)

    def take(self, positions: np.ndarray) -> Detections:
        masks = None if self.masks is None else [self.masks[position] for position in positions.tolist()]
        arrays = (self.images[positions], self.boxes[positions], self.scores[positions], self.labels[positions])
        return Detections(*arrays, masks)


def empty(masks: bool = False) -> Detections:
    arrays = {name: np.zeros((0, 4) if name == "boxes" else 0, dtype) for name, dtype in DTYPES.items()}
    return Detections(**arrays, masks=[] if masks else None)


def join_detections(parts: Sequence[Detections]) -> Detections:
    """Return the detections of ``parts`` (at least one) in ascending order of image ids, stable per image.

    An image's detections must be in only one part, otherwise they would be counted twice.

    Raises:
        RuntimeError: an image is in two parts.
    """
    images = [np.unique(part.images) for part in parts]
    repeated, counts = np.unique(np.concatenate(images), return_counts=True)
    if (counts > 1).any():
        raise RuntimeError(f"image {repeated[counts > 1][0]} was evaluated {counts.max()} times, by different ranks")
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]).astype(DTYPES[name]) for name in DTYPES}
    masks: Optional[List[bytes]] = None
    if all(part.masks is not None for part in parts):
        masks = [mask for part in parts for mask in part.masks or ()]
    detections = Detections(**arrays, masks=masks)
    return detections.take(np.argsort(detections.images, kind="stable"))


def to_bytes(detections: Detections) -> bytes:
    """Return .npz file content with plain arrays, the inverse of ``from_bytes``."""
    arrays = {name: np.asarray(getattr(detections, name), dtype) for name, dtype in DTYPES.items()}
    if detections.masks is not None:
        arrays["mask_lengths"] = np.array([len(mask) for mask in detections.masks], np.int32)
        arrays["mask_bytes"] = np.frombuffer(b"".join(detections.masks), np.uint8)
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def from_bytes(data: bytes) -> Detections:
    """Return the detections in ``data``, the inverse of ``to_bytes``. No code is run, in contrast to a pickle."""
    with np.load(io.BytesIO(data)) as arrays:
        masks: Optional[List[bytes]] = None
        if "mask_lengths" in arrays:
            data_bytes, ends = arrays["mask_bytes"].tobytes(), np.cumsum(arrays["mask_lengths"]).tolist()
            masks = [data_bytes[start:end] for start, end in zip([0, *ends], ends)]
        return Detections(**{name: arrays[name] for name in DTYPES}, masks=masks)


def write(path: Path, detections: Detections) -> None:
    """Write a file atomically."""
    with in_one_step(path, durable=True) as file:
        file.write(to_bytes(detections))
