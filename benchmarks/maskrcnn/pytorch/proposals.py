"""From the anchors' scores and offsets to proposals, and from the heads' results to detections."""

from __future__ import annotations

from typing import List, NamedTuple, Sequence

import torch

from benchmarks.detection.pytorch import nms
from benchmarks.detection.pytorch.boxes import Found, best_of_images, decode
from benchmarks.maskrcnn.pytorch.anchors import HEAD_WEIGHTS, RPN_WEIGHTS, clip
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.targets import take


class Proposals(NamedTuple):
    """Boxes in which an object may be, by falling score in each image."""

    boxes: torch.Tensor  # (B, P, 4)
    valid: torch.Tensor  # bool (B, P): which are there


class Limits(NamedTuple):
    """How many boxes go how far."""

    candidates: int  # of a level of an image, before the suppression
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
    suppress: nms.Suppress = nms.keep_of_groups,
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


def trimmed(proposals: Proposals) -> Proposals:
    """Drop the columns that no image fills; waits for the device."""
    most = max(1, int(proposals.valid.sum(1).max()))
    return Proposals(proposals.boxes[:, :most], proposals.valid[:, :most])


@torch.no_grad()
def detect(
    logits: torch.Tensor,
    offsets: torch.Tensor,
    proposals: Proposals,
    sizes: torch.Tensor,
    config: Config,
    suppress: nms.Suppress = nms.keep_of_groups,
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
    kept = nms.nms(boxes, values, image * scores.shape[-1] + label, config.nms_iou, suppress=suppress)
    kept = best_of_images(kept, image, config.detections)
    return Found(image[kept], boxes[kept], values[kept], label[kept] + 1)
