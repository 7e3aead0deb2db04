"""Inference as one program of fixed shapes: what model.py finds, without a number that waits for data.

Every image has as many proposals and detections as there may be, of which some are empty. Loops whose rounds depend on
the data are PyTorch's while_loop, which torch.export and ONNX have too. H, W and the batch may have any size.
"""

import copy
from typing import Sequence, Tuple

import torch
from torch import nn
from torch._higher_order_ops import while_loop
from torch.nn import functional

from benchmarks.detection.pytorch import operators as suppression
from benchmarks.detection.pytorch.boxes import Found, decode
from benchmarks.maskrcnn.pytorch import operators, regions
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.model import Model, RpnOutput

Outputs = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Served(nn.Module):
    """The network and all that follows it, up to the masks' probabilities."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.network, self._model = model.network, copy.copy(model)
        self._model.is_static = True
        self._model.operators = operators.Chosen({}, suppress=suppress, roi_align=roi_align, detect=detect)

    def forward(self, images: torch.Tensor, sizes: torch.Tensor) -> Outputs:
        """Boxes (B, D, 4), scores (B, D), labels int64 (B, D) and masks (B, D, 28, 28), by falling score.

        An empty place has label 0 and zeros.

        Args:
            images: uint8 (B, 3, H, W).
            sizes: float32 (B, 2): width and height of each image without its padding.
        """
        config = self._model.config
        levels, rpn_output = self.network(images)
        shapes = [(level.shape[2], level.shape[3]) for level in levels]
        grid = regions.grid_anchors(shapes, config.anchor_sizes, config.anchor_ratios, sizes.device)
        # A level may have fewer anchors than candidates are taken: that many more are added, which are never chosen.
        more = config.rpn_pre_nms_top_n_test
        rpn_output = RpnOutput(
            [functional.pad(each, (0, more), value=float("-inf")) for each in rpn_output.scores],
            [functional.pad(each, (0, 0, 0, more)) for each in rpn_output.offsets],
        )
        grid = [functional.pad(each, (0, 0, 0, more)) for each in grid]
        found, masks = self._model.run_heads(levels, rpn_output, grid, sizes)
        boxes, scores, labels = (each.unflatten(0, (-1, config.detections)) for each in found[1:])
        masks = masks.view(-1, config.detections, operators.MASK_SIZE, operators.MASK_SIZE)
        return boxes, scores, labels, masks * (labels > 0)[..., None, None]


def suppress(boxes: torch.Tensor, alive: torch.Tensor, threshold: float) -> torch.Tensor:
    """As keep_of_groups, of all pairs at once: after n rounds the first n are final, mostly all after a few."""
    above = suppression.overlapping(boxes.unbind(-1), 0, boxes.shape[1], threshold).triu(1)

    def changes(kept: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return (kept != before).any()

    def again(kept: torch.Tensor, before: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        return alive & ~(above & kept.unsqueeze(-1)).any(1), kept.clone()

    kept, _ = while_loop(changes, again, (alive.clone(), torch.zeros_like(alive)))
    return kept


def detect(
    logits: torch.Tensor,
    offsets: torch.Tensor,
    proposals: regions.Proposals,
    sizes: torch.Tensor,
    config: Config,
    _: suppression.Suppress,
) -> Found:
    """As regions.detect, with as many detections of each image as there may be: label 0 and zeros where none is."""
    classes, limit = logits.shape[2] - 1, config.detections
    scores = logits.softmax(-1)[..., 1:]
    scores = scores.masked_fill(~proposals.valid.unsqueeze(-1) | (scores <= config.score_threshold), 0.0)
    boxes = decode(offsets[:, :, 1:], proposals.boxes.unsqueeze(2), regions.HEAD_WEIGHTS)
    boxes = regions.clip(boxes, sizes).flatten(1, 2)
    picked = best_of_classes(boxes, scores, config.nms_iou, limit)
    values = scores.flatten(1).gather(1, picked.clamp(min=0)).masked_fill(picked < 0, 0.0)
    labels = (picked % classes + 1).masked_fill(picked < 0, 0)
    chosen = boxes.gather(1, picked.clamp(min=0).unsqueeze(-1).expand(-1, -1, 4))
    chosen = chosen.masked_fill((picked < 0).unsqueeze(-1), 0.0)
    images = torch.arange(boxes.shape[0], device=boxes.device).unsqueeze(1).expand(-1, limit).flatten()
    return Found(images, chosen.flatten(0, 1), values.flatten(), labels.flatten())


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
    return while_loop(some_left, pick, (number, scores.flatten(1).clone(), begin))[2]


def roi_align(
    features: Sequence[torch.Tensor], rois: torch.Tensor, images: torch.Tensor, bins: int, edge: float
) -> torch.Tensor:
    """As operators.roi_align: one pixel of the sixteen of all bins after the other."""
    level = operators.levels_of(rois, edge)
    heights, widths = (
        torch.cat([torch.full((1,), each.shape[axis], device=rois.device) for each in features]) for axis in (2, 3)
    )
    counts = features[0].shape[0] * heights * widths
    start = (counts.cumsum(0) - counts)[level] + images * heights[level] * widths[level]
    where = operators.Placed(start, heights[level], widths[level], 0.25 / (2.0 ** level.to(rois.dtype)))
    places, weights = operators.taps(rois, where, bins)
    table = operators.pixels(features)
    pooled = sum(
        functional.embedding(places[..., tap], table) * weights[..., tap : tap + 1] for tap in range(places.shape[-1])
    )
    return pooled.permute(0, 3, 1, 2)
