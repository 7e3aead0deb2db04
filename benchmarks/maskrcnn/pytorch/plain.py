"""Mask R-CNN's step as a straightforward PyTorch loop has it, for bench.py to be measured against.

Written as torchvision's reference implementation works where its compiled operators are missing: batch-norm as a layer
of its own, images one after the other in suppression, matching, sampling and mask targets, RoIAlign level by level with
all samples gathered at once, masks for all classes. The weights are the same module's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Callable, List, Tuple

import torch
from torch.nn import functional

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.maskrcnn.pytorch import anchors, losses, operators, targets
from benchmarks.maskrcnn.pytorch.backbone import Convolution
from benchmarks.maskrcnn.pytorch.choice import find_torchvision
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.data import Batch
from benchmarks.maskrcnn.pytorch.network import BOX_BINS, MASK_BINS, MASK_SIZE, MaskRCNN
from benchmarks.maskrcnn.pytorch.operators import POOLED_LEVELS, SAMPLES, Outlines


def suppressed(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Greedy suppression of one group as it is usually written: the best box removes all others, again and again."""
    order = scores.argsort(descending=True)
    kept: List[torch.Tensor] = []
    while len(order):
        kept.append(order[0])
        others = boxes[order[1:]]
        order = order[1:][targets.overlaps(boxes[order[:1]].unsqueeze(0), others.unsqueeze(0))[0, 0] <= threshold]
    return torch.stack(kept) if kept else order


@lru_cache(maxsize=None)
def suppression(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]:
    """Return torchvision's on a GPU that has it, where a loop over boxes takes half a minute a step; else that loop."""
    theirs = find_torchvision() if device.type == "cuda" else None
    return suppressed if theirs is None else theirs.nms


def roi_align(
    features: List[torch.Tensor], boxes: torch.Tensor, images: torch.Tensor, bins: int, edge: float
) -> torch.Tensor:
    """RoIAlign level by level: the four pixels around each sample are gathered, weighted and averaged."""
    level, rois = operators.levels_of(boxes), anchors.sampled(boxes, edge)
    result = features[0].new_zeros(len(rois), features[0].shape[1], bins, bins)
    for number, feature in enumerate(features):
        mine = (level == number).nonzero().squeeze(1)
        if len(mine):
            result[mine] = _of_level(feature, rois[mine] / (4 << number), images[mine], bins).to(result.dtype)
    return result


