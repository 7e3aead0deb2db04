"""Batch-norm fused with addition and ReLU.

``norm_relu`` is the PyTorch version; the Triton kernels are in kernels.py. benchmarks/common/torch/kernels.py
compares and selects.
"""

from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import nn
from torch.nn import functional

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.common.torch.kernels import Operator
from benchmarks.resnet.pytorch.config import Config

MODULE = "benchmarks.resnet.pytorch.kernels"
KINK = 0.1  # larger than the bfloat16 rounding error for values up to a few units


def norm_relu(norm: nn.BatchNorm2d, images: torch.Tensor, shortcut: Optional[torch.Tensor] = None) -> torch.Tensor:
    """ReLU of the normalized (N, C, H, W), plus ``shortcut`` if given."""
    normalised = norm(images)
    return functional.relu(normalised if shortcut is None else normalised + shortcut, inplace=True)


def _example(
    implementation: Any, device: torch.device, dtype: torch.dtype, shape: Sequence[int], with_shortcut: bool
) -> kernels.Call:
    numbers = torch.Generator(device).manual_seed(1)
    images, shortcut, gradient = (
        torch.randn(tuple(shape), generator=numbers, device=device).to(dtype).to(memory_format=torch.channels_last)
        for _ in range(3)
    )
    norm = nn.BatchNorm2d(shape[1]).to(device)
    norm.num_batches_tracked = None
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5, generator=numbers)
        norm.bias.uniform_(-0.5, 0.5, generator=numbers)
    # A mean far from 0 tests the variance for cancellation.
    inputs = [(images + 8).requires_grad_(), norm.weight, norm.bias]
    if with_shortcut:
        inputs.append(shortcut.requires_grad_())
    # Where ReLU bends, the last bit decides whether a gradient passes.
    with torch.no_grad():
        exact = functional.batch_norm(
            inputs[0].double(), None, None, norm.weight.double(), norm.bias.double(), True, 0.0, norm.eps
        )
        gradient *= ((exact + shortcut if with_shortcut else exact).abs() > KINK).to(dtype)

    def call() -> kernels.Results:
        passed = implementation(norm, inputs[0], *inputs[3:])
        gradients = torch.autograd.grad(passed, inputs, gradient)
        return [passed.detach(), *gradients, norm.running_mean, norm.running_var]

    return call


_SMALL: Sequence[Dict[str, Any]] = (
    {"shape": (3, 40, 5, 7), "with_shortcut": True},
    {"shape": (2, 16, 9, 9), "with_shortcut": False},
)
OPERATORS = {"norm relu": Operator(norm_relu, f"{MODULE}:norm_relu", _example, tuple(_SMALL))}


class OperatorSet(NamedTuple):
    names: Dict[str, str]
    norm_relu: Any = norm_relu


PLAIN = OperatorSet({"norm relu": "plain"})


def choose(config: Config, ranks: Ranks, saved: Optional[Mapping[str, str]] = None) -> OperatorSet:
    """Select by measuring at the end of the first stage; ``saved`` is the choice in a checkpoint.

    torch.compile fuses the PyTorch version, which is used unless the kernels are requested. The kernels need NHWC,
    where channels are contiguous.
    """
    compiles = config.compile != "none"
    if compiles and config.kernels == "triton" and not hasattr(torch.library, "custom_op"):
        reason = f"PyTorch {torch.__version__} has no operators of one's own in what it compiles, which came with 2.4"
        raise choices.UnavailableError(f"kernels=triton with compile={config.compile}: {reason}; use kernels=auto")
    if (compiles and config.kernels != "triton") or config.layout != "NHWC":
        choices.record("kernels", "plain")
        return PLAIN
    size = max(1, config.image_size // 4)
    sizes = {"norm relu": {"shape": (config.batch_size, 256, size, size), "with_shortcut": True}}
    names = kernels.choose(OPERATORS, config.kernels, ranks, pytorch.DTYPES[config.precision], sizes, saved)
    return OperatorSet(names, kernels.implementation(OPERATORS["norm relu"], names["norm relu"]))
