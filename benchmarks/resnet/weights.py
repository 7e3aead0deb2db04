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

from benchmarks.resnet.architecture import EXPANSION, STAGE_WIDTHS, STAGES, STEM_CHANNELS, image_channels
from benchmarks.resnet.config import Hyperparameters

NORM = ("gamma", "beta", "mean", "variance")
Shapes = Dict[str, Tuple[int, ...]]


def _conv_norm(prefix: str, conv: str, norm: str, shape: Tuple[int, ...]) -> Shapes:
    shapes: Shapes = {f"{prefix}.{conv}.weight": shape}
    shapes.update({f"{prefix}.{norm}.{part}": (shape[0],) for part in NORM})
    return shapes


def _block(prefix: str, kind: str, in_channels: int, width: int) -> Shapes:
    out = width * EXPANSION[kind]
    if kind == "basic":
        convs = [(width, in_channels, 3, 3), (out, width, 3, 3)]
    else:
        convs = [(width, in_channels, 1, 1), (width, width, 3, 3), (out, width, 1, 1)]
    shapes: Shapes = {}
    for number, shape in enumerate(convs, 1):
        shapes.update(_conv_norm(prefix, f"conv{number}", f"norm{number}", shape))
    if in_channels != out:
        shapes.update(_conv_norm(f"{prefix}.project", "conv", "norm", (out, in_channels, 1, 1)))
    return shapes


def shapes(config: Hyperparameters) -> Shapes:
    """Name and shape of every array, in the order of the network: stem, blocks, dense."""
    kind, blocks = STAGES[config.depth]
    found = _conv_norm("stem", "conv", "norm", (STEM_CHANNELS, image_channels(config), 7, 7))
    channels = STEM_CHANNELS
    for stage, (width, count) in enumerate(zip(STAGE_WIDTHS, blocks), 1):
        for block in range(1, count + 1):
            found.update(_block(f"stage{stage}.block{block}", kind, channels, width))
            channels = width * EXPANSION[kind]
    found.update({"dense.weight": (config.num_classes, channels), "dense.bias": (config.num_classes,)})
    return found


def trained_names(config: Hyperparameters) -> List[str]:
    """Names of what the optimizer changes: all but the running statistics."""
    return [name for name in shapes(config) if not name.endswith(("mean", "variance"))]
