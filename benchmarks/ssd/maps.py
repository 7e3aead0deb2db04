"""The default boxes of SSD's feature maps; standard library only."""

from __future__ import annotations

from typing import List

RATIOS = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))
"""Aspect ratios of each map, besides 1; each also the other way round."""


def boxes_per_position(maps: int) -> List[int]:
    """Return the default boxes at each position of each of the first ``maps`` maps."""
    return [2 + 2 * len(ratios) for ratios in RATIOS[:maps]]
