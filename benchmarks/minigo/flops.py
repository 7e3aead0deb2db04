"""Model FLOPs of Minigo's network in training, without self-play: benchmarks/common/flops.py."""

from typing import Any

from benchmarks.common.flops import TRAINING, convolution, product
from benchmarks.minigo.models import PLANES, POLICY_CHANNELS, VALUE_CHANNELS


def training_flops(config: Any) -> float:
    """FLOPs of forward and backward pass per position. The gradient of the planes is not computed."""
    size, width = config.board_size, config.conv_width
    points = size * size
    first = convolution(size, size, 3, PLANES[config.features], width)
    forward = first + 2 * config.trunk_layers * convolution(size, size, 3, width, width)
    forward += convolution(size, size, 1, width, POLICY_CHANNELS + VALUE_CHANNELS)
    forward += product(1, points * POLICY_CHANNELS, points + 1)
    forward += product(1, points * VALUE_CHANNELS, config.fc_width) + product(1, config.fc_width, 1)
    return TRAINING * forward - first
