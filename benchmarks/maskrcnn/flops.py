"""Model FLOPs of Mask R-CNN: benchmarks/common/flops.py."""

from typing import Any, List, Tuple

import numpy as np

from benchmarks.common.flops import TRAINING, convolution, evenly, product

Sides = Tuple[float, float]  # height and width; those of a mean image are no whole numbers
COLOURS = 3
BOX_BINS, MASK_BINS, MASK_SIZE = 7, 14, 28  # sides of what is pooled of a RoI, and of a mask
FORWARD, BY_WEIGHTS = 1, 1  # the gradient by a weight is a product of the forward pass's size


def training_flops(config: Any, classes: int, height: float, width: float) -> float:
    """FLOPs of forward and backward pass on a resized image; ``classes`` count the background.

    All slots of RoIs count, of masks those of the largest share of objects, each with its own class's mask alone.
    """
    backbone, sides, channels, trained = _backbone(config, height, width)
    pyramid = config.fpn_width
    total = backbone
    for number, ((rows, columns), before) in enumerate(zip(sides, channels)):
        lateral = _convolution(rows, columns, 1, before, pyramid)
        # What a frozen stage gives has no gradient.
        total += (TRAINING if trained[number] else FORWARD + BY_WEIGHTS) * lateral
        total += TRAINING * _convolution(rows, columns, 3, pyramid, pyramid)
    anchors = len(config.anchor_ratios)
    for rows, columns in (*sides, _halved(sides[-1])):
        total += TRAINING * _convolution(rows, columns, 3, pyramid, pyramid)
        total += TRAINING * _convolution(rows, columns, 1, pyramid, 5 * anchors)
    boxes = product(1, pyramid * BOX_BINS**2, config.box_width) + product(1, config.box_width, config.box_width)
    boxes += product(1, config.box_width, 5 * classes)
    total += TRAINING * config.rois_per_image * boxes
    masks = int(config.rois_per_image * config.roi_fg_fraction)
    return total + TRAINING * masks * mask_flops(config)


def flops_per_image(config: Any, classes: int, sizes: np.ndarray) -> float:
    """Return the training FLOPs of a square image with the mean area of a sample of ``sizes`` (N, 2), no padding."""
    side = float(np.sqrt(np.prod(sizes[evenly(len(sizes))], axis=1).mean()))
    return training_flops(config, classes, side, side)


def mask_flops(config: Any) -> float:
    """FLOPs of a forward pass through the mask head for one RoI."""
    width, total, before = config.mask_width, 0.0, config.fpn_width
    for _ in range(config.mask_layers):
        total += convolution(MASK_BINS, MASK_BINS, 3, before, width)
        before = width
    # A transposed convolution of 2 x 2 with stride 2 gives four pixels of each.
    return total + product(MASK_BINS**2, before, 4 * width) + product(MASK_SIZE**2, width, 1)


# FLOPs of the backbone there and back, and of its stages 2 to 5: sides, channels, whether they are trained.
def _backbone(config: Any, height: float, width: float) -> Tuple[float, List[Sides], List[int], List[bool]]:
    frozen, before = config.frozen_stages, config.stem_width
    sides = _halved((height, width))
    has_gradient = frozen == 0
    total = (FORWARD + has_gradient * BY_WEIGHTS) * _convolution(*sides, 7, COLOURS, before)
    sides = _halved(sides)
    all_sides, channels, trained = [], [], []
    for number, blocks in enumerate(config.stages):
        is_trained = number + 1 >= frozen
        inner, after = config.stem_width << number, 4 * config.stem_width << number
        for block in range(blocks):
            ahead, behind = sides, _halved(sides) if number > 0 and block == 0 else sides
            middle = behind if config.stride_in_1x1 else ahead
            inputs = [_convolution(*middle, 1, before, inner)]
            if block == 0:
                inputs.append(_convolution(*behind, 1, before, after))
            rest = _convolution(*behind, 3, inner, inner) + _convolution(*behind, 1, inner, after)
            total += (FORWARD + is_trained * (BY_WEIGHTS + has_gradient)) * sum(inputs)
            total += (TRAINING if is_trained else FORWARD) * rest
            has_gradient, sides, before = has_gradient or is_trained, behind, after
        all_sides.append(sides)
        channels.append(after)
        trained.append(has_gradient)
    return total, all_sides, channels, trained


def _convolution(rows: float, columns: float, kernel: int, before: int, after: int) -> float:
    return product(rows * columns, kernel * kernel * before, after)


# Sides behind a stride of 2.
def _halved(sides: Sides) -> Sides:
    return sides[0] / 2, sides[1] / 2
