"""ResNet with batch-norm folded into the convolutions, and the feature pyramid.

Statistics and weights of batch-norm are frozen, as in maskrcnn_benchmark: scale * convolution(x) + shift is a
convolution with scaled weights and a bias. As in the submissions, the convolution is trained and scale and shift are
not: ``scale`` is a buffer that is multiplied with the weight in every step, which gives the same gradient. Without
pretrained weights the shift is trained as a bias.
"""

from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.common.data.problem import Problem
from benchmarks.common.torch import files

# Gain of the last convolution in a residual branch if no pretrained weights are loaded: without normalization the sum
# of the branches would grow
RESIDUAL = 0.25


class Convolution(nn.Module):
    """Convolution followed by a frozen affine map per channel."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, size, size))
        nn.init.kaiming_normal_(self.weight, mode="fan_in", nonlinearity="relu")
        self.weight.data.mul_(gain)
        self.register_buffer("scale", torch.ones(outputs, 1, 1, 1))
        self.shift = nn.Parameter(torch.zeros(outputs))
        self.stride, self.padding = stride, size // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, outputs, h, w) of ``x`` (B, inputs, H, W)."""
        return functional.conv2d(x, self.weight * self.scale, self.shift, self.stride, self.padding)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 with a residual connection (arXiv 1512.03385, figure 5)."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, stride_in_1x1: bool) -> None:
        super().__init__()
        first, second = (stride, 1) if stride_in_1x1 else (1, stride)
        self.conv1 = Convolution(inputs, width, 1, first)
        self.conv2 = Convolution(width, width, 3, second)
        self.conv3 = Convolution(width, outputs, 1, gain=RESIDUAL)
        self.downsample = Convolution(inputs, outputs, 1, stride) if inputs != outputs or stride > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.conv1(x), inplace=True)
        y = functional.relu(self.conv2(y), inplace=True)
        shortcut = x if self.downsample is None else self.downsample(x)
        return functional.relu(self.conv3(y) + shortcut, inplace=True)


class ResNet(nn.Module):
    """Stages 1 (the stem) to 5; returns the outputs of stages 2 to 5."""

    def __init__(self, stages: Sequence[int], width: int, stride_in_1x1: bool, frozen: int) -> None:
        super().__init__()
        self.conv1 = Convolution(3, width, 7, 2)
        layers, inputs = [], width
        for number, blocks in enumerate(stages):
            inner, outputs = width << number, 4 * width << number
            stage = []
            for block in range(blocks):
                stride = 2 if number > 0 and block == 0 else 1
                stage.append(Bottleneck(inputs, inner, outputs, stride, stride_in_1x1))
                inputs = outputs
            layers.append(nn.Sequential(*stage))
        self.layers = nn.ModuleList(layers)
        self.widths = [4 * width << number for number in range(len(stages))]
        self.frozen = frozen
        for part in (self.conv1, *self.layers)[:frozen]:
            part.requires_grad_(False)

    def forward(self, images: torch.Tensor) -> List[torch.Tensor]:
        """Strides 4, 8, 16 and 32 of ``images`` (B, 3, H, W)."""
        features = []
        x = functional.relu(self.conv1(images), inplace=True)
        x = functional.max_pool2d(x, 3, 2, 1)
        for layer in self.layers:
            x = layer(x)
            features.append(x)
        return features


class Pyramid(nn.Module):
    """Feature pyramid (arXiv 1612.03144) with a fifth level of every second pixel of the fourth."""

    def __init__(self, widths: Sequence[int], width: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Conv2d(channels, width, 1) for channels in widths)
        self.outer = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in widths)
        for layer in (*self.inner, *self.outer):
            # As maskrcnn_benchmark: uniform in fan-in, bias 0.
            nn.init.kaiming_uniform_(layer.weight, a=1)
            nn.init.zeros_(layer.bias)

    def forward(self, features: List[torch.Tensor]) -> List[torch.Tensor]:
        """Return levels of strides 4 to 64, (B, width, h, w)."""
        x = self.inner[-1](features[-1])
        levels = [self.outer[-1](x)]
        for feature, inner, outer in zip(features[-2::-1], list(self.inner)[-2::-1], list(self.outer)[-2::-1]):
            lateral = inner(feature)
            # The last bits of the gradients differ.
            larger = upsample_2x(x) if x.is_cuda else functional.interpolate(x, size=lateral.shape[-2:], mode="nearest")
            x = lateral + larger
            levels.insert(0, outer(x))
        levels.append(functional.max_pool2d(levels[-1], 1, 2))
        return levels


