"""Model FLOPs of SSD: benchmarks/common/flops.py."""

from typing import Any

from benchmarks.common.flops import TRAINING, convolution
from benchmarks.ssd.pytorch.config import RATIOS, map_sizes

COLOURS = 3  # a fourth channel is padding


def training_flops(config: Any, classes: int) -> float:
    """FLOPs of forward and backward pass per image; ``classes`` includes the background. The gradient of images is not
    computed.
    """
    width, maps = config.width, map_sizes(config.image_size)
    half = -(-config.image_size // 2)
    first = convolution(half, half, 7, COLOURS, width)
    forward, size, inputs = first, -(-half // 2), width
    for blocks, channels, stride in zip(config.blocks, (width, 2 * width, 4 * width), (1, 2, 1)):
        size = -(-size // stride)
        forward += convolution(size, size, 3, inputs, channels)
        forward += (2 * blocks - 1) * convolution(size, size, 3, channels, channels)
        if inputs != channels:
            forward += convolution(size, size, 1, inputs, channels)
        inputs = channels
    channels = [4 * width, 8 * width, 8 * width, 4 * width, 4 * width, 4 * width][: len(maps)]
    inner = [4 * width, 4 * width, 2 * width, 2 * width, 2 * width]
    for number, after in enumerate(channels):
        if number:
            forward += convolution(maps[number - 1], maps[number - 1], 1, channels[number - 1], inner[number - 1])
            forward += convolution(maps[number], maps[number], 3, inner[number - 1], after)
        boxes = 2 + 2 * len(RATIOS[number])
        forward += convolution(maps[number], maps[number], 3, after, boxes * (4 + classes))
    return TRAINING * forward - first
