"""The weights of a ResNet under names and with axes that no framework owns.

stem.conv.weight                      (output channels, input channels, height, width), as all convolutions
stem.norm.gamma                       (channels,), and beta, mean, variance
stageS.blockB.convN.weight            S, B, N from 1; N goes to 2 in basic blocks, to 3 in bottlenecks
stageS.blockB.normN.gamma             and so on; the last one comes before the sum with the shortcut
stageS.blockB.project.conv.weight     where the shortcut has a convolution, and project.norm.gamma
dense.weight                          (classes, channels)
dense.bias                            (classes,)
"""

from __future__ import annotations

from typing import Dict, List, Tuple

from benchmarks.resnet.architecture import Conv, residual_blocks, stem
from benchmarks.resnet.config import Hyperparameters

NORM = ("gamma", "beta", "mean", "variance")
Shapes = Dict[str, Tuple[int, ...]]


def shapes(config: Hyperparameters) -> Shapes:
    """Name and shape of every array, in the order of the network: stem, blocks, dense."""
    found: Shapes = {}

    def add(conv: Conv, prefix: str, number: str = "") -> None:
        found[f"{prefix}.conv{number}.weight"] = (conv.channels, conv.in_channels, conv.kernel, conv.kernel)
        found.update({f"{prefix}.norm{number}.{part}": (conv.channels,) for part in NORM})

    add(stem(config), "stem")
    for block in residual_blocks(config):
        prefix = f"{block.stage}.{block.name}"
        for number, conv in enumerate(block.convs, 1):
            add(conv, prefix, str(number))
        if block.project:
            add(block.project, f"{prefix}.project")
    found.update({"dense.weight": (config.num_classes, block.channels), "dense.bias": (config.num_classes,)})
    return found


def trained_names(config: Hyperparameters) -> List[str]:
    """Names of what the optimizer changes: all but the running statistics."""
    return [name for name in shapes(config) if not name.endswith(("mean", "variance"))]
