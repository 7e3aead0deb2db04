"""The feature maps of SSD, and how many default boxes each of their positions has; standard library only."""

from __future__ import annotations

from typing import List

FIRST_STRIDE = 8
"""Pixels between positions of the first map."""
HALVED = 4
"""Maps that come from the one before by a stride, the first one included; later ones lose a border of 1."""
MOST = 6
RATIOS = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))
"""Aspect ratios of each map, besides 1; each also the other way round."""


def map_sizes(image_size: int) -> List[int]:
    """Return the positions a side of each feature map: at most six, as long as one has a position."""
    sizes = [-(-image_size // FIRST_STRIDE)]
    while len(sizes) < MOST:
        last = sizes[-1]
        following = -(-last // 2) if len(sizes) < HALVED else last - 2
        if following < 1:
            break
        sizes.append(following)
    return sizes


def boxes_per_position(maps: int) -> List[int]:
    """Return the default boxes at each position of each of the first ``maps`` maps."""
    return [2 + 2 * len(ratios) for ratios in RATIOS[:maps]]
