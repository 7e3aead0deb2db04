"""Model FLOPs of ResNet: benchmarks/common/flops.py."""

from benchmarks.common.flops import TRAINING, convolution, product
from benchmarks.resnet.architecture import STEM_CHANNELS, Conv, residual_blocks, stem
from benchmarks.resnet.config import Hyperparameters

COLOURS = 3  # a fourth channel is padding


def training_flops(config: Hyperparameters) -> float:
    """FLOPs of forward and backward pass per image of ``image_size``. The gradient of images is not computed."""
    size = _half(config.image_size)
    first = convolution(size, size, stem(config).kernel, COLOURS, STEM_CHANNELS)
    size = _half(size)  # the maximum of 3 x 3
    forward = first
    for block in residual_blocks(config):
        previous_size = size
        for conv in block.convs:
            size = _half(size) if conv.stride == 2 else size
            forward += _of(conv, size)
        if block.project:
            forward += _of(block.project, _half(previous_size) if block.project.stride == 2 else previous_size)
    return TRAINING * (forward + product(1, block.channels, config.num_classes)) - first


def _of(conv: Conv, size: int) -> float:
    return convolution(size, size, conv.kernel, conv.in_channels, conv.channels)


def _half(size: int) -> int:
    return -(-size // 2)
