"""Anchors, sampling, proposals and detections: computation on boxes, for any device.

Boxes are (left, top, right, bottom), with pixel n from n to n + 1. The box (a, b, c, d) of the submitted code counts
pixels and is (a, b, c + 1, d + 1) here: widths, areas and offsets are equal.

Samples and proposals have fixed shapes, without synchronization: an image's objects are padded to G rows with the
mask ``present``, and samples have a configured number of slots, some possibly empty.
"""

import math
from typing import List, NamedTuple, Sequence, Tuple

import torch

from benchmarks.detection.pytorch import operators as suppression
from benchmarks.detection.pytorch.boxes import DetectedBoxes, decode, top_per_image
from benchmarks.maskrcnn.pytorch.config import Config

STRIDES = (4, 8, 16, 32, 64)
RPN_WEIGHTS = (1.0, 1.0, 1.0, 1.0)
HEAD_WEIGHTS = (10.0, 10.0, 5.0, 5.0)  # factors on the offsets of x, y, width and height
BACKGROUND, BETWEEN = -1, -2  # instead of an object index

# -- anchors ----------------------------------------------------------------------------------------------


def grid_anchors(
    shapes: Sequence[Tuple[int, int]], sizes: Sequence[int], ratios: Sequence[float], device: torch.device
) -> List[torch.Tensor]:
    """Return anchors (h * w * ratios, 4) per level for ``shapes`` (h, w): row by row, all ratios per cell together."""
    levels = []
    for (height, width), stride, size in zip(shapes, STRIDES, sizes):
        cell = []  # relative to the centre, rounded as in rpn/anchor_generator.py
        for ratio in ratios:
            columns = round(math.sqrt(stride * stride / ratio))
            half_width, half_height = columns * size / stride / 2, round(columns * ratio) * size / stride / 2
            middle = stride / 2
            cell.append([middle - half_width, middle - half_height, middle + half_width, middle + half_height])
        y, x = torch.meshgrid(torch.arange(height) * stride, torch.arange(width) * stride, indexing="ij")
        corners = torch.stack((x, y, x, y), dim=-1).view(-1, 1, 4)
        levels.append((corners + torch.tensor(cell)).view(-1, 4).to(device))
    return levels


