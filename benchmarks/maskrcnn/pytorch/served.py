"""Inference with fixed shapes for export: results of model.py without data-dependent shapes.

Images have the maximum number of proposals and detections, some empty. Data-dependent loops use while_loop, which
torch.export and ONNX support. H, W and the batch size are dynamic.
"""

import copy
from typing import Sequence, Tuple

import torch
from torch import nn
from torch._higher_order_ops import while_loop
from torch.nn import functional

from benchmarks.detection.pytorch import operators as suppression
from benchmarks.detection.pytorch.boxes import DetectedBoxes, decode
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
        self._model.operators = operators.OperatorSet({}, suppress=suppress, roi_align=roi_align, detect=detect)

    def forward(self, images: torch.Tensor, sizes: torch.Tensor) -> Outputs:
        """Return boxes (B, D, 4), scores (B, D), labels int64 (B, D) and masks (B, D, 28, 28), by descending score.

        Empty slots have label 0 and zeros.

        Args:
            images: uint8 (B, 3, H, W).
            sizes: float32 (B, 2): width and height without padding.
        """
        config = self._model.config
        levels, rpn_output = self.network(images)
        shapes = [(level.shape[2], level.shape[3]) for level in levels]
        grid = regions.grid_anchors(shapes, config.anchor_sizes, config.anchor_ratios, sizes.device)
        # Pad levels that may have fewer anchors than the number of candidates. Padding is never selected.
        padding = config.rpn_pre_nms_top_n_test
        rpn_output = RpnOutput(
            [functional.pad(tensor, (0, padding), value=float("-inf")) for tensor in rpn_output.scores],
            [functional.pad(tensor, (0, 0, 0, padding)) for tensor in rpn_output.offsets],
        )
        grid = [functional.pad(tensor, (0, 0, 0, padding)) for tensor in grid]
        detected, masks = self._model.run_heads(levels, rpn_output, grid, sizes)
        boxes, scores, labels = (tensor.unflatten(0, (-1, config.detections)) for tensor in detected[1:])
        masks = masks.view(-1, config.detections, operators.MASK_SIZE, operators.MASK_SIZE)
        return boxes, scores, labels, masks * (labels > 0)[..., None, None]


def suppress(boxes: torch.Tensor, alive: torch.Tensor, threshold: float) -> torch.Tensor:
    """Like nms_mask, for all pairs in parallel. After n iterations the first n boxes are final; usually few suffice."""
    above = suppression.overlapping(boxes.unbind(-1), 0, boxes.shape[1], threshold).triu(1)

    def changes(keep: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        return (keep != previous).any()

    def again(keep: torch.Tensor, previous: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        return alive & ~(above & keep.unsqueeze(-1)).any(1), keep.clone()

    keep, _ = while_loop(changes, again, (alive.clone(), torch.zeros_like(alive)))
    return keep


def detect(
    logits: torch.Tensor,
    offsets: torch.Tensor,
    proposals: regions.Proposals,
    sizes: torch.Tensor,
    config: Config,
    _: suppression.Suppress,
) -> DetectedBoxes:
    """Like regions.detect, with the maximum number of detections per image; empty slots have label 0 and zeros."""
    classes, limit = logits.shape[2] - 1, config.detections
    scores = logits.softmax(-1)[..., 1:]
    scores = scores.masked_fill(~proposals.valid.unsqueeze(-1) | (scores <= config.score_threshold), 0.0)
    boxes = decode(offsets[:, :, 1:], proposals.boxes.unsqueeze(2), regions.HEAD_WEIGHTS)
    boxes = regions.clip(boxes, sizes).flatten(1, 2)
    picked = best_of_classes(boxes, scores, config.nms_iou, limit)
    values = scores.flatten(1).gather(1, picked.clamp(min=0)).masked_fill(picked < 0, 0.0)
    labels = (picked % classes + 1).masked_fill(picked < 0, 0)
    picked_boxes = boxes.gather(1, picked.clamp(min=0).unsqueeze(-1).expand(-1, -1, 4))
    picked_boxes = picked_boxes.masked_fill((picked < 0).unsqueeze(-1), 0.0)
    images = torch.arange(boxes.shape[0], device=boxes.device).unsqueeze(1).expand(-1, limit).flatten()
    return DetectedBoxes(images, picked_boxes.flatten(0, 1), values.flatten(), labels.flatten())


def best_of_classes(boxes: torch.Tensor, scores: torch.Tensor, threshold: float, limit: int) -> torch.Tensor:
    """Return the positions int64 (B, limit) in P * C that regions.detect keeps, by descending score; -1 for empty
    slots.

    The best box of all classes is kept and removes overlapping boxes in the same class, ``limit`` times. Later boxes
    have lower scores.

    Args:
        boxes: (B, P * C, 4).
        scores: (B, P, C), 0 for invalid entries.
        threshold: IoU threshold of NMS within a class.
        limit: detections per image.
    """
    classes = scores.shape[2]
    share = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1]) * (threshold / (1 + threshold))
    slots = torch.arange(limit, device=boxes.device)
    label = torch.arange(scores.shape[1] * classes, device=boxes.device) % classes

    def has_remaining(number: torch.Tensor, remaining: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        return (number < limit) & (remaining > 0).any()

    def pick(
        number: torch.Tensor, remaining: torch.Tensor, picked: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        value, best = remaining.max(1, keepdim=True)
        box = boxes.gather(1, best.unsqueeze(-1).expand(-1, -1, 4))
        width = torch.minimum(boxes[..., 2], box[..., 2]) - torch.maximum(boxes[..., 0], box[..., 0])
        height = torch.minimum(boxes[..., 3], box[..., 3]) - torch.maximum(boxes[..., 1], box[..., 1])
        overlaps = width.clamp(min=0) * height.clamp(min=0) > share + share.gather(1, best)
        same = label == best % classes
        gone = (overlaps & same) | (torch.arange(remaining.shape[1], device=boxes.device) == best)
        here = (slots == number) & (value > 0)
        return number + 1, remaining.masked_fill(gone, 0.0), torch.where(here, best, picked)

    initial = torch.full((boxes.shape[0], limit), -1, dtype=torch.int64, device=boxes.device)
    number = torch.zeros((), dtype=torch.int64, device=boxes.device)
    return while_loop(has_remaining, pick, (number, scores.flatten(1).clone(), initial))[2]


def roi_align(
    features: Sequence[torch.Tensor], rois: torch.Tensor, images: torch.Tensor, bins: int, edge: float
) -> torch.Tensor:
    """As operators.roi_align: one pixel of the sixteen of all bins after the other."""
    level = operators.levels_of(rois, edge)
    heights, widths = (
        torch.cat([torch.full((1,), feature.shape[axis], device=rois.device) for feature in features])
        for axis in (2, 3)
    )
    counts = features[0].shape[0] * heights * widths
    start = (counts.cumsum(0) - counts)[level] + images * heights[level] * widths[level]
    location = operators.RoiLocations(start, heights[level], widths[level], 0.25 / (2.0 ** level.to(rois.dtype)))
    rows, weights = operators.sampling_points(rois, location, bins)
    table = operators.pixels(features)
    pooled = sum(
        functional.embedding(rows[..., tap], table) * weights[..., tap : tap + 1] for tap in range(rows.shape[-1])
    )
    return pooled.permute(0, 3, 1, 2)
