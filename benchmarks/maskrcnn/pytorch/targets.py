"""What anchors and RoIs should be: matched with the objects, and sampled for the losses.

Everything has a fixed shape: an image's objects are padded to G rows of which ``present`` says what is there, and a
sample has as many slots as the configuration says, of which some may be empty. Nothing waits for a device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BACKGROUND, BETWEEN = -1, -2


def match(quality: torch.Tensor, present: torch.Tensor, high: float, low: float, rescue: bool) -> torch.Tensor:
    """Return the object int64 (B, N) of each box, BACKGROUND below ``low`` or BETWEEN it and ``high``.

    Args:
        quality: (B, G, N), overlaps.
        present: bool (B, G), which objects are there.
        high: least overlap of a match.
        low: least overlap that is not background.
        rescue: give the boxes that overlap an object most, whatever the overlap, their own best object
            (Matcher.set_low_quality_matches_ of maskrcnn_benchmark).
    """
    quality = quality.masked_fill(~present.unsqueeze(2), -1.0)
    best, matched = quality.max(dim=1)
    found = matched.masked_fill(best < high, BETWEEN).masked_fill_(best < low, BACKGROUND)
    if rescue:
        most = quality.amax(dim=2, keepdim=True)
        is_best = ((quality == most) & present.unsqueeze(2)).any(dim=1)
        found = torch.where(is_best, matched, found)
    return found


def keys(seeds: torch.Tensor, count: int) -> torch.Tensor:
    """Return pseudo-random int64 (B, count) in 0..2^31 - 1 of ``seeds`` int64 (B,): the same on every device.

    A hash instead of a generator: which rank has an image, what was drawn before, and a resume change nothing, and a
    CUDA graph reads the seeds. The mixing is that of MurmurHash3 (fmix32), twice.
    """
    numbers = torch.arange(count, device=seeds.device)
    mixed = _mix((seeds.unsqueeze(1) + numbers * 0x9E3779B1) & 0xFFFFFFFF)
    return _mix((mixed + numbers) & 0xFFFFFFFF) >> 1


def _mix(value: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        value = value ^ (value >> shift)
        # A product of 32 bits by 32 fits no int64: by halves.
        value = (((value >> 16) * factor & 0xFFFF) << 16) + (value & 0xFFFF) * factor & 0xFFFFFFFF
    return value ^ (value >> 16)


class Sample(NamedTuple):
    """Boxes that a loss looks at: the slots of each image hold objects, then background, then nothing."""

    positions: torch.Tensor  # int64 (B, S): of the boxes
    positive: torch.Tensor  # bool (B, S)
    filled: torch.Tensor  # bool (B, S)


def sample(matched: torch.Tensor, usable: torch.Tensor, seeds: torch.Tensor, slots: int, share: float) -> Sample:
    """Draw up to ``slots`` boxes of each image, of which at most ``share`` are objects, and the others background.

    Args:
        matched: int64 (B, N), of ``match``.
        usable: bool (B, N), which boxes may be drawn.
        seeds: int64 (B,).
        slots: of an image.
        share: of the slots.
    """
    drawn = keys(seeds, matched.shape[1])
    slots = min(slots, matched.shape[1])
    most = min(int(slots * share), matched.shape[1])
    is_object = usable & (matched >= 0)
    is_background = usable & (matched == BACKGROUND)
    # Rank among the objects: all but the first ``most`` leave.
    order = drawn.masked_fill(~is_object, -1)
    chosen = order.topk(most, dim=1)
    kept = torch.zeros_like(is_object).scatter_(1, chosen.indices, chosen.values >= 0)
    priority = torch.where(kept, drawn + (1 << 32), torch.where(is_background, drawn, -1))
    best = priority.topk(slots, dim=1)
    return Sample(best.indices, best.values >= 1 << 32, best.values >= 0)


def take(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(B, S, ...) of ``values`` (B, N, ...) at ``positions`` int64 (B, S)."""
    index = positions.view(*positions.shape, *[1] * (values.dim() - 2)).expand(*positions.shape, *values.shape[2:])
    return values.gather(1, index)


def of_objects(values: torch.Tensor, matched: torch.Tensor) -> torch.Tensor:
    """(B, N, ...) of the objects' ``values`` (B, G, ...) for each box; any object's where there is no match."""
    return take(values, matched.clamp(min=0))


def inside(boxes: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Bool (B, N): which of ``boxes`` (N, 4) do not leave images of ``sizes`` (B, 2), width and height."""
    width, height = (sizes[:, axis : axis + 1].to(boxes.dtype) for axis in (0, 1))
    left, top, right, bottom = boxes.unbind(-1)
    return (left >= 0) & (top >= 0) & (right <= width) & (bottom <= height)
