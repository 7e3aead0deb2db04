"""The whole forward pass: images to the five losses, and images to detections with their masks.

The layers are in network.py, what is sampled of anchors and proposals in targets.py, the losses in losses.py.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.maskrcnn.pytorch import anchors, losses, targets, weights
from benchmarks.maskrcnn.pytorch.choice import Chosen
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.data import Batch, EvaluationBatch
from benchmarks.maskrcnn.pytorch.network import BOX_BINS, MASK_BINS, MASK_SIZE, MaskRCNN, Scored
from benchmarks.maskrcnn.pytorch.operators import POOLED_LEVELS
from benchmarks.maskrcnn.pytorch.proposals import Found, Limits, Proposals, detect, propose, trimmed


class Rois(NamedTuple):
    """Sampled boxes of a batch and what the heads should say of them; see targets.Sample for the slots."""

    boxes: torch.Tensor
    """(B, S, 4)"""
    labels: torch.Tensor
    """int64 (B, S): 0 for background."""
    offsets: torch.Tensor
    """(B, S, 4): of the object from the box."""
    objects: torch.Tensor
    """int64 (B, S): number of the object in the batch, -1 for background."""
    filled: torch.Tensor
    """bool (B, S)"""


class Model:
    """The network on its device, and what joins its parts."""

    def __init__(
        self, config: Config, classes: int, operators: Chosen, device: torch.device, backbone: Optional[Path] = None
    ) -> None:
        """Draw the weights; ``classes`` counts the background, ``backbone`` is a file with the backbone's weights."""
        self.config, self.operators, self.device = config, operators, device
        self.network = MaskRCNN(config, classes)
        if backbone is not None:
            weights.load_backbone(self.network.backbone, backbone)
        self.network.to(device, memory_format=torch.channels_last)
        self._forward, self._boxes, self._masks = (
            _compiled(module, config) for module in (self.network, self.network.boxes, self.network.masks)
        )
        # On a GPU all shapes are fixed and nothing is waited for; a CPU computes what is there.
        self._is_static = device.type == "cuda"
        self._anchors: Callable[[Tuple[Tuple[int, int], ...]], List[torch.Tensor]] = lru_cache(maxsize=None)(
            self._anchors_of
        )

    def _anchors_of(self, shapes: Tuple[Tuple[int, int], ...]) -> List[torch.Tensor]:
        config = self.config
        return anchors.grid_anchors(shapes, config.anchor_sizes, config.anchor_ratios, self.device)

    def losses(self, batch: Batch) -> Dict[str, torch.Tensor]:
        """Return the five losses of this rank's images by name; their sum is trained."""
        present = batch.labels > 0
        with pytorch.autocast(self.device, self.config.precision):
            levels, scored = self._forward(batch.images)
        grid = self._anchors(tuple((level.shape[2], level.shape[3]) for level in levels))
        found = self._proposal_losses(scored, torch.cat(grid), batch, present)
        rois = self._sampled(self._proposals(scored, grid, batch.sizes, training=True), batch, present)
        found.update(self._box_losses(levels, rois))
        found["mask"] = self._mask_loss(levels, rois, batch)
        return found

    def _proposal_losses(
        self, scored: Scored, grid: torch.Tensor, batch: Batch, present: torch.Tensor
    ) -> Dict[str, torch.Tensor]:
        config = self.config
        matched = self.operators.match(batch.boxes, present, grid, config.anchor_high, config.anchor_low)
        usable = targets.inside(grid, batch.sizes)
        sampled = targets.sample(matched, usable, batch.seeds, config.anchors_per_image, config.anchor_positive)
        wanted = anchors.encode(
            targets.of_objects(batch.boxes, targets.take(matched, sampled.positions)),
            grid[sampled.positions],
            anchors.RPN_WEIGHTS,
        )
        logits = targets.take(torch.cat(scored.scores, 1), sampled.positions).float()
        offsets = targets.take(torch.cat(scored.offsets, 1), sampled.positions).float()
        return {
            "objectness": losses.objectness(logits, sampled.positive, sampled.filled),
            "proposals": losses.boxes(offsets, wanted, sampled.positive, sampled.filled, losses.RPN_BETA),
        }

    def _proposals(
        self, scored: Scored, grid: Sequence[torch.Tensor], sizes: torch.Tensor, training: bool
    ) -> Proposals:
        config = self.config
        limits = Limits(config.candidates_test, config.proposals_test, False, config.proposal_overlap)
        if training:
            limits = Limits(config.candidates_train, config.proposals_train, True, config.proposal_overlap)
        found = propose(scored.scores, scored.offsets, grid, sizes, limits, self.operators.suppress)
        return found if self._is_static else trimmed(found)

    @torch.no_grad()
    def _sampled(self, proposals: Proposals, batch: Batch, present: torch.Tensor) -> Rois:
        config = self.config
        # The objects themselves are proposed too, so that the heads see what is right from the beginning. They come
        # first: how many columns there are behind the last proposal changes nothing that is drawn.
        boxes = torch.cat((batch.boxes, proposals.boxes), 1)
        usable = torch.cat((present, proposals.valid), 1)
        quality = targets.overlaps(batch.boxes, boxes)
        matched = targets.match(quality, present, config.roi_overlap, config.roi_overlap, rescue=False)
        drawn = targets.sample(matched, usable, batch.seeds + 1, config.rois_per_image, config.roi_positive)
        boxes, matched = targets.take(boxes, drawn.positions), targets.take(matched, drawn.positions)
        labels = targets.of_objects(batch.labels, matched).masked_fill(~drawn.positive, 0)
        wanted = anchors.encode(targets.of_objects(batch.boxes, matched), boxes, anchors.HEAD_WEIGHTS)
        first = torch.arange(len(boxes), device=boxes.device).unsqueeze(1) * batch.boxes.shape[1]
        objects = (matched + first).masked_fill(~drawn.positive, -1)
        return Rois(boxes, labels, wanted, objects, drawn.filled)

    def _pooled(self, levels: List[torch.Tensor], boxes: torch.Tensor, images: torch.Tensor, bins: int) -> torch.Tensor:
        edge = self.config.edge
        return self.operators.roi_align(levels[:POOLED_LEVELS], anchors.sampled(boxes, edge), images, bins, edge)

    def _box_losses(self, levels: List[torch.Tensor], rois: Rois) -> Dict[str, torch.Tensor]:
        labels, filled = rois.labels.flatten(), rois.filled.flatten()
        images = _images(rois.boxes)
        with pytorch.autocast(self.device, self.config.precision):
            pooled = self._pooled(levels, rois.boxes.flatten(0, 1), images, BOX_BINS)
            logits, offsets = self._boxes(pooled)
        of_class = targets.take(offsets.float(), labels.unsqueeze(1)).squeeze(1)
        return {
            "classes": losses.classes(logits.float(), labels, filled),
            "boxes": losses.boxes(of_class, rois.offsets.flatten(0, 1), labels > 0, filled, 1.0),
        }

    def _mask_loss(self, levels: List[torch.Tensor], rois: Rois, batch: Batch) -> torch.Tensor:
        slots = min(int(self.config.rois_per_image * self.config.roi_positive), rois.boxes.shape[1])
        boxes, labels, objects = (each[:, :slots].flatten(0, 1) for each in (rois.boxes, rois.labels, rois.objects))
        images = _images(rois.boxes[:, :slots])
        if not self._is_static:
            there = (labels > 0).nonzero().squeeze(1)
            boxes, labels, objects, images = boxes[there], labels[there], objects[there], images[there]
        with pytorch.autocast(self.device, self.config.precision):
            pooled = self._pooled(levels, boxes, images, MASK_BINS)
            logits = self._masks(pooled, labels)
        drawn = anchors.sampled(boxes, self.config.edge)
        wanted = self.operators.project_masks(batch.outlines, drawn, objects, MASK_SIZE)
        return losses.masks(logits.float(), wanted, labels > 0)

    @torch.no_grad()
    def detect(self, batch: EvaluationBatch) -> Tuple[Found, torch.Tensor]:
        """Return the detections of a batch and their masks' probabilities, float32 (D, 28, 28)."""
        config = self.config
        with pytorch.autocast(self.device, config.precision):
            # Not compiled: numbers of images and detections differ, and so does what a shape would be compiled for.
            levels, scored = self.network(batch.images)
            grid = self._anchors(tuple((level.shape[2], level.shape[3]) for level in levels))
            found = self._proposals(scored, grid, batch.sizes, training=False)
            boxes = found.boxes.flatten(0, 1)
            pooled = self._pooled(levels, boxes, _images(found.boxes), BOX_BINS)
            logits, offsets = self.network.boxes(pooled)
            shape = found.boxes.shape[:2]
            detected = detect(
                logits.view(*shape, -1),
                offsets.view(*shape, -1, 4),
                found,
                batch.sizes,
                config.score_threshold,
                config.detection_overlap,
                config.detections,
                self.operators.suppress,
            )
            pooled = self._pooled(levels, detected.boxes, detected.images, MASK_BINS)
            masks = self.network.masks(pooled, detected.labels)
        return detected, masks.float().sigmoid()


def _images(boxes: torch.Tensor) -> torch.Tensor:
    """Return the image int64 (B * S,) of each of ``boxes`` (B, S, 4)."""
    return torch.arange(len(boxes), device=boxes.device).unsqueeze(1).expand(boxes.shape[:2]).flatten()


def _compiled(module: torch.nn.Module, config: Config) -> Callable[..., Any]:
    if config.compile == "none":
        return module
    # Once for each shape, of which there are more than the eight after which PyTorch gives up.
    for name in ("cache_size_limit", "recompile_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 64)
    return torch.compile(module, mode=config.compile, dynamic=False)
