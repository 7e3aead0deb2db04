"""From anchors to samples, proposals and detections: what is computed of boxes, on any device.

Boxes are (left, top, right, bottom) on a plane where pixel n reaches from n to n + 1. The submitted code counts whole
pixels, its box (a, b, c, d) is (a, b, c + 1, d + 1) here: widths, areas and offsets are the same numbers.

Samples and proposals have fixed shapes: an image's objects are padded to G rows of which ``present`` says what is
there, and a sample has as many slots as the configuration says, of which some may be empty. Nothing waits for a device.
"""

import math
from typing import List, NamedTuple, Sequence, Tuple

import torch

from benchmarks.detection.pytorch import operators as suppression
from benchmarks.detection.pytorch.boxes import Found, best_of_images, decode
from benchmarks.maskrcnn.pytorch.config import Config

STRIDES = (4, 8, 16, 32, 64)
RPN_WEIGHTS = (1.0, 1.0, 1.0, 1.0)
HEAD_WEIGHTS = (10.0, 10.0, 5.0, 5.0)  # factors on the offsets of x, y, width and height
BACKGROUND, BETWEEN = -1, -2  # in place of an object's number

# -- anchors ----------------------------------------------------------------------------------------------


def grid_anchors(
    shapes: Sequence[Tuple[int, int]], sizes: Sequence[int], ratios: Sequence[float], device: torch.device
) -> List[torch.Tensor]:
    """(h * w * ratios, 4) of each level of ``shapes`` (h, w): row by row, all ratios of a cell together."""
    found = []
    for (height, width), stride, size in zip(shapes, STRIDES, sizes):
        cell = []  # around its middle, in the roundings of rpn/anchor_generator.py
        for ratio in ratios:
            columns = round(math.sqrt(stride * stride / ratio))
            half_width, half_height = columns * size / stride / 2, round(columns * ratio) * size / stride / 2
            middle = stride / 2
            cell.append([middle - half_width, middle - half_height, middle + half_width, middle + half_height])
        y, x = torch.meshgrid(torch.arange(height) * stride, torch.arange(width) * stride, indexing="ij")
        corners = torch.stack((x, y, x, y), dim=-1).view(-1, 1, 4)
        found.append((corners + torch.tensor(cell)).view(-1, 4).to(device))
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


# -- matched with the objects, and sampled for the losses --------------------------------------------------


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


# -- proposals and detections ----------------------------------------------------------------------------


class Proposals(NamedTuple):
    """Boxes in which an object may be, by falling score in each image."""

    boxes: torch.Tensor  # (B, P, 4)
    valid: torch.Tensor  # bool (B, P): which are there


class Limits(NamedTuple):
    candidates: int  # boxes of a level of an image, before the suppression
    proposals: int  # behind it: over all levels, and of all images together if ``of_batch``
    of_batch: bool
    overlap: float  # IoU above which the lower score of a level is removed


@torch.no_grad()
def propose(
    scores: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor],
    anchors: Sequence[torch.Tensor],
    sizes: torch.Tensor,
    limits: Limits,
    suppress: suppression.Suppress = suppression.keep_of_groups,
) -> Proposals:
    """Decode the best anchors of each level and remove what overlaps on a level; all shapes are fixed.

    As rpn/inference.py of the submissions has it: in training the limit is one of the batch, not of each image.

    Args:
        scores: logits (B, A) of each level, of which the first one has the most.
        offsets: (B, A, 4) of each level.
        anchors: (A, 4) of each level.
        sizes: (B, 2), width and height of the images.
        limits: how many.
        suppress: implementation of the suppression.
    """
    batch = sizes.shape[0]
    most = min(limits.candidates, scores[0].shape[1])
    kept_boxes: List[torch.Tensor] = []
    kept_scores: List[torch.Tensor] = []
    for score, offset, anchor in zip(scores, offsets, anchors):
        best = score.float().topk(min(most, score.shape[1]), dim=1)
        found = decode(take(offset.float(), best.indices), anchor[best.indices], RPN_WEIGHTS)
        missing = most - found.shape[1]
        kept_boxes.append(torch.nn.functional.pad(clip(found, sizes), (0, 0, 0, missing)))
        kept_scores.append(torch.nn.functional.pad(best.values, (0, missing), value=float("-inf")))
    boxes, values = torch.stack(kept_boxes, 1), torch.stack(kept_scores, 1)
    alive = values.isfinite().view(-1, most)
    stays = suppress(boxes.view(-1, most, 4), alive, limits.overlap).view(batch, -1)
    boxes, values = boxes.view(batch, -1, 4), values.view(batch, -1).masked_fill(~stays, float("-inf"))
    if limits.of_batch and limits.proposals < values.numel():
        chosen = values.view(-1).topk(limits.proposals).indices
        outside = torch.ones_like(values, dtype=torch.bool).view(-1).scatter_(0, chosen, False)
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
    suppress: suppression.Suppress = suppression.keep_of_groups,
) -> Found:
    """Give each proposal its classes' boxes, remove what overlaps in a class, and keep the best of each image.

    Args:
        logits: (B, P, C + 1) of the proposals.
        offsets: (B, P, C + 1, 4).
        proposals: what they belong to.
        sizes: (B, 2), width and height of the images.
        config: least score, IoU above which the lower score of a class is removed, and detections of an image.
        suppress: implementation of the suppression.
    """
    scores = logits.float().softmax(-1)[..., 1:].masked_fill(~proposals.valid.unsqueeze(-1), 0.0)
    image, proposal, label = (scores > config.score_threshold).nonzero(as_tuple=True)
    boxes = decode(offsets.float()[image, proposal, label + 1], proposals.boxes[image, proposal], HEAD_WEIGHTS)
    boxes = clip(boxes.unsqueeze(1), sizes[image]).squeeze(1)
    values = scores[image, proposal, label]
    kept = suppression.nms(boxes, values, image * scores.shape[-1] + label, config.nms_iou, suppress=suppress)
    kept = best_of_images(kept, image, config.detections)
    return Found(image[kept], boxes[kept], values[kept], label[kept] + 1)