def upsample_2x(x: torch.Tensor) -> torch.Tensor:
    """Upsample ``x`` (B, C, h, w) by nearest neighbour to (B, C, 2 h, 2 w), in channels_last.

    Equal to functional.interpolate, but Inductor adds the gradient of interpolate element by element.
    """
    batch, channels, height, width = x.shape
    pixels = x.permute(0, 2, 3, 1)[:, :, None, :, None].expand(batch, height, 2, width, 2, channels)
    return pixels.reshape(batch, 2 * height, 2 * width, channels).permute(0, 3, 1, 2)


# -- trained weights ----------------------------------------------------------------------------------

EXPECTED = "R-50.pkl of Detectron (MSRA's ResNet-50), or a state_dict of PyTorch by torchvision's names"
HINT = "set backbone=FILE to such a file, or leave it empty"


def load_file(network: ResNet, path: Path) -> None:
    """Load weights from a file: Detectron's pickle of numpy arrays, or a state_dict of PyTorch.

    Raises:
        Problem: the file has another format, or does not fit the network.
    """
    content = files.load(path, EXPECTED, HINT)
    try:
        # Detectron's detection models have their arrays in "blobs", ImageNet weights are at the top level.
        load(network, files.tensors_of(content.get("blobs", content)))
    except KeyError as missing:
        raise Problem(f"{path} has no {missing.args[0]}", EXPECTED, HINT) from None
    except ValueError as problem:
        raise Problem(f"{path}: {problem}", EXPECTED, HINT) from None


def load(network: ResNet, weights: Dict[str, Any]) -> None:
    """Load ``weights`` with torchvision's or Detectron's names, including batch-norm.

    Raises KeyError with the missing name, and ValueError for a wrong shape.
    """
    tensors = {name: torch.as_tensor(value) for name, value in weights.items()}
    for module, convolution, norm in _names(network, detectron="conv1_w" in tensors):
        layer = network.get_submodule(module)
        _copy(layer.weight, tensors[convolution], convolution)
        scale, shift = _affine(tensors, norm)
        _copy(layer.scale, scale.reshape(-1, 1, 1, 1), norm)
        _copy(layer.shift, shift, norm)
        layer.shift.requires_grad_(False)


def _copy(target: torch.Tensor, value: torch.Tensor, name: str) -> None:
    if target.shape != value.shape:
        raise ValueError(f"{name} has the shape {tuple(value.shape)}, this backbone needs {tuple(target.shape)}")
    with torch.no_grad():
        target.copy_(value)


def _affine(tensors: Dict[str, torch.Tensor], norm: str) -> Tuple[torch.Tensor, torch.Tensor]:
    # Batch-norm scale and shift; in Detectron's files, the statistics are folded into both
    if norm.endswith("_bn"):
        return tensors[f"{norm}_s"], tensors[f"{norm}_b"]
    # FrozenBatchNorm2d in maskrcnn_benchmark lacks an epsilon; torchvision's models were trained with 1e-5.
    scale = tensors[f"{norm}.weight"] * (tensors[f"{norm}.running_var"] + 1e-5).rsqrt()
    return scale, tensors[f"{norm}.bias"] - tensors[f"{norm}.running_mean"] * scale


def _names(network: ResNet, detectron: bool) -> List[Tuple[str, str, str]]:
    # (module, name of the weight in the file, name of the batch-norm in the file)
    names = [("conv1", "conv1_w", "res_conv1_bn") if detectron else ("conv1", "conv1.weight", "bn1")]
    for stage, layer in enumerate(network.layers):
        for number, block in enumerate(layer):
            for part, letter in (("conv1", "a"), ("conv2", "b"), ("conv3", "c"), ("downsample", "1")):
                if getattr(block, part) is None:
                    continue
                module = f"layers.{stage}.{number}.{part}"
                if detectron:
                    branch = f"res{stage + 2}_{number}_branch{'2' + letter if letter != '1' else '1'}"
                    names.append((module, f"{branch}_w", f"{branch}_bn"))
                    continue
                prefix = f"layer{stage + 1}.{number}."
                weight, norm = ("downsample.0", "downsample.1") if letter == "1" else (part, f"bn{part[-1]}")
                names.append((module, f"{prefix}{weight}.weight", f"{prefix}{norm}"))
    return names