def clip(boxes: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Clip ``boxes`` (B, ..., 4) to images of ``sizes`` (B, 2), width and height.

    NaN becomes 0: a diverged training should stop because of the loss, not because an index is out of range.
    """
    limits = sizes.repeat(1, 2).view(-1, *[1] * (boxes.dim() - 2), 4).to(boxes.dtype)
    return torch.minimum(boxes.clamp(min=0).nan_to_num(0.0), limits)


def to_inclusive(boxes: torch.Tensor, edge: float) -> torch.Tensor:
    """Return ``boxes`` (..., 4) with inclusive corners, which the submitted code uses for pooling and masks."""
    return torch.cat((boxes[..., :2], boxes[..., 2:] - edge), -1) if edge else boxes


# -- matched with the objects, and sampled for the losses --------------------------------------------------


def match(
    quality: torch.Tensor, present: torch.Tensor, fg_iou: float, bg_iou: float, allow_low_quality: bool
) -> torch.Tensor:
    """Return the object int64 (B, N) of every box, BACKGROUND below ``bg_iou`` or BETWEEN it and ``fg_iou``.

    Args:
        quality: (B, G, N), IoU.
        present: bool (B, G): False for padding.
        fg_iou: minimum IoU for a match.
        bg_iou: IoU below which a box is background.
        allow_low_quality: also match the boxes with the highest IoU for an object, to their best object
            (Matcher.set_low_quality_matches_ of maskrcnn_benchmark).
    """
    quality = quality.masked_fill(~present.unsqueeze(2), -1.0)
    best, matched = quality.max(dim=1)
    labels = matched.masked_fill(best < fg_iou, BETWEEN).masked_fill_(best < bg_iou, BACKGROUND)
    if allow_low_quality:
        best_per_object = quality.amax(dim=2, keepdim=True)
        is_best = ((quality == best_per_object) & present.unsqueeze(2)).any(dim=1)
        labels = torch.where(is_best, matched, labels)
    return labels


def keys(seeds: torch.Tensor, count: int) -> torch.Tensor:
    """Return pseudo-random int64 (B, count) in 0..2^31 - 1 for ``seeds`` int64 (B,), equal on all devices.

    A hash, not a generator: results do not depend on the rank, on earlier draws or on a resume, and CUDA graphs can
    read the seeds. Uses the finalizer of MurmurHash3 (fmix32), applied two times.
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
    """Boxes sampled for a loss. Slots per image: objects first, then background, then empty."""

    positions: torch.Tensor  # int64 (B, S): of the boxes
    positive: torch.Tensor  # bool (B, S)
    filled: torch.Tensor  # bool (B, S)


def sample(matched: torch.Tensor, usable: torch.Tensor, seeds: torch.Tensor, slots: int, fraction: float) -> Sample:
    """Sample up to ``slots`` boxes per image, with objects up to ``fraction`` of the slots, and background.

    Args:
        matched: int64 (B, N), from ``match``.
        usable: bool (B, N): boxes that may be sampled.
        seeds: int64 (B,).
        slots: per image.
        fraction: maximum fraction of objects.
    """
    random_keys = keys(seeds, matched.shape[1])
    slots = min(slots, matched.shape[1])
    max_objects = min(int(slots * fraction), matched.shape[1])
    is_object = usable & (matched >= 0)
    is_background = usable & (matched == BACKGROUND)
    # Sample up to ``max_objects`` objects: those with the largest keys.
    order = random_keys.masked_fill(~is_object, -1)
    top = order.topk(max_objects, dim=1)
    is_sampled = torch.zeros_like(is_object).scatter_(1, top.indices, top.values >= 0)
    priority = torch.where(is_sampled, random_keys + (1 << 32), torch.where(is_background, random_keys, -1))
    best = priority.topk(slots, dim=1)
    return Sample(best.indices, best.values >= 1 << 32, best.values >= 0)


def take(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(B, S, ...) of ``values`` (B, N, ...) at ``positions`` int64 (B, S)."""
    index = positions.view(*positions.shape, *[1] * (values.dim() - 2)).expand(*positions.shape, *values.shape[2:])
    return values.gather(1, index)


def gather_objects(values: torch.Tensor, matched: torch.Tensor) -> torch.Tensor:
    """Return ``values`` (B, G, ...) for the matched objects, (B, N, ...); for an arbitrary object if unmatched."""
    return take(values, matched.clamp(min=0))


def is_inside(boxes: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Bool (B, N): which of ``boxes`` (N, 4) do not leave images of ``sizes`` (B, 2), width and height."""
    width, height = (sizes[:, axis : axis + 1].to(boxes.dtype) for axis in (0, 1))
    x0, y0, x1, y1 = boxes.unbind(-1)
    return (x0 >= 0) & (y0 >= 0) & (x1 <= width) & (y1 <= height)


# -- proposals and detections ----------------------------------------------------------------------------


class Proposals(NamedTuple):
    """Region proposals in descending order of scores per image."""

    boxes: torch.Tensor  # (B, P, 4)
    valid: torch.Tensor  # bool (B, P): which are there


class Limits(NamedTuple):
    candidates: int  # boxes per level and image before NMS
    proposals: int  # boxes after NMS: over all levels, and over all images if ``of_batch``
    of_batch: bool
    overlap: float  # IoU threshold of NMS within a level


@torch.no_grad()
def propose(
    scores: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor],
    anchors: Sequence[torch.Tensor],
    sizes: torch.Tensor,
    limits: Limits,
    suppress: suppression.Suppress = suppression.nms_mask,
) -> Proposals:
    """Decode the best anchors per level and apply NMS within levels; all shapes are fixed.

    As rpn/inference.py of the submissions: in training the limit applies to the batch, not to an image.

    Args:
        scores: logits (B, A) per level; the first level has the most anchors.
        offsets: (B, A, 4) per level.
        anchors: (A, 4) per level.
        sizes: (B, 2), width and height of the images.
        limits: numbers of boxes.
        suppress: implementation of NMS.
    """
    batch = sizes.shape[0]
    candidates = min(limits.candidates, scores[0].shape[1])
    kept_boxes: List[torch.Tensor] = []
    kept_scores: List[torch.Tensor] = []
    for score, offset, anchor in zip(scores, offsets, anchors):
        best = score.float().topk(min(candidates, score.shape[1]), dim=1)
        decoded = decode(take(offset.float(), best.indices), anchor[best.indices], RPN_WEIGHTS)
        missing = candidates - decoded.shape[1]
        kept_boxes.append(torch.nn.functional.pad(clip(decoded, sizes), (0, 0, 0, missing)))
        kept_scores.append(torch.nn.functional.pad(best.values, (0, missing), value=float("-inf")))
    boxes, values = torch.stack(kept_boxes, 1), torch.stack(kept_scores, 1)
    alive = values.isfinite().view(-1, candidates)
    stays = suppress(boxes.view(-1, candidates, 4), alive, limits.overlap).view(batch, -1)
    boxes, values = boxes.view(batch, -1, 4), values.view(batch, -1).masked_fill(~stays, float("-inf"))
    if limits.of_batch and limits.proposals < values.numel():
        top = values.view(-1).topk(limits.proposals).indices
        outside = torch.ones_like(values, dtype=torch.bool).view(-1).scatter_(0, top, False)
        values = values.masked_fill(outside.view_as(values), float("-inf"))
    best = values.topk(min(limits.proposals, values.shape[1]), dim=1)
    return Proposals(take(boxes, best.indices), best.values.isfinite())


@torch.no_grad()
def detect(
    logits: torch.Tensor,
    offsets: torch.Tensor,
    proposals: Proposals,
    sizes: torch.Tensor,
    config: Config,
    suppress: suppression.Suppress = suppression.nms_mask,
) -> DetectedBoxes:
    """Decode the boxes of all classes, apply NMS per class, and keep the best detections per image.

    Args:
        logits: (B, P, C + 1) of the proposals.
        offsets: (B, P, C + 1, 4).
        proposals: boxes to which the offsets refer.
        sizes: (B, 2), width and height of the images.
        config: score threshold, IoU threshold and detections per image.
        suppress: implementation of NMS.
    """
    scores = logits.float().softmax(-1)[..., 1:].masked_fill(~proposals.valid.unsqueeze(-1), 0.0)
    image, proposal, label = (scores > config.score_threshold).nonzero(as_tuple=True)
    boxes = decode(offsets.float()[image, proposal, label + 1], proposals.boxes[image, proposal], HEAD_WEIGHTS)
    boxes = clip(boxes.unsqueeze(1), sizes[image]).squeeze(1)
    values = scores[image, proposal, label]
    positions = suppression.nms(boxes, values, image * scores.shape[-1] + label, config.nms_iou, suppress=suppress)
    positions = top_per_image(positions, image, config.detections)
    return DetectedBoxes(image[positions], boxes[positions], values[positions], label[positions] + 1)
