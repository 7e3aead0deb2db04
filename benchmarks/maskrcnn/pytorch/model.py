"""Mask R-CNN (He et al. 2017, arXiv 1703.06870) with a ResNet and a feature pyramid, as maskrcnn_benchmark has it.

Images go in, the five losses or detections with their masks come out. What is sampled of anchors and proposals, and how
boxes become proposals and detections, is in regions.py, the operators with kernels of their own in operators.py. B is
the images of a batch, A the anchors of a level, S the sampled boxes of an image, R the RoIs of all images, C the
classes without the background.

Source: maskrcnn/implementations/pytorch/maskrcnn_benchmark/modeling of mlcommons/training_results_v0.6 and v0.7.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.common.frameworks import pytorch
from benchmarks.detection.pytorch.boxes import Found, encode, overlaps
from benchmarks.maskrcnn.pytorch import backbone, regions
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.data import Batch
from benchmarks.maskrcnn.pytorch.operators import BOX_BINS, MASK_BINS, MASK_SIZE, POOLED_LEVELS, Chosen
from benchmarks.maskrcnn.pytorch.regions import Limits, Proposals, propose, sampled, take

RPN_BETA = 1 / 9  # where the smooth L1 of the proposals turns from a square into a line; the head's turns at 1


class Scored(NamedTuple):
    """What the proposal head says of each level's anchors."""

    scores: List[torch.Tensor]  # (B, A) each: logits
    offsets: List[torch.Tensor]  # (B, A, 4) each


class Rois(NamedTuple):
    """Sampled boxes of a batch and what the heads should say of them; see regions.Sample for the slots."""

    boxes: torch.Tensor  # (B, S, 4)
    labels: torch.Tensor  # int64 (B, S): 0 for background
    offsets: torch.Tensor  # (B, S, 4): of the object from the box
    objects: torch.Tensor  # int64 (B, S): number of the object in the batch, -1 for background
    filled: torch.Tensor  # bool (B, S)


# -- layers -------------------------------------------------------------------------------------------


