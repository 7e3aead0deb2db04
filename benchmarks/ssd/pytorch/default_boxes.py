"""The default boxes of SSD: where each position of each feature map looks for objects; NumPy only.

As the MLPerf reference has them for 300 x 300 (dboxes300_coco in box_coder.py of the submissions): six maps of 38, 19,
10, 5, 3 and 1 positions a side and 8,732 boxes. Other image sizes follow the same rules. In contrast to the reference
the boxes of one position are next to each other, as a channels_last convolution writes its outputs.
"""

from __future__ import annotations

from math import sqrt
from typing import List, Tuple

import numpy as np

from benchmarks.ssd.pytorch.config import FIRST_STRIDE, HALVED, RATIOS, map_sizes


def _cells(image_size: int, number: int, size: int) -> float:
    # Positions a side of a map, of which the last one may reach out of the image
    return image_size / (FIRST_STRIDE << number) if number < HALVED else float(size)


def _shapes(scale: float, following: float, ratios: Tuple[int, ...]) -> List[Tuple[float, float]]:
    # Widths and heights of the boxes at a position, as shares of the image
    middle = sqrt(scale * following)
    shapes = [(scale, scale), (middle, middle)]
    for ratio in ratios:
        wide, narrow = scale * sqrt(ratio), scale / sqrt(ratio)
        shapes += [(wide, narrow), (narrow, wide)]
    return shapes


def default_boxes(image_size: int, scales: Tuple[float, ...]) -> np.ndarray:
    """Return left, top, right, bottom of all boxes, float32 (boxes, 4), as shares of the image.

    Args:
        image_size: pixels a side.
        scales: size of the smaller square box of each map, and one more, as shares of the image.
    """
    found = []
    for number, size in enumerate(map_sizes(image_size)):
        centres = (np.arange(size) + 0.5) / _cells(image_size, number, size)
        shapes = np.array(_shapes(scales[number], scales[number + 1], RATIOS[number]))
        y, x, shape = np.meshgrid(centres, centres, np.arange(len(shapes)), indexing="ij")
        found.append(np.stack((x, y, shapes[shape, 0], shapes[shape, 1]), -1).reshape(-1, 4))
    # As the reference: neither a centre nor a size is larger than the image, but the corners may be outside.
    boxes = np.concatenate(found).clip(0.0, 1.0)
    half = boxes[:, 2:] / 2
    return np.concatenate((boxes[:, :2] - half, boxes[:, :2] + half), 1).astype(np.float32)
