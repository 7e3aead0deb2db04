"""Anchors of the pyramid's levels, and where boxes end.

Boxes are (left, top, right, bottom) on a plane where pixel n reaches from n to n + 1. The submitted code counts whole
pixels, its box (a, b, c, d) is (a, b, c + 1, d + 1) here: widths, areas and offsets are the same numbers.
"""

from __future__ import annotations

import math
from typing import List, Sequence, Tuple

import torch

STRIDES = (4, 8, 16, 32, 64)
RPN_WEIGHTS = (1.0, 1.0, 1.0, 1.0)
HEAD_WEIGHTS = (10.0, 10.0, 5.0, 5.0)  # factors on the offsets of x, y, width and height


def cell_anchors(stride: int, size: int, ratios: Sequence[float]) -> torch.Tensor:
    """(len(ratios), 4): anchors around a cell's middle, in the roundings of rpn/anchor_generator.py."""
    found = []
    for ratio in ratios:
        width = round(math.sqrt(stride * stride / ratio))
        half_width, half_height = width * size / stride / 2, round(width * ratio) * size / stride / 2
        middle = stride / 2
        found.append([middle - half_width, middle - half_height, middle + half_width, middle + half_height])
    return torch.tensor(found)


def grid_anchors(
    shapes: Sequence[Tuple[int, int]], sizes: Sequence[int], ratios: Sequence[float], device: torch.device
) -> List[torch.Tensor]:
    """(h * w * ratios, 4) of each level of ``shapes`` (h, w): row by row, all ratios of a cell together."""
    found = []
    for (height, width), stride, size in zip(shapes, STRIDES, sizes):
        y, x = torch.meshgrid(torch.arange(height) * stride, torch.arange(width) * stride, indexing="ij")
        corners = torch.stack((x, y, x, y), dim=-1).view(-1, 1, 4)
        found.append((corners + cell_anchors(stride, size, ratios)).view(-1, 4).to(device))
    return found


def clip(boxes: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return ``boxes`` (B, ..., 4) cut to images of ``sizes`` (B, 2), width and height.

    What is not a number becomes 0: a training that diverged ends by its loss, and not by an index outside a tensor.
    """
    most = sizes.repeat(1, 2).view(-1, *[1] * (boxes.dim() - 2), 4).to(boxes.dtype)
    return torch.minimum(boxes.clamp(min=0).nan_to_num(0.0), most)


def sampled(boxes: torch.Tensor, edge: float) -> torch.Tensor:
    """Return ``boxes`` (..., 4) as they are pooled and drawn: the submitted code does both on (a, b, c, d)."""
    return torch.cat((boxes[..., :2], boxes[..., 2:] - edge), -1) if edge else boxes
