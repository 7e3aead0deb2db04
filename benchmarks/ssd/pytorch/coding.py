"""Objects as what the network learns to give for each default box, and back.

Boxes are shares of the image. DALI's box encoder does the same to the training images (data.py); what is here is for
detections, for measurements and for the tests.
"""

from __future__ import annotations

from typing import Tuple

import torch

from benchmarks.detection.pytorch.boxes import centre_to_ltrb, ltrb_to_centre, overlaps

VARIANCES = (0.1, 0.1, 0.2, 0.2)
"""Of the centre's x and y, of width and height: scale_xy and scale_wh of the reference."""


def encode(ltrb: torch.Tensor, defaults: torch.Tensor) -> torch.Tensor:
    """Return the offsets (..., 4) of boxes (..., 4) from ``defaults`` (..., 4), centre, width, height.

    Liu et al. 2016, arXiv 1512.02325, equation 2, divided by the variances.
    """
    centre = ltrb_to_centre(ltrb)
    place = (centre[..., :2] - defaults[..., :2]) / defaults[..., 2:]
    size = (centre[..., 2:] / defaults[..., 2:]).log()
    return torch.cat((place, size), -1) / centre.new_tensor(VARIANCES)


def decode(offsets: torch.Tensor, defaults: torch.Tensor) -> torch.Tensor:
    """Return the corners of the boxes whose offsets from ``defaults`` are given: the inverse of ``encode``."""
    scaled = offsets * offsets.new_tensor(VARIANCES)
    place = scaled[..., :2] * defaults[..., 2:] + defaults[..., :2]
    return centre_to_ltrb(torch.cat((place, scaled[..., 2:].exp() * defaults[..., 2:]), -1))


def match(
    ltrb: torch.Tensor, labels: torch.Tensor, defaults: torch.Tensor, threshold: float = 0.5
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Give each default box the object that it overlaps most, if by more than ``threshold``.

    Each object takes the default box that overlaps it most in any case; of two that want the same one, the later.

    Args:
        ltrb: (objects, 4), one at least.
        labels: int (objects,), above 0.
        defaults: (boxes, 4), centre, width, height.
        threshold: intersection over union.

    Returns:
        Offsets (boxes, 4), 0 for the background, and labels (boxes,), 0 for the background.
    """
    found = overlaps(ltrb, centre_to_ltrb(defaults))
    best, chosen = found.max(0)
    # One at a time: of an assignment to the same place twice PyTorch does not say which one stays.
    for number, place in enumerate(found.argmax(1).tolist()):
        best[place], chosen[place] = 2.0, number
    positive = best > threshold
    offsets = torch.where(positive[:, None], encode(ltrb[chosen], defaults), torch.zeros_like(defaults))
    return offsets, torch.where(positive, labels[chosen], torch.zeros_like(chosen))
