"""ResNet v1.5 in PyTorch; its shape is in benchmarks/resnet/architecture.py.

Nothing of torchvision is used: it cannot be imported beside every build of PyTorch. The names of the modules
are those of benchmarks/resnet/weights.py.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Dict, List, Tuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.resnet.architecture import EXPANSION, STAGE_WIDTHS, STAGES, STEM_CHANNELS, image_channels
from benchmarks.resnet.pytorch.config import Config

NEUTRAL_PARTS = {"weight": "gamma", "bias": "beta", "running_mean": "mean", "running_var": "variance"}
"""What benchmarks/resnet/weights.py calls the tensors of a batch-norm."""


@dataclass(frozen=True)
class Layers:
    """Makes the layers that all blocks share, with the batch-norm of one configuration."""

    config: Config

    def conv(self, in_channels: int, channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
        """A convolution without bias that keeps the size at stride 1; weights from N(0, 2 / fan-in)."""
        layer = nn.Conv2d(in_channels, channels, kernel, stride, padding=kernel // 2, bias=False)
        # He et al. 2015, arXiv 1502.01852, equation 10.
        nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
        return layer

    def norm(self, channels: int, zero_gamma: bool = False) -> nn.BatchNorm2d:
        """Batch-norm over the channels."""
        layer = nn.BatchNorm2d(
            channels,
            eps=self.config.batch_norm_epsilon,
            # PyTorch counts the share of the new statistics, MXNet that of the old ones.
            momentum=1.0 - self.config.batch_norm_momentum,
        )
        if zero_gamma and self.config.zero_init_residual:
            nn.init.zeros_(layer.weight)
        # Only an average without momentum needs this count, which costs a kernel per layer and step.
        layer.num_batches_tracked = None
        return layer


class Residual(nn.Module):
    """One residual block: basic (two 3x3) or bottleneck (1x1, 3x3 with the stride, 1x1 to 4 x width)."""

    def __init__(self, layers: Layers, kind: str, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * EXPANSION[kind]
        is_basic = kind == "basic"
        self.conv1 = layers.conv(in_channels, width, 3 if is_basic else 1, stride if is_basic else 1)
        self.norm1 = layers.norm(width)
        self.conv2 = layers.conv(width, width, 3, 1 if is_basic else stride)
        self.norm2 = layers.norm(width, zero_gamma=is_basic)
        self.conv3 = None if is_basic else layers.conv(width, out, 1)
        self.norm3 = None if is_basic else layers.norm(out, zero_gamma=True)
        self.project = None
        if in_channels != out:
            self.project = nn.Sequential(
                OrderedDict(conv=layers.conv(in_channels, out, 1, stride), norm=layers.norm(out))
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.project is None else self.project(x)
        x = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        x = self.norm2(self.conv2(x))
        if self.conv3 is not None and self.norm3 is not None:
            x = self.norm3(self.conv3(functional.relu(x, inplace=True)))
        return functional.relu(x + shortcut, inplace=True)


def build(config: Config) -> nn.Sequential:
    """The network of ``config`` on the CPU in fp32, weights drawn from config.seed.

    Images (N, C, H, W) to logits (N, num_classes); PyTorch names the axes so, whatever their order in memory.
    """
    torch.manual_seed(config.seed)
    layers = Layers(config)
    kind, blocks = STAGES[config.depth]
    stem = OrderedDict(
        conv=layers.conv(image_channels(config), STEM_CHANNELS, 7, 2),
        norm=layers.norm(STEM_CHANNELS),
        relu=nn.ReLU(inplace=True),
        pool=nn.MaxPool2d(3, 2, 1),
    )
    modules: Dict[str, nn.Module] = OrderedDict(stem=nn.Sequential(stem))
    channels = STEM_CHANNELS
    for stage, (width, count) in enumerate(zip(STAGE_WIDTHS, blocks), 1):
        made: Dict[str, nn.Module] = OrderedDict()
        for block in range(1, count + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            made[f"block{block}"] = Residual(layers, kind, channels, width, stride)
            channels = width * EXPANSION[kind]
        modules[f"stage{stage}"] = nn.Sequential(made)
    modules["pool"] = nn.AdaptiveAvgPool2d(1)
    modules["flatten"] = nn.Flatten()
    modules["dense"] = nn.Linear(channels, config.num_classes)
    nn.init.normal_(modules["dense"].weight, std=0.01)
    nn.init.zeros_(modules["dense"].bias)
    return nn.Sequential(modules)


def input_shape(config: Config) -> Tuple[int, int, int, int]:
    """Shape (N, C, H, W) of a training batch."""
    return (config.batch_size, image_channels(config), config.image_size, config.image_size)


def memory_format(config: Config) -> torch.memory_format:
    """The order of the axes in memory that config.layout asks for."""
    return torch.channels_last if config.layout == "NHWC" else torch.contiguous_format


def place(network: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Move the network to its device, its weights in the layout of the configuration."""
    return network.to(device=device, memory_format=memory_format(config))


def smoothed_loss(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Mean cross-entropy with label smoothing in fp32: logits (N, classes), labels (N,) to ()."""
    return functional.cross_entropy(logits.float(), labels, label_smoothing=smoothing)


def neutral_name(name: str) -> str:
    """Name of benchmarks/resnet/weights.py for a tensor of the network's state."""
    module, _, part = name.rpartition(".")
    is_norm = module.rpartition(".")[2].startswith("norm")
    return f"{module}.{NEUTRAL_PARTS[part]}" if is_norm else name


def statistics(network: nn.Module) -> List[torch.Tensor]:
    """The running means and variances of all batch-norm layers: what ranks do not share."""
    return list(network.buffers())
