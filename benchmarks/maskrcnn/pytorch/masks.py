"""Masks of detections, drawn in their images and written as COCO's compressed RLE."""

from __future__ import annotations

from typing import List, Tuple

import numpy as np
from pycocotools import mask as coco_masks

THRESHOLD = 0.5
"""Probability from which a pixel belongs to an object."""


def paste(mask: np.ndarray, box: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return bool (height, width): where ``mask``, stretched over ``box``, is above THRESHOLD.

    Between the middles of a mask's pixels its values are interpolated, and outside of it they are 0, as the submitted
    code pads it; that code rounds the box to whole pixels first, here each pixel's middle is looked up.

    Args:
        mask: float32 (m, m), probabilities.
        box: (4,), left, top, right, bottom in pixels.
        width: of the image.
        height: of the image.
    """
    drawn = np.zeros((height, width), dtype=bool, order="F")
    columns, of_x = _axis(box[0], box[2], width, mask.shape[1])
    rows, of_y = _axis(box[1], box[3], height, mask.shape[0])
    drawn[rows, columns] = of_y @ mask @ of_x.T > THRESHOLD
    return drawn


def _axis(low: float, high: float, length: int, size: int) -> Tuple[slice, np.ndarray]:
    """Pixels of the image that a mask's pixels reach on one axis, and their weights float32 (pixels, size)."""
    scale = max(float(high - low), 1e-3) / size
    # Half a mask's pixel beyond the box the value has fallen to half of the outermost one, beyond a whole one to 0.
    first, last = max(0, int(np.floor(low - scale))), min(length, int(np.ceil(high + scale)))
    places = (np.arange(first, max(first, last)) + 0.5 - low) / scale - 0.5
    weights = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(size)))
    return slice(first, max(first, last)), weights.astype(np.float32)


def encoded(masks: np.ndarray, boxes: np.ndarray, width: int, height: int) -> List[bytes]:
    """Return the RLE of masks (D, m, m) over boxes (D, 4) in an image; the sizes are those of the image."""
    return [
        coco_masks.encode(paste(mask, box, width, height).view(np.uint8))["counts"] for mask, box in zip(masks, boxes)
    ]