class ProposalHead(nn.Module):
    """A convolution and two linear maps of each pixel, the same on all levels."""

    def __init__(self, width: int, anchors: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.scores = nn.Conv2d(width, anchors, 1)
        self.offsets = nn.Conv2d(width, 4 * anchors, 1)
        for layer in (self.conv, self.scores, self.offsets):
            _normal(layer, 0.01)

    def forward(self, levels: List[torch.Tensor]) -> Scored:
        """Score the anchors of levels (B, width, h, w)."""
        scores, offsets = [], []
        for level in levels:
            x = functional.relu(self.conv(level), inplace=True)
            scores.append(self.scores(x).permute(0, 2, 3, 1).flatten(1))
            offsets.append(self.offsets(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4))
        return Scored(scores, offsets)


class BoxHead(nn.Module):
    """Two layers, then a score for each class and a box for each class."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs * BOX_BINS**2, width)
        self.second = nn.Linear(width, width)
        self.scores = nn.Linear(width, classes)
        self.offsets = nn.Linear(width, 4 * classes)
        for layer in (self.first, self.second):
            nn.init.kaiming_uniform_(layer.weight, a=1)
            nn.init.zeros_(layer.bias)
        _normal(self.scores, 0.01)
        _normal(self.offsets, 0.001)

    def forward(self, pooled: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Logits (R, C + 1) and offsets (R, C + 1, 4) of ``pooled`` (R, inputs, 7, 7)."""
        # In the memory order of channels_last, which costs no copy.
        x = functional.relu(self.first(pooled.permute(0, 2, 3, 1).flatten(1)), inplace=True)
        x = functional.relu(self.second(x), inplace=True)
        return self.scores(x), self.offsets(x).view(x.shape[0], -1, 4)


class MaskHead(nn.Module):
    """Convolutions, one of them transposed, then a mask for each class."""

    def __init__(self, inputs: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(width if number else inputs, width, 3, padding=1) for number in range(layers)
        )
        self.up = nn.ConvTranspose2d(width, width, 2, 2)
        self.masks = nn.Conv2d(width, classes, 1)
        for layer in (*self.layers, self.up, self.masks):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, pooled: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Logits (R, 28, 28) of the class ``labels`` int64 (R,) of ``pooled`` (R, inputs, 14, 14).

        The last layer is computed for a RoI's own class alone: no loss and no detection sees the others.
        """
        x = pooled
        for layer in self.layers:
            x = functional.relu(layer(x), inplace=True)
        x = functional.relu(self.up(x), inplace=True)
        weight = self.masks.weight.flatten(1)[labels].to(x.dtype)
        flat = x.permute(0, 2, 3, 1).flatten(1, 2)
        logits = torch.bmm(flat, weight.unsqueeze(2)).squeeze(2) + self.masks.bias[labels].to(x.dtype).unsqueeze(1)
        return logits.view(-1, MASK_SIZE, MASK_SIZE)


class MaskRCNN(nn.Module):
    """The layers, of which Model calls the heads."""

    def __init__(self, config: Config, classes: int) -> None:
        super().__init__()
        self.backbone = backbone.ResNet(config.stages, config.stem_width, config.stride_in_1x1, config.frozen_stages)
        self.pyramid = backbone.Pyramid(self.backbone.widths, config.fpn_width)
        self.proposals = ProposalHead(config.fpn_width, len(config.anchor_ratios))
        self.boxes = BoxHead(config.fpn_width, config.box_width, classes)
        self.masks = MaskHead(config.fpn_width, config.mask_width, config.mask_layers, classes)
        self.register_buffer("mean", torch.tensor(config.pixel_mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.pixel_std).view(1, 3, 1, 1), persistent=False)

    def forward(self, images: torch.Tensor) -> Tuple[List[torch.Tensor], Scored]:
        """Levels and proposals of ``images`` uint8 (B, 3, H, W), whose padding is the mean colour.

        H and W are multiples of 32.
        """
        levels = self.pyramid(self.backbone((images - self.mean) / self.std))
        return levels, self.proposals(levels)


def _normal(layer: nn.Module, deviation: float) -> None:
    nn.init.normal_(layer.weight, std=deviation)
    nn.init.zeros_(layer.bias)


# -- forward ------------------------------------------------------------------------------------------


class Model:
    """The network on its device, and its forward pass to losses or detections, which training and export call."""

    def __init__(
        self, config: Config, classes: int, operators: Chosen, device: torch.device, weights: Optional[Path] = None
    ) -> None:
        """Initialize the weights; ``classes`` counts the background, ``weights`` is a file with the backbone's."""
        self.config, self.operators, self.device = config, operators, device
        self.network = MaskRCNN(config, classes)
        if weights is not None:
            backbone.load_file(self.network.backbone, weights)
        self.network.to(device, memory_format=torch.channels_last)
        self._forward, self._boxes, self._masks = (
            _compiled(module, config) for module in (self.network, self.network.boxes, self.network.masks)
        )
        # On a GPU all shapes are fixed and nothing is waited for; a CPU computes what is there.
        self.is_static = device.type == "cuda"
        # Kept, since a copy of numbers to a device waits for it.
        self._grid: Callable[[Tuple[Tuple[int, int], ...]], List[torch.Tensor]] = lru_cache(maxsize=None)(
            lambda shapes: regions.grid_anchors(shapes, config.anchor_sizes, config.anchor_ratios, device)
        )

    def losses(self, batch: Batch) -> Dict[str, torch.Tensor]:
        """Return the five losses of this rank's images by name; their sum is trained."""
        config, present = self.config, batch.labels > 0
        with pytorch.autocast(self.device, config.precision):
            levels, scored = self._forward(batch.images)
        grid = self._grid(tuple((level.shape[2], level.shape[3]) for level in levels))

        # The anchors
        every = torch.cat(grid)
        matched = self.operators.match(batch.boxes, present, every, config.rpn_fg_iou, config.rpn_bg_iou)
        usable = regions.inside(every, batch.sizes)
        drawn = regions.sample(matched, usable, batch.seeds, config.anchors_per_image, config.rpn_fg_fraction)
        objects = regions.of_objects(batch.boxes, take(matched, drawn.positions))
        wanted = encode(objects, every[drawn.positions], regions.RPN_WEIGHTS)
        logits, offsets = (take(torch.cat(each, 1), drawn.positions).float() for each in scored)
        found = {
            "objectness": binary_loss(logits, drawn.positive, drawn.filled),
            "proposals": box_loss(offsets, wanted, drawn.positive, drawn.filled, RPN_BETA),
        }

        # The boxes of the proposals
        rois = self._sampled(self._proposals(scored, grid, batch.sizes, training=True), batch, present)
        labels, filled, images = rois.labels.flatten(), rois.filled.flatten(), _images(rois.boxes)
        with pytorch.autocast(self.device, config.precision):
            logits, offsets = self._boxes(self._pooled(levels, rois.boxes.flatten(0, 1), images, BOX_BINS))
        of_class = take(offsets.float(), labels.unsqueeze(1)).squeeze(1)
        entropy = functional.cross_entropy(logits.float(), labels, reduction="none")
        found["classes"] = weighted_mean(entropy, filled)
        found["boxes"] = box_loss(of_class, rois.offsets.flatten(0, 1), labels > 0, filled, 1.0)

        # The masks of those that are objects, which come first
        slots = min(int(config.rois_per_image * config.roi_fg_fraction), rois.boxes.shape[1])
        boxes, labels, objects = (each[:, :slots].flatten(0, 1) for each in (rois.boxes, rois.labels, rois.objects))
        images = _images(rois.boxes[:, :slots])
        if not self.is_static:
            there = (labels > 0).nonzero().squeeze(1)
            boxes, labels, objects, images = boxes[there], labels[there], objects[there], images[there]
        with pytorch.autocast(self.device, config.precision):
            logits = self._masks(self._pooled(levels, boxes, images, MASK_BINS), labels)
        shapes = self.operators.project_masks(batch.outlines, sampled(boxes, config.edge), objects, MASK_SIZE)
        found["mask"] = binary_loss(logits.float(), shapes, labels > 0)
        return found

    def _proposals(
        self, scored: Scored, grid: Sequence[torch.Tensor], sizes: torch.Tensor, training: bool
    ) -> Proposals:
        config = self.config
        limits = Limits(config.rpn_pre_nms_top_n_test, config.rpn_post_nms_top_n_test, False, config.rpn_nms_iou)
        if training:
            limits = Limits(config.rpn_pre_nms_top_n, config.rpn_post_nms_top_n, True, config.rpn_nms_iou)
        found = propose(scored.scores, scored.offsets, grid, sizes, limits, self.operators.suppress)
        if self.is_static:
            return found
        # Without the columns that no image fills, which waits for the device
        most = max(1, int(found.valid.sum(1).max()))
        return Proposals(found.boxes[:, :most], found.valid[:, :most])

    @torch.no_grad()
    def _sampled(self, proposals: Proposals, batch: Batch, present: torch.Tensor) -> Rois:
        config = self.config
        # The objects themselves are proposed too, so that the heads see what is right from the beginning. They come
        # first: how many columns there are behind the last proposal changes nothing that is sampled.
        boxes = torch.cat((batch.boxes, proposals.boxes), 1)
        usable = torch.cat((present, proposals.valid), 1)
        quality = overlaps(batch.boxes, boxes)
        matched = regions.match(quality, present, config.roi_fg_iou, config.roi_fg_iou, rescue=False)
        drawn = regions.sample(matched, usable, batch.seeds + 1, config.rois_per_image, config.roi_fg_fraction)
        boxes, matched = take(boxes, drawn.positions), take(matched, drawn.positions)
        labels = regions.of_objects(batch.labels, matched).masked_fill(~drawn.positive, 0)
        wanted = encode(regions.of_objects(batch.boxes, matched), boxes, regions.HEAD_WEIGHTS)
        first = torch.arange(len(boxes), device=boxes.device).unsqueeze(1) * batch.boxes.shape[1]
        objects = (matched + first).masked_fill(~drawn.positive, -1)
        return Rois(boxes, labels, wanted, objects, drawn.filled)

    def _pooled(self, levels: List[torch.Tensor], boxes: torch.Tensor, images: torch.Tensor, bins: int) -> torch.Tensor:
        edge = self.config.edge
        return self.operators.roi_align(levels[:POOLED_LEVELS], sampled(boxes, edge), images, bins, edge)

    @torch.no_grad()
    def detect(self, images: torch.Tensor, sizes: torch.Tensor) -> Tuple[Found, torch.Tensor]:
        """Return the detections in a batch and their masks' probabilities, float32 (D, 28, 28).

        Args:
            images: uint8 (B, 3, H, W).
            sizes: float32 (B, 2): width and height of each image without its padding.
        """
        with pytorch.autocast(self.device, self.config.precision):
            # Not compiled: numbers of images and detections differ, and so does what a shape would be compiled for.
            levels, scored = self.network(images)
            grid = self._grid(tuple((level.shape[2], level.shape[3]) for level in levels))
            return self.detections(levels, scored, grid, sizes)

    def detections(
        self, levels: List[torch.Tensor], scored: Scored, grid: Sequence[torch.Tensor], sizes: torch.Tensor
    ) -> Tuple[Found, torch.Tensor]:
        """Return what ``detect`` does, of what the network says of the anchors in ``grid``, (A, 4) of each level."""
        found = self._proposals(scored, grid, sizes, training=False)
        pooled = self._pooled(levels, found.boxes.flatten(0, 1), _images(found.boxes), BOX_BINS)
        # (B, P, C + 1) and (B, P, C + 1, 4)
        logits, offsets = (each.unflatten(0, found.valid.shape) for each in self.network.boxes(pooled))
        detected = self.operators.detect(logits, offsets, found, sizes, self.config, self.operators.suppress)
        pooled = self._pooled(levels, detected.boxes, detected.images, MASK_BINS)
        return detected, self.network.masks(pooled, detected.labels).float().sigmoid()


def _images(boxes: torch.Tensor) -> torch.Tensor:
    # The image int64 (B * S,) of each of ``boxes`` (B, S, 4)
    return torch.arange(boxes.shape[0], device=boxes.device).unsqueeze(1).expand(boxes.shape[:2]).flatten()


def _compiled(module: nn.Module, config: Config) -> Callable[..., Any]:
    if config.compile == "none":
        return module
    # Once for each shape, of which there are more than the eight after which PyTorch gives up.
    for name in ("cache_size_limit", "recompile_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 64)
    return torch.compile(module, mode=config.compile, dynamic=False)


# -- losses: each a mean over what was sampled on this rank, as the submissions have it ------------------


def weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean of ``values`` where ``weights`` are 1; 0 where none is."""
    return torch.where(weights, values, 0.0).sum() / weights.sum().clamp(min=1)


def binary_loss(logits: torch.Tensor, wanted: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of ``logits`` and ``wanted``, mean over what is ``counted``: anchors, or whole masks.

    Both are (B, S) as ``counted`` is, or (R, 28, 28) where that is (R,).
    """
    each = functional.binary_cross_entropy_with_logits(logits, wanted.to(logits.dtype), reduction="none")
    return weighted_mean(each if each.dim() == counted.dim() else each.mean(dim=(1, 2)), counted)


def box_loss(
    found: torch.Tensor, wanted: torch.Tensor, positive: torch.Tensor, filled: torch.Tensor, beta: float
) -> torch.Tensor:
    """Smooth L1 of the offsets (..., S, 4) of what is ``positive``, summed, per sample that is ``filled``.

    Elementwise (arXiv 1504.08083, equation 3): x^2 / (2 beta) below ``beta``, |x| - beta / 2 from there on.
    """
    # The offset from or to a box without area is infinite, and 0 times its gradient were not 0.
    wanted = torch.where(positive.unsqueeze(-1), wanted, found.detach())
    each = functional.smooth_l1_loss(found, wanted, reduction="none", beta=beta)
    return each.sum() / filled.sum().clamp(min=1)