def _of_level(feature: torch.Tensor, rois: torch.Tensor, images: torch.Tensor, bins: int) -> torch.Tensor:
    height, width = feature.shape[-2:]
    places = (torch.arange(bins * SAMPLES, device=rois.device) + 0.5) / (bins * SAMPLES)
    y = rois[:, 1:2] + (rois[:, 3] - rois[:, 1]).clamp(min=1).unsqueeze(1) * places
    x = rois[:, 0:1] + (rois[:, 2] - rois[:, 0]).clamp(min=1).unsqueeze(1) * places
    valid = ((y >= -1) & (y <= height))[:, None, :, None] & ((x >= -1) & (x <= width))[:, None, None, :]
    y, x = y.clamp(0, height - 1), x.clamp(0, width - 1)
    y0, x0 = y.long(), x.long()
    y1, x1 = (y0 + 1).clamp(max=height - 1), (x0 + 1).clamp(max=width - 1)
    dy, dx = (y - y0)[:, None, :, None], (x - x0)[:, None, None, :]

    def at(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        found = feature[images[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return found.permute(0, 3, 1, 2)

    values = (1 - dy) * ((1 - dx) * at(y0, x0) + dx * at(y0, x1)) + dy * ((1 - dx) * at(y1, x0) + dx * at(y1, x1))
    return functional.avg_pool2d(torch.where(valid, values, 0.0), SAMPLES)


def unfolded(layer: Convolution, x: torch.Tensor) -> torch.Tensor:
    """The convolution, then the frozen batch-norm, as two layers."""
    x = functional.conv2d(x, layer.weight, None, layer.stride, layer.padding)
    return x * layer.scale.view(1, -1, 1, 1) + layer.shift.view(1, -1, 1, 1)


def levels_of(network: MaskRCNN, images: torch.Tensor) -> List[torch.Tensor]:
    """The pyramid's levels by the same weights."""
    body, found = network.backbone, []
    x = (images - network.mean) / network.std
    x = functional.max_pool2d(functional.relu(unfolded(body.conv1, x)), 3, 2, 1)
    for layer in body.layers:
        for block in layer:
            y = functional.relu(unfolded(block.conv1, x))
            y = functional.relu(unfolded(block.conv2, y))
            shortcut = x if block.downsample is None else unfolded(block.downsample, x)
            x = functional.relu(unfolded(block.conv3, y) + shortcut)
        found.append(x)
    levels: List[torch.Tensor] = network.pyramid(found)
    return levels


def plain_losses(network: MaskRCNN, config: Config, batch: Batch) -> torch.Tensor:
    """Return the sum of the five losses, image by image where that is how one writes it first."""
    levels = levels_of(network, batch.images)
    scored = network.proposals(levels)
    shapes = [(level.shape[2], level.shape[3]) for level in levels]
    grid = anchors.grid_anchors(shapes, config.anchor_sizes, config.anchor_ratios, batch.images.device)
    every, scores, offsets = torch.cat(grid), torch.cat(scored.scores, 1), torch.cat(scored.offsets, 1)
    total, rois, owners, parts = torch.zeros(()), [], [], []
    for image in range(len(batch.images)):
        there = (batch.labels[image] > 0).nonzero().squeeze(1)
        boxes = batch.boxes[image, there]
        one = slice(image, image + 1)
        total = total + _proposal_loss(config, every, scores[one], offsets[one], boxes, batch, one) / len(batch.images)
        found = _proposals(
            config, [each[image] for each in scored.scores], [each[image] for each in scored.offsets], grid
        )
        found = torch.cat((anchors.clip(found.unsqueeze(0), batch.sizes[one])[0], boxes))
        matched, drawn = _drawn(found, boxes, batch, one, config)
        rois.append(found[drawn.positions[0]])
        owners.append(torch.full((len(rois[-1]),), image, device=found.device))
        parts.append((matched[0, drawn.positions[0]], drawn.positive[0], there))
    return total + _head_losses(network, config, levels, batch, rois, torch.cat(owners), parts)


def _proposal_loss(
    config: Config,
    every: torch.Tensor,
    scores: torch.Tensor,
    offsets: torch.Tensor,
    boxes: torch.Tensor,
    batch: Batch,
    one: slice,
) -> torch.Tensor:
    present = torch.ones(1, len(boxes), dtype=torch.bool, device=boxes.device)
    quality = targets.overlaps(boxes.unsqueeze(0), every.unsqueeze(0))
    matched = targets.match(quality, present, config.anchor_high, config.anchor_low, rescue=True)
    usable = targets.inside(every, batch.sizes[one])
    drawn = targets.sample(matched, usable, batch.seeds[one], config.anchors_per_image, config.anchor_positive)
    of_object = boxes[targets.take(matched, drawn.positions).clamp(min=0)]
    wanted = anchors.encode(of_object, every[drawn.positions], anchors.RPN_WEIGHTS)
    found = targets.take(offsets, drawn.positions).float()
    logits = targets.take(scores, drawn.positions).float()
    return losses.objectness(logits, drawn.positive, drawn.filled) + losses.boxes(
        found, wanted, drawn.positive, drawn.filled, losses.RPN_BETA
    )


@torch.no_grad()
def _proposals(
    config: Config, scores: List[torch.Tensor], offsets: List[torch.Tensor], grid: List[torch.Tensor]
) -> torch.Tensor:
    boxes, values = [], []
    for score, offset, anchor in zip(scores, offsets, grid):
        best = score.float().topk(min(config.candidates_train, len(score)))
        decoded = anchors.decode(offset[best.indices].float(), anchor[best.indices], anchors.RPN_WEIGHTS)
        kept = suppression(decoded.device)(decoded, best.values, config.proposal_overlap)
        boxes.append(decoded[kept])
        values.append(best.values[kept])
    joined = torch.cat(values)
    return torch.cat(boxes)[joined.topk(min(len(joined), config.proposals_train // config.batch_size)).indices]


@torch.no_grad()
def _drawn(
    found: torch.Tensor, boxes: torch.Tensor, batch: Batch, one: slice, config: Config
) -> Tuple[torch.Tensor, targets.Sample]:
    present = torch.ones(1, len(boxes), dtype=torch.bool, device=boxes.device)
    quality = targets.overlaps(boxes.unsqueeze(0), found.unsqueeze(0))
    matched = targets.match(quality, present, config.roi_overlap, config.roi_overlap, rescue=False)
    usable = torch.ones_like(matched, dtype=torch.bool)
    return matched, targets.sample(matched, usable, batch.seeds[one], config.rois_per_image, config.roi_positive)


def _head_losses(
    network: MaskRCNN,
    config: Config,
    levels: List[torch.Tensor],
    batch: Batch,
    rois: List[torch.Tensor],
    owners: torch.Tensor,
    parts: List[Tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    labels, wanted, masks = [], [], []
    for image, (matched, positive, there) in enumerate(parts):
        which = there[matched.clamp(min=0)]
        labels.append(batch.labels[image, which].masked_fill(~positive, 0))
        wanted.append(anchors.encode(batch.boxes[image, which], rois[image], anchors.HEAD_WEIGHTS))
        numbers = image * batch.boxes.shape[1] + which[positive]
        masks.append(_drawn_masks(batch.outlines, anchors.sampled(rois[image][positive], config.edge), numbers))
    boxes, label, offsets = torch.cat(rois), torch.cat(labels), torch.cat(wanted)
    logits, found = network.boxes(roi_align(levels[:POOLED_LEVELS], boxes, owners, BOX_BINS, config.edge))
    filled = torch.ones_like(label, dtype=torch.bool)
    of_class = found[torch.arange(len(label)), label].float()
    total = losses.classes(logits.float(), label, filled) + losses.boxes(of_class, offsets, label > 0, filled, 1.0)
    mine = (label > 0).nonzero().squeeze(1)
    pooled = roi_align(levels[:POOLED_LEVELS], boxes[mine], owners[mine], MASK_BINS, config.edge)
    for layer in network.masks.layers:
        pooled = functional.relu(layer(pooled))
    drawn = network.masks.masks(functional.relu(network.masks.up(pooled)))[torch.arange(len(mine)), label[mine]]
    return total + losses.masks(drawn.float(), torch.cat(masks), label[mine] > 0)


def _drawn_masks(outlines: Outlines, rois: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    if not len(rois):
        return torch.zeros(0, MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=rois.device)
    each = [
        operators.project_masks(outlines, rois[place : place + 1], numbers[place : place + 1], MASK_SIZE)
        for place in range(len(rois))
    ]
    return torch.cat(each)


def plain_step(config: Config, classes: int, ranks: Ranks, batch: Batch, rate: float) -> Callable[[], None]:
    """Return a step of a plain loop with the same network and batch."""
    network = MaskRCNN(config, classes).to(ranks.context)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=rate, momentum=config.momentum, weight_decay=config.weight_decay)

    def step() -> None:
        optimizer.zero_grad()
        with pytorch.autocast(ranks.context, config.precision):
            loss = plain_losses(network, config, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, config.gradient_clip or 1e9)
        optimizer.step()

    return step
