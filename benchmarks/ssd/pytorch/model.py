"""SSD with a ResNet-34 up to its third stage, as MLPerf has it; nothing of torchvision is used.

The backbone's parameters have torchvision's names, so that its weights load as they are. The third stage has stride 1
instead of 2: at 300 x 300 it gives 38 x 38 positions (resnet34 and SSD300 of the submissions, resnet.py and ssd300.py).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import List, Sequence

import torch
from torch import nn
from torch.nn import functional

from benchmarks.ssd.maps import boxes_per_position
from benchmarks.ssd.pytorch.apex_norms import Norm
from benchmarks.ssd.pytorch.config import HALVED, Config, map_sizes

MULTIPLE = 8
"""Of the outputs of a head with pad_channels: what tensor cores want of fp16."""
COLOURS = 3


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut (He et al. 2015, arXiv 1512.03385)."""

    def __init__(self, before: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = norm(channels)
        self.downsample = None
        if stride != 1 or before != channels:
            self.downsample = nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), norm(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + shortcut)


def _stage(before: int, channels: int, blocks: int, stride: int, norm: Norm) -> nn.Sequential:
    rest = [BasicBlock(channels, channels, 1, norm) for _ in range(blocks - 1)]
    return nn.Sequential(BasicBlock(before, channels, stride, norm), *rest)


def backbone(config: Config, norm: Norm) -> nn.Sequential:
    """Images (N, 3 or 4, S, S) to (N, 4 * width, S / 8, S / 8)."""
    width = config.width
    colours = COLOURS + config.pad_channels
    layers = OrderedDict(
        conv1=nn.Conv2d(colours, width, 7, 2, padding=3, bias=False),
        bn1=norm(width),
        relu=nn.ReLU(),
        maxpool=nn.MaxPool2d(3, 2, 1),
        layer1=_stage(width, width, config.blocks[0], 1, norm),
        layer2=_stage(width, 2 * width, config.blocks[1], 2, norm),
        layer3=_stage(2 * width, 4 * width, config.blocks[2], 1, norm),
    )
    network = nn.Sequential(layers)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    with torch.no_grad():
        layers["conv1"].weight[:, COLOURS:] = 0  # of the colour that is empty
    return network


def _extra(before: int, inner: int, after: int, number: int) -> nn.Sequential:
    """What makes map ``number`` (from 0) of the one before: half the positions, or a border less."""
    stride, padding = (2, 1) if number < HALVED else (1, 0)
    convs = [nn.Conv2d(before, inner, 1), nn.Conv2d(inner, after, 3, stride, padding)]
    for conv in convs:
        nn.init.xavier_uniform_(conv.weight)
    return nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU())


def _head(channels: int, boxes: int, classes: int, padded: bool) -> nn.Conv2d:
    """A convolution to the offsets and logits of all boxes of a position, those of a box next to each other."""
    outputs = boxes * (4 + classes)
    head = nn.Conv2d(channels, -(-outputs // MULTIPLE) * MULTIPLE if padded else outputs, 3, padding=1)
    # Drawn apart, as in the submissions: the bounds depend on the number of outputs.
    offsets, logits = (nn.init.xavier_uniform_(torch.empty(boxes * n, channels, 3, 3)) for n in (4, classes))
    parts = (offsets.view(boxes, 4, channels, 3, 3), logits.view(boxes, classes, channels, 3, 3))
    with torch.no_grad():
        head.weight.zero_()
        head.weight[:outputs] = torch.cat(parts, 1).view(outputs, channels, 3, 3)
    return head


class SSD(nn.Module):
    """Images to offsets and logits of all default boxes."""

    def __init__(self, config: Config, classes: int, norm: Norm) -> None:
        """Draw the weights from PyTorch's generator; ``classes`` count the background."""
        super().__init__()
        maps, width = len(map_sizes(config.image_size)), config.width
        channels = [4 * width, 8 * width, 8 * width, 4 * width, 4 * width, 4 * width][:maps]
        inner = [4 * width, 4 * width, 2 * width, 2 * width, 2 * width]
        self._outputs = 4 + classes
        self._boxes = boxes_per_position(maps)
        self.backbone = backbone(config, norm)
        self.extras = nn.ModuleList(
            _extra(before, inside, after, number)
            for number, (before, inside, after) in enumerate(zip(channels, inner, channels[1:]), 1)
        )
        self.heads = nn.ModuleList(
            _head(each, boxes, classes, config.pad_channels) for each, boxes in zip(channels, self._boxes)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(N, 3 or 4, S, S) to (N, boxes, 4 + classes), the boxes in the order of default_boxes.py."""
        features = self.backbone(images)
        found = [self._predictions(features, 0)]
        for number, extra in enumerate(self.extras, 1):
            features = extra(features)
            found.append(self._predictions(features, number))
        return torch.cat(found, 1)

    def _predictions(self, features: torch.Tensor, number: int) -> torch.Tensor:
        boxes = self._boxes[number]
        # Where the layout is NHWC nothing moves here: positions, boxes of a position, outputs of a box.
        outputs = self.heads[number](features).permute(0, 2, 3, 1)[..., : boxes * self._outputs]
        return outputs.reshape(features.shape[0], -1, self._outputs)


def build(config: Config, classes: int, norm: Norm) -> SSD:
    """Build the network on the CPU in fp32, its weights drawn from config.seed."""
    torch.manual_seed(config.seed)
    return SSD(config, classes, norm)


def memory_format(config: Config) -> torch.memory_format:
    """The order of the axes in memory that config.layout asks for."""
    return torch.channels_last if config.layout == "NHWC" else torch.contiguous_format


def statistics(network: nn.Module) -> List[torch.Tensor]:
    """The running means and variances of all batch-norms: what ranks do not share."""
    return list(network.buffers())


@torch.no_grad()
def set_statistics(network: nn.Module, values: Sequence[torch.Tensor]) -> None:
    """Give the batch-norm layers what ``statistics`` returned."""
    for buffer, value in zip(statistics(network), values):
        buffer.copy_(value)
