"""Anchors of the pyramid's levels, and boxes as offsets from them.

Boxes are (left, top, right, bottom) on a plane where pixel n reaches from n to n + 1. The submitted code counts whole
pixels, its box (a, b, c, d) is (a, b, c + 1, d + 1) here: widths, areas and offsets are the same numbers.
"""

from __future__ import annotations

import math
from typing import List, Sequence, Tuple

import torch

STRIDES = (4, 8, 16, 32, 64)
LARGEST = math.log(1000 / 16)
"""Of a size's offset, so that its exponential stays finite (maskrcnn_benchmark/modeling/box_coder.py)."""
RPN_WEIGHTS = (1.0, 1.0, 1.0, 1.0)
HEAD_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
"""Factors on the offsets of x, y, width and height."""


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


def encode(boxes: torch.Tensor, anchors: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """(..., 4): offsets of ``boxes`` from ``anchors`` (arXiv 1506.01497, equation 2), times ``weights``."""
    x, y, width, height = _centres(anchors)
    their_x, their_y, their_width, their_height = _centres(boxes)
    offsets = (
        (their_x - x) / width,
        (their_y - y) / height,
        torch.log(their_width / width),
        torch.log(their_height / height),
    )
    return torch.stack([weight * offset for weight, offset in zip(weights, offsets)], dim=-1)


def decode(offsets: torch.Tensor, anchors: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """(..., 4): the boxes at ``offsets`` from ``anchors``; the inverse of ``encode`` up to the limit of a size."""
    x, y, width, height = _centres(anchors)
    dx, dy, dw, dh = (offset / weight for offset, weight in zip(offsets.unbind(-1), weights))
    middle_x, middle_y = x + dx * width, y + dy * height
    half_width = dw.clamp(max=LARGEST).exp() * width / 2
    half_height = dh.clamp(max=LARGEST).exp() * height / 2
    corners = (middle_x - half_width, middle_y - half_height, middle_x + half_width, middle_y + half_height)
    return torch.stack(corners, dim=-1)


def clip(boxes: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return ``boxes`` (B, ..., 4) cut to images of ``sizes`` (B, 2), width and height.

    What is not a number becomes 0: a training that diverged ends by its loss, and not by an index outside a tensor.
    """
    most = sizes.repeat(1, 2).view(-1, *[1] * (boxes.dim() - 2), 4).to(boxes.dtype)
    return torch.minimum(boxes.clamp(min=0).nan_to_num(0.0), most)


def sampled(boxes: torch.Tensor, edge: float) -> torch.Tensor:
    """Return ``boxes`` (..., 4) as they are pooled and drawn: the submitted code does both on (a, b, c, d)."""
    return torch.cat((boxes[..., :2], boxes[..., 2:] - edge), -1) if edge else boxes


def _centres(boxes: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    left, top, right, bottom = boxes.unbind(-1)
    return (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
