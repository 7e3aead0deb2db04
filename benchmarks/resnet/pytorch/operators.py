"""Batch-norm with what follows it, for a network that no compiler fuses.

``norm_relu`` is PyTorch's own operators; its Triton kernels are in kernels.py, and benchmarks/common/torch/kernels.py
compares and chooses.
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
KINK = 0.1  # more than the rounding of a value of a few units in bfloat16


def norm_relu(norm: nn.BatchNorm2d, images: torch.Tensor, shortcut: Optional[torch.Tensor] = None) -> torch.Tensor:
    """ReLU of the normalised (N, C, H, W), plus ``shortcut`` if there is one."""
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
    # A mean far from 0 shows what a variance from sums of squares would lose.
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
        found = torch.autograd.grad(passed, inputs, gradient)
        return [passed.detach(), *found, norm.running_mean, norm.running_var]

    return call


_SMALL: Sequence[Dict[str, Any]] = (
    {"shape": (3, 40, 5, 7), "with_shortcut": True},
    {"shape": (2, 16, 9, 9), "with_shortcut": False},
)
OPERATORS = {"norm relu": Operator(norm_relu, f"{MODULE}:norm_relu", _example, tuple(_SMALL))}


class Chosen(NamedTuple):
    names: Dict[str, str]
    norm_relu: Any = norm_relu


PLAIN = Chosen({"norm relu": "plain"})


def choose(config: Config, ranks: Ranks, saved: Optional[Mapping[str, str]] = None) -> Chosen:
    """Choose by measuring at the end of the first stage's blocks; ``saved`` is a checkpoint's choice.

    torch.compile fuses by itself, and has the plain path unless the kernels are asked for; in NCHW a channel's numbers
    are not neighbours.
    """
    compiles = config.compile != "none"
    if compiles and config.kernels == "triton" and not hasattr(torch.library, "custom_op"):
        found = f"PyTorch {torch.__version__} has no operators of one's own in what it compiles, which came with 2.4"
        raise choices.UnavailableError(f"kernels=triton with compile={config.compile}: {found}; use kernels=auto")
    if (compiles and config.kernels != "triton") or config.layout != "NHWC":
        choices.record("kernels", "plain")
        return PLAIN
    side = max(1, config.image_size // 4)
    sizes = {"norm relu": {"shape": (config.batch_size, 256, side, side), "with_shortcut": True}}
    names = kernels.choose(OPERATORS, config.kernels, ranks, pytorch.DTYPES[config.precision], sizes, saved)
    return Chosen(names, kernels.implementation(OPERATORS["norm relu"], names["norm relu"]))
