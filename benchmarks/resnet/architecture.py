"""The shape of ResNet v1.5 (He et al. 2015, arXiv 1512.03385), the same in every framework.

"v1.5" puts the stride of a bottleneck into its 3x3 convolution, as MLPerf's reference does.
"""

from __future__ import annotations

from typing import Tuple

from benchmarks.resnet.config import Hyperparameters

STAGES = {
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
}
"""Kind of block, and blocks in each stage, by depth."""
STAGE_WIDTHS = (64, 128, 256, 512)
EXPANSION = {"basic": 1, "bottleneck": 4}
"""Channels that a block puts out, as a multiple of its width."""
STEM_CHANNELS = 64


def image_channels(config: Hyperparameters) -> int:
    """Colour channels of the input."""
    return 4 if config.pad_channels else 3


def input_shape(config: Hyperparameters) -> Tuple[int, ...]:
    """Shape of a training batch, in the order of config.layout."""
    axes = {
        "N": config.batch_size,
        "C": image_channels(config),
        "H": config.image_size,
        "W": config.image_size,
    }
    return tuple(axes[axis] for axis in config.layout)


def bench_title(config: Hyperparameters, *more: str) -> str:
    """What a bench measures, for its title."""
    size = f"{config.image_size} x {config.image_size}"
    parts = [f"ResNet-{config.depth}", size, f"batch {config.batch_size}", config.precision, config.layout]
    return ", ".join([*parts, *more, f"one {config.device}"])
