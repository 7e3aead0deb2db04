"""Model FLOPs of Mask R-CNN: benchmarks/common/flops.py."""

from typing import Any, List, Tuple

import numpy as np

from benchmarks.common.flops import TRAINING, convolution, evenly, product

Sides = Tuple[float, float]  # height and width; not integers for an image with the mean area
COLOURS = 3
BOX_BINS, MASK_BINS, MASK_SIZE = 7, 14, 28  # size of pooled features for the box and mask head, and mask size
FORWARD_PASS, WEIGHT_GRADIENT = 1, 1  # the gradient by a weight is a product of the forward pass's size


def training_flops(config: Any, classes: int, height: float, width: float) -> float:
    """FLOPs of forward and backward pass on a resized image; ``classes`` includes the background.

    All RoI slots count. Masks count for the maximum number of positive RoIs, with a mask for a single class.
    """
    backbone, sides, channels, trained = _backbone(config, height, width)
    pyramid = config.fpn_width
    total = backbone
    for number, ((rows, columns), inputs) in enumerate(zip(sides, channels)):
        lateral = _convolution(rows, columns, 1, inputs, pyramid)
        # Frozen stage outputs need no gradient.
        total += (TRAINING if trained[number] else FORWARD_PASS + WEIGHT_GRADIENT) * lateral
        total += TRAINING * _convolution(rows, columns, 3, pyramid, pyramid)
    anchors = len(config.anchor_ratios)
    for rows, columns in (*sides, _half(sides[-1])):
        total += TRAINING * _convolution(rows, columns, 3, pyramid, pyramid)
        total += TRAINING * _convolution(rows, columns, 1, pyramid, 5 * anchors)
    boxes = product(1, pyramid * BOX_BINS**2, config.box_width) + product(1, config.box_width, config.box_width)
    boxes += product(1, config.box_width, 5 * classes)
    total += TRAINING * config.rois_per_image * boxes
    masks = int(config.rois_per_image * config.roi_fg_fraction)
    return total + TRAINING * masks * mask_flops(config)


def flops_per_image(config: Any, classes: int, sizes: np.ndarray) -> float:
    """Return the training FLOPs for a square image with the mean area of sampled ``sizes`` (N, 2), without padding."""
    side = float(np.sqrt(np.prod(sizes[evenly(len(sizes))], axis=1).mean()))
    return training_flops(config, classes, side, side)


def mask_flops(config: Any) -> float:
    """Forward FLOPs of the mask head, per RoI."""
    width, total, inputs = config.mask_width, 0.0, config.fpn_width
    for _ in range(config.mask_layers):
        total += convolution(MASK_BINS, MASK_BINS, 3, inputs, width)
        inputs = width
    # A transposed 2 x 2 convolution with stride 2 returns four pixels per pixel.
    return total + product(MASK_BINS**2, inputs, 4 * width) + product(MASK_SIZE**2, width, 1)


# FLOPs of the backbone, forward and backward, and size, channels and gradient flag of the stages 2 to 5
def _backbone(config: Any, height: float, width: float) -> Tuple[float, List[Sides], List[int], List[bool]]:
    frozen, channels_in = config.frozen_stages, config.stem_width
    sides = _half((height, width))
    has_gradient = frozen == 0
    total = (FORWARD_PASS + has_gradient * WEIGHT_GRADIENT) * _convolution(*sides, 7, COLOURS, channels_in)
    sides = _half(sides)
    all_sides, channels, trained = [], [], []
    for number, blocks in enumerate(config.stages):
        is_trained = number + 1 >= frozen
        inner, after = config.stem_width << number, 4 * config.stem_width << number
        for block in range(blocks):
            input_sides, output_sides = sides, _half(sides) if number > 0 and block == 0 else sides
            middle = output_sides if config.stride_in_1x1 else input_sides
            first_layers = [_convolution(*middle, 1, channels_in, inner)]
            if block == 0:
                first_layers.append(_convolution(*output_sides, 1, channels_in, after))
            rest = _convolution(*output_sides, 3, inner, inner) + _convolution(*output_sides, 1, inner, after)
            total += (FORWARD_PASS + is_trained * (WEIGHT_GRADIENT + has_gradient)) * sum(first_layers)
            total += (TRAINING if is_trained else FORWARD_PASS) * rest
            has_gradient, sides, channels_in = has_gradient or is_trained, output_sides, after
        all_sides.append(sides)
        channels.append(after)
        trained.append(has_gradient)
    return total, all_sides, channels, trained


def _convolution(rows: float, columns: float, kernel: int, inputs: int, outputs: int) -> float:
    return product(rows * columns, kernel * kernel * inputs, outputs)


# Size after a stride of 2
def _half(sides: Sides) -> Sides:
    return sides[0] / 2, sides[1] / 2
