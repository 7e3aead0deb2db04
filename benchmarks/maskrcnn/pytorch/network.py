"""Mask R-CNN (He et al. 2017, arXiv 1703.06870) with a ResNet and a feature pyramid, as maskrcnn_benchmark has it.

Source: maskrcnn/implementations/pytorch/maskrcnn_benchmark/modeling of mlcommons/training_results_v0.6 and v0.7.
"""

from __future__ import annotations

from typing import List, NamedTuple, Tuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.maskrcnn.pytorch import backbone
from benchmarks.maskrcnn.pytorch.config import Config

BOX_BINS, MASK_BINS, MASK_SIZE = 7, 14, 28
"""Bins of RoIAlign for the two heads, and pixels of a mask, in each direction."""


class Scored(NamedTuple):
    """What the proposal head says of each level's anchors."""

    scores: List[torch.Tensor]
    """(B, A) each: logits."""
    offsets: List[torch.Tensor]
    """(B, A, 4) each."""


class ProposalHead(nn.Module):
    """A convolution and two linear maps of each pixel, the same on all levels."""

    def __init__(self, width: int, anchors: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.scores = nn.Conv2d(width, anchors, 1)
        self.offsets = nn.Conv2d(width, 4 * anchors, 1)
        for layer in (self.conv, self.scores, self.offsets):
            _normal(layer, 0.01)

    def forward(self, levels: List[torch.Tensor]) -> Scored:
        """Of levels (B, width, h, w)."""
        scores, offsets = [], []
        for level in levels:
            x = functional.relu(self.conv(level), inplace=True)
            scores.append(self.scores(x).permute(0, 2, 3, 1).flatten(1))
            offsets.append(self.offsets(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4))
        return Scored(scores, offsets)


class BoxHead(nn.Module):
    """Two layers, then a score for each class and a box for each class."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs * BOX_BINS**2, width)
        self.second = nn.Linear(width, width)
        self.scores = nn.Linear(width, classes)
        self.offsets = nn.Linear(width, 4 * classes)
        for layer in (self.first, self.second):
            nn.init.kaiming_uniform_(layer.weight, a=1)
            nn.init.zeros_(layer.bias)
        _normal(self.scores, 0.01)
        _normal(self.offsets, 0.001)

    def forward(self, pooled: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Logits (R, classes) and offsets (R, classes, 4) of ``pooled`` (R, inputs, 7, 7)."""
        # In the memory order of channels_last, which costs no copy.
        x = functional.relu(self.first(pooled.permute(0, 2, 3, 1).flatten(1)), inplace=True)
        x = functional.relu(self.second(x), inplace=True)
        return self.scores(x), self.offsets(x).view(x.shape[0], -1, 4)


class MaskHead(nn.Module):
    """Convolutions, one of them transposed, then a mask for each class."""

    def __init__(self, inputs: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(width if number else inputs, width, 3, padding=1) for number in range(layers)
        )
        self.up = nn.ConvTranspose2d(width, width, 2, 2)
        self.masks = nn.Conv2d(width, classes, 1)
        for layer in (*self.layers, self.up, self.masks):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, pooled: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Logits (R, 28, 28) of the class ``labels`` int64 (R,) of ``pooled`` (R, inputs, 14, 14).

        The last layer is computed for a RoI's own class alone: no loss and no detection sees the others.
        """
        x = pooled
        for layer in self.layers:
            x = functional.relu(layer(x), inplace=True)
        x = functional.relu(self.up(x), inplace=True)
        weight = self.masks.weight.flatten(1)[labels].to(x.dtype)
        flat = x.permute(0, 2, 3, 1).flatten(1, 2)
        logits = torch.bmm(flat, weight.unsqueeze(2)).squeeze(2) + self.masks.bias[labels].to(x.dtype).unsqueeze(1)
        return logits.view(-1, MASK_SIZE, MASK_SIZE)


class MaskRCNN(nn.Module):
    """The network's parts; model.py joins them."""

    def __init__(self, config: Config, classes: int) -> None:
        """``classes`` counts the background."""
        super().__init__()
        self.backbone = backbone.ResNet(config.stages, config.stem_width, config.stride_in_1x1, config.frozen_stages)
        self.pyramid = backbone.Pyramid(self.backbone.widths, config.fpn_width)
        self.proposals = ProposalHead(config.fpn_width, len(config.anchor_ratios))
        self.boxes = BoxHead(config.fpn_width, config.box_width, classes)
        self.masks = MaskHead(config.fpn_width, config.mask_width, config.mask_layers, classes)
        self.register_buffer("mean", torch.tensor(config.pixel_mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config.pixel_std).view(1, 3, 1, 1), persistent=False)

    def forward(self, images: torch.Tensor) -> Tuple[List[torch.Tensor], Scored]:
        """Levels and proposals of ``images`` uint8 (B, 3, H, W), whose padding is the mean colour.

        H and W are multiples of 32.
        """
        levels = self.pyramid(self.backbone((images - self.mean) / self.std))
        return levels, self.proposals(levels)


def _normal(layer: nn.Module, deviation: float) -> None:
    nn.init.normal_(layer.weight, std=deviation)
    nn.init.zeros_(layer.bias)
