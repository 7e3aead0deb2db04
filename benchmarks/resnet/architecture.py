"""Architecture of ResNet v1.5 (He et al. 2015, arXiv 1512.03385) for all frameworks, and names of the weights.

"v1.5" has the bottleneck stride in the 3x3 convolution, as in MLPerf's reference.
"""

from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

from benchmarks.resnet.config import Hyperparameters

# Block type and blocks per stage, by depth
STAGES = {
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
}
STAGE_WIDTHS = (64, 128, 256, 512)
STEM_CHANNELS = 64


class Conv(NamedTuple):
    """Convolution without bias; preserves the size at stride 1."""

    in_channels: int
    channels: int
    kernel: int
    stride: int = 1


class Block(NamedTuple):
    """Residual block; every convolution is followed by a batch-norm."""

    stage: str
    name: str  # unique within the stage
    convs: Tuple[Conv, ...]
    project: Optional[Conv]  # convolution of the shortcut, where that changes the shape

    @property
    def channels(self) -> int:
        return self.convs[-1].channels


def residual_blocks(config: Hyperparameters) -> Iterator[Block]:
    """Yield the blocks of all stages in the order of the network.

    basic: two 3x3, the stride in the first; bottleneck: 1x1, 3x3 with the stride, 1x1 to 4 x width.
    """
    kind, counts = STAGES[config.depth]
    channels_in = STEM_CHANNELS
    for stage, (width, count) in enumerate(zip(STAGE_WIDTHS, counts), 1):
        for number in range(1, count + 1):
            stride = 2 if stage > 1 and number == 1 else 1
            convs: Tuple[Conv, ...] = (Conv(channels_in, width, 3, stride), Conv(width, width, 3))
            if kind == "bottleneck":
                convs = (Conv(channels_in, width, 1), Conv(width, width, 3, stride), Conv(width, 4 * width, 1))
            after = convs[-1].channels
            project = Conv(channels_in, after, 1, stride) if channels_in != after else None
            yield Block(f"stage{stage}", f"block{number}", convs, project)
            channels_in = after


def stem(config: Hyperparameters) -> Conv:
    return Conv(image_channels(config), STEM_CHANNELS, 7, 2)


def image_channels(config: Hyperparameters) -> int:
    return 4 if config.pad_channels else 3


def input_shape(config: Hyperparameters) -> Tuple[int, ...]:
    """Shape of training batches, in the order of config.layout."""
    axes = {"N": config.batch_size, "C": image_channels(config), "H": config.image_size, "W": config.image_size}
    return tuple(axes[axis] for axis in config.layout)


def bench_title(config: Hyperparameters, *details: str) -> str:
    size = f"{config.image_size} x {config.image_size}"
    parts = [f"ResNet-{config.depth}", size, f"batch {config.batch_size}", config.precision, config.layout]
    return ", ".join([*parts, *details, f"one {config.device}"])


NORM = ("gamma", "beta", "mean", "variance")
Shapes = Dict[str, Tuple[int, ...]]


def shapes(config: Hyperparameters) -> Shapes:
    """Name and shape of every array, in the order of the network: stem, blocks, dense."""
    shapes_by_name: Shapes = {}

    def add(conv: Conv, prefix: str, number: str = "") -> None:
        shapes_by_name[f"{prefix}.conv{number}.weight"] = (conv.channels, conv.in_channels, conv.kernel, conv.kernel)
        shapes_by_name.update({f"{prefix}.norm{number}.{part}": (conv.channels,) for part in NORM})

    add(stem(config), "stem")
    for block in residual_blocks(config):
        prefix = f"{block.stage}.{block.name}"
        for number, conv in enumerate(block.convs, 1):
            add(conv, prefix, str(number))
        if block.project:
            add(block.project, f"{prefix}.project")
    shapes_by_name.update({"dense.weight": (config.num_classes, block.channels), "dense.bias": (config.num_classes,)})
    return shapes_by_name


def trained_names(config: Hyperparameters) -> List[str]:
    """Names of the trained arrays: all except running statistics."""
    return [name for name in shapes(config) if not name.endswith(("mean", "variance"))]
