"""Inference as one program of fixed shapes: what model.py's ``detect`` finds, without a number that waits for data.

Every image has as many proposals and detections as there may be, of which some are empty. Loops whose rounds depend on
the data are PyTorch's while_loop, which torch.export and ONNX have too. H, W and the batch may have any size.
"""

from __future__ import annotations

from typing import List, Sequence, Tuple

import torch
from torch import nn
from torch._higher_order_ops import while_loop
from torch.nn import functional

from benchmarks.detection.pytorch import nms
from benchmarks.maskrcnn.pytorch import anchors, operators
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.network import BOX_BINS, MASK_BINS, MASK_SIZE, MaskRCNN, Scored
from benchmarks.maskrcnn.pytorch.operators import POOLED_LEVELS, Placed
from benchmarks.maskrcnn.pytorch.proposals import Limits, Proposals, propose

Outputs = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Served(nn.Module):
    """The network and all that follows it, up to the masks' probabilities."""

    def __init__(self, network: MaskRCNN, config: Config) -> None:
        super().__init__()
        self.network, self.config = network, config

    def forward(self, images: torch.Tensor, sizes: torch.Tensor) -> Outputs:
        """Boxes (B, D, 4), scores (B, D), labels int64 (B, D) and masks (B, D, 28, 28), by falling score.

        An empty place has label 0 and zeros.

        Args:
            images: uint8 (B, 3, H, W).
            sizes: float32 (B, 2): width and height of each image without its padding.
        """
        levels, scored = self.network(images)
        found = self._proposals(levels, scored, sizes)
        pooled = roi_align(levels[:POOLED_LEVELS], found.boxes, BOX_BINS, self.config.edge)
        logits, offsets = self.network.boxes(pooled)
        boxes, scores, labels = self._detections(logits, offsets, found, sizes)
        pooled = roi_align(levels[:POOLED_LEVELS], boxes, MASK_BINS, self.config.edge)
        masks = self.network.masks(pooled, labels.flatten()).sigmoid()
        masks = masks.view(-1, self.config.detections, MASK_SIZE, MASK_SIZE)
        return boxes, scores, labels, masks * (labels > 0)[..., None, None]

    def _proposals(self, levels: List[torch.Tensor], scored: Scored, sizes: torch.Tensor) -> Proposals:
        config = self.config
        shapes = [(level.shape[2], level.shape[3]) for level in levels]
        grid = anchors.grid_anchors(shapes, config.anchor_sizes, config.anchor_ratios, sizes.device)
        # A level may have fewer anchors than candidates are taken: so many more, that are never chosen.
        more = config.candidates_test
        return propose(
            [functional.pad(each, (0, more), value=float("-inf")) for each in scored.scores],
            [functional.pad(each, (0, 0, 0, more)) for each in scored.offsets],
            [functional.pad(each, (0, 0, 0, more)) for each in grid],
            sizes,
            Limits(more, config.proposals_test, False, config.proposal_overlap),
            suppress,
        )

    def _detections(
        self, logits: torch.Tensor, offsets: torch.Tensor, found: Proposals, sizes: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Boxes (B, D, 4), scores (B, D) and labels int64 (B, D) of logits (B * P, C + 1)."""
        config, classes = self.config, logits.shape[1] - 1
        count = found.boxes.shape[1]
        scores = logits.softmax(-1)[:, 1:].view(-1, count, classes)
        scores = scores.masked_fill(~found.valid.unsqueeze(-1) | (scores <= config.score_threshold), 0.0)
        boxes = anchors.decode(
            offsets.view(-1, count, classes + 1, 4)[:, :, 1:], found.boxes.unsqueeze(2), anchors.HEAD_WEIGHTS
        )
        boxes = anchors.clip(boxes, sizes).flatten(1, 2)
        picked = best_of_classes(boxes, scores, config.detection_overlap, config.detections)
        values = scores.flatten(1).gather(1, picked.clamp(min=0))
        values = values.masked_fill(picked < 0, 0.0)
        labels = (picked % classes + 1).masked_fill(picked < 0, 0)
        chosen = boxes.gather(1, picked.clamp(min=0).unsqueeze(-1).expand(-1, -1, 4))
        return chosen.masked_fill((picked < 0).unsqueeze(-1), 0.0), values, labels


def suppress(boxes: torch.Tensor, alive: torch.Tensor, threshold: float) -> torch.Tensor:
    """As nms.keep_of_groups, of all pairs at once: after n rounds the first n are final, mostly all after a few."""
    above = nms.overlapping(boxes.unbind(-1), 0, boxes.shape[1], threshold).triu(1)

    def changes(kept: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return (kept != before).any()

    def again(kept: torch.Tensor, before: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        return alive & ~(above & kept.unsqueeze(-1)).any(1), kept.clone()

    kept, _ = while_loop(changes, again, (alive.clone(), torch.zeros_like(alive)))
    found: torch.Tensor = kept
    return found


def best_of_classes(boxes: torch.Tensor, scores: torch.Tensor, threshold: float, limit: int) -> torch.Tensor:
    """Return the positions int64 (B, limit) in P * C that proposals.detect keeps, by falling score; -1: none is left.

    The best box of all classes is kept and removes what overlaps it in its class, ``limit`` times: whatever is kept
    later has a lower score.

    Args:
        boxes: (B, P * C, 4).
        scores: (B, P, C), 0 where there is no detection.
        threshold: IoU above which the lower score of a class is removed.
        limit: detections of an image.
    """
    classes = scores.shape[2]
    share = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1]) * (threshold / (1 + threshold))
    places = torch.arange(limit, device=boxes.device)
    label = torch.arange(scores.shape[1] * classes, device=boxes.device) % classes

    def some_left(number: torch.Tensor, left: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        return (number < limit) & (left > 0).any()

    def pick(
        number: torch.Tensor, left: torch.Tensor, picked: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        value, best = left.max(1, keepdim=True)
        box = boxes.gather(1, best.unsqueeze(-1).expand(-1, -1, 4))
        width = torch.minimum(boxes[..., 2], box[..., 2]) - torch.maximum(boxes[..., 0], box[..., 0])
        height = torch.minimum(boxes[..., 3], box[..., 3]) - torch.maximum(boxes[..., 1], box[..., 1])
        overlaps = width.clamp(min=0) * height.clamp(min=0) > share + share.gather(1, best)
        same = label == best % classes
        gone = (overlaps & same) | (torch.arange(left.shape[1], device=boxes.device) == best)
        here = (places == number) & (value > 0)
        return number + 1, left.masked_fill(gone, 0.0), torch.where(here, best, picked)

    begin = torch.full((boxes.shape[0], limit), -1, dtype=torch.int64, device=boxes.device)
    number = torch.zeros((), dtype=torch.int64, device=boxes.device)
    found: torch.Tensor = while_loop(some_left, pick, (number, scores.flatten(1).clone(), begin))[2]
    return found


def roi_align(features: Sequence[torch.Tensor], rois: torch.Tensor, bins: int, edge: float) -> torch.Tensor:
    """As operators.roi_align, of boxes (B, S, 4): one pixel of the sixteen of all bins after the other."""
    batch, count = rois.shape[0], rois.shape[1]
    images = torch.arange(batch, device=rois.device).unsqueeze(1).expand(batch, count).flatten()
    level, boxes = operators.levels_of(rois.flatten(0, 1)), anchors.sampled(rois.flatten(0, 1), edge)
    heights, widths = (
        torch.cat([torch.full((1,), each.shape[axis], device=rois.device) for each in features]) for axis in (2, 3)
    )
    counts = batch * heights * widths
    start = (counts.cumsum(0) - counts)[level] + images * heights[level] * widths[level]
    where = Placed(start, heights[level], widths[level], 0.25 / (2.0 ** level.to(rois.dtype)))
    places, weights = operators.taps(boxes, where, bins)
    table = operators.pixels(features)
    pooled = sum(
        functional.embedding(places[..., tap], table) * weights[..., tap : tap + 1] for tap in range(places.shape[-1])
    )
    return pooled.permute(0, 3, 1, 2)
