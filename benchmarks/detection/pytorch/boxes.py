"""Boxes as tensors (..., 4) of floats: left, top, right, bottom, or x, y, width, height (of a corner or the centre).

Sizes are continuous: no pixel is added to them.
"""

from __future__ import annotations

import torch


def area(ltrb: torch.Tensor) -> torch.Tensor:
    """Areas (...) of boxes (..., 4)."""
    return (ltrb[..., 2] - ltrb[..., 0]) * (ltrb[..., 3] - ltrb[..., 1])


def overlaps(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Intersection over union (..., N, M) of boxes (..., N, 4) and (..., M, 4); of two points 0."""
    corner = torch.maximum(one[..., :, None, :2], other[..., None, :, :2])
    opposite = torch.minimum(one[..., :, None, 2:], other[..., None, :, 2:])
    both = (opposite - corner).clamp_(min=0).prod(-1)
    union = area(one)[..., :, None] + area(other)[..., None, :] - both
    return torch.where(both > 0, both / union, torch.zeros_like(both))


def ltrb_to_xywh(ltrb: torch.Tensor) -> torch.Tensor:
    """Turn corners into left, top, width, height, as COCO has boxes."""
    return torch.cat((ltrb[..., :2], ltrb[..., 2:] - ltrb[..., :2]), -1)


def xywh_to_ltrb(xywh: torch.Tensor) -> torch.Tensor:
    """Turn left, top, width, height into corners."""
    return torch.cat((xywh[..., :2], xywh[..., :2] + xywh[..., 2:]), -1)


def ltrb_to_centre(ltrb: torch.Tensor) -> torch.Tensor:
    """Turn corners into the centre's x and y, width, height."""
    return torch.cat(((ltrb[..., :2] + ltrb[..., 2:]) / 2, ltrb[..., 2:] - ltrb[..., :2]), -1)


def centre_to_ltrb(centre: torch.Tensor) -> torch.Tensor:
    """Turn the centre's x and y, width, height into corners."""
    half = centre[..., 2:] / 2
    return torch.cat((centre[..., :2] - half, centre[..., :2] + half), -1)


def clipped(ltrb: torch.Tensor, width: torch.Tensor, height: torch.Tensor) -> torch.Tensor:
    """Return boxes (..., N, 4) within images of ``width`` (...) and ``height`` (...)."""
    most = torch.stack((width, height, width, height), -1).to(ltrb).unsqueeze(-2)
    return torch.minimum(ltrb.clamp(min=0), most)
