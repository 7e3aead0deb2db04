"""Batch-norm over groups of ranks, for small batches on many nodes (bn_group of the submissions since v0.6).

Implemented by PyTorch, or by apex, which exchanges statistics between GPUs without NCCL: ``groupbn`` in NVIDIA's
v0.7 submission (apex.contrib.groupbn, resnet.py in the PyTorch implementation), and the successor ``cudnn_gbn``.
Both need fp16 in channels_last and groups within a node. They are part of some NGC images and optional: they are
used if they are correct and faster.
"""

import importlib
import sys
from functools import partial
from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.ssd.pytorch.config import Config

Norm = Callable[[int], nn.Module]  # makes a batch-norm for that number of channels
PLAIN = "plain"
# Module, class, and argument for the group size
CLASSES = {
    "groupbn": ("apex.contrib.groupbn.batch_norm", "BatchNorm2d_NHWC", "bn_group"),
    "cudnn_gbn": ("apex.contrib.cudnn_gbn", "GroupBatchNorm2d", "group_size"),
}


def choose(config: Config, ranks: Ranks, saved: Optional[str]) -> Tuple[str, Norm]:
    """Return name and constructor of the batch-norms; ``saved`` is the choice in a checkpoint.

    The implementations of apex are measured for NVIDIA's settings (groups, fp16, channels_last), without compilation
    and CUDA graphs, which they do not support.

    Raises:
        ValueError: the implementation of the checkpoint is not installed.
    """
    plain = norm_of(group_of(config.bn_group, ranks), ranks.context)
    apex_norms: Dict[str, Norm] = {}
    suits = config.bn_group > 1 and config.precision == "fp16" and config.layout == "NHWC"
    if suits and config.compile == "none" and not config.cuda_graph and ranks.context.type == "cuda":
        apex_norms = find_apex(config.bn_group)
    size = config.image_size // 8
    shape = (config.batch_size, 4 * config.width, size, size)
    if saved is None and apex_norms:
        saved = fastest(plain, apex_norms, ranks, torch.float16, shape)
    name = saved or PLAIN
    choices.record("norm", name)
    if name not in (PLAIN, *apex_norms):
        raise ValueError(
            f"the checkpoint's batch-norm, apex's {name}, is not available: resume in the image of the run"
        )
    return name, apex_norms.get(name, plain)


def group_of(size: int, ranks: Ranks) -> Optional[Any]:
    """Return the group of ``size`` neighbouring ranks of this rank, or None for size 1. Collective call."""
    if size == 1:
        return None
    groups = [pytorch.new_group(range(first, first + size)) for first in range(0, ranks.size, size)]
    return groups[ranks.rank // size]


def norm_of(group: Optional[Any], device: torch.device) -> Norm:
    def make(channels: int) -> nn.Module:
        if group is None:
            norm: nn.Module = nn.BatchNorm2d(channels)
        elif device.type == "cuda":
            norm = nn.SyncBatchNorm(channels, process_group=group)
        else:
            norm = GroupBatchNorm(channels, group)
        # Only an average without momentum needs this count, which costs a kernel per layer and step. SyncBatchNorm
        # requires it in training; non-persistent, so that checkpoints are the same on all devices.
        if isinstance(norm, nn.SyncBatchNorm):
            norm.register_buffer("num_batches_tracked", norm.num_batches_tracked, persistent=False)
        else:
            norm.num_batches_tracked = None
        return norm

    return make


class GroupBatchNorm(nn.BatchNorm2d):
    """nn.SyncBatchNorm for CPUs; PyTorch implements it only for GPUs."""

    def __init__(self, channels: int, group: Any) -> None:
        super().__init__(channels)
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        axes, count = (0, 2, 3), x.numel() // x.shape[1] * dist.get_world_size(self._group)
        mean = Sum.apply(x.float().sum(axes), self._group) / count
        centred = x.float() - mean[:, None, None]
        variance = Sum.apply(centred.square().sum(axes), self._group) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)


class Sum(torch.autograd.Function):
    """Sum over a group of ranks; the gradient is summed, too."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=context.group)
        return total, None


# -- apex's -------------------------------------------------------------------------------------------


class ApexNorm(nn.BatchNorm2d):
    """Batch-norm that trains with a layer of apex; parameters, statistics and names are as in nn.BatchNorm2d."""

    def __init__(self, channels: int, layer: nn.Module, by_axes: bool) -> None:
        """With ``by_axes`` the input of the layer is (N, h, w, C), otherwise (N, C, h, w) in channels_last."""
        super().__init__(channels)
        # Not a submodule: it receives the weights of this module in every step, since they may have moved.
        self._layer, self._by_axes = (layer,), by_axes
        self.num_batches_tracked = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        layer: Any = self._layer[0]
        layer.weight, layer.bias = self.weight, self.bias
        layer.running_mean, layer.running_var = self.running_mean, self.running_var
        pooled: torch.Tensor = layer(x.permute(0, 2, 3, 1).contiguous() if self._by_axes else x)
        return pooled.permute(0, 3, 1, 2) if self._by_axes else pooled


def find_apex(size: int, import_module: Callable[[str], Any] = importlib.import_module) -> Dict[str, Norm]:
    """Return constructors of apex's layers for groups of ``size`` ranks, by the names in CLASSES, if installed."""

    def make(layer: Any, options: Dict[str, int], by_axes: bool, channels: int) -> nn.Module:
        return ApexNorm(channels, layer(channels, **options), by_axes)

    norms: Dict[str, Norm] = {}
    for name, (module, class_name, argument) in CLASSES.items():
        # A build for another PyTorch fails in many ways.
        try:
            layer = getattr(import_module(module), class_name)
        except Exception:
            continue
        norms[name] = partial(make, layer, {argument: size}, name == "groupbn")
    return norms


def fastest(
    plain: Norm, alternatives: Dict[str, Norm], ranks: Ranks, dtype: torch.dtype, shape: Tuple[int, ...]
) -> str:
    """Return PLAIN, or the name of a correct and faster implementation. Collective call.

    Args:
        plain: constructor of the layer for any device.
        alternatives: from ``find_apex``.
        ranks: of the run.
        dtype: of the activations.
        shape: (N, C, h, w) of the activations on a rank.
    """

    operator = kernels.Operator(plain, "", _example, ({"shape": (4, 64, 8, 8)}, {"shape": (2, 128, 5, 7)}))

    def measure(name: str, norm: Norm) -> float:
        try:
            wrong = kernels.distance_of(operator, norm, ranks.context, dtype)
        # It may not support this GPU, type or group size, or not be compiled.
        except Exception as problem:
            print(f"{name}: {type(problem).__name__}: {problem}", file=sys.stderr)
            wrong = float("inf")
        # A measurement on only one rank would hang.
        if pytorch.total([float(wrong > kernels.tolerance(ranks.context, dtype))])[0]:
            raise ArithmeticError(f"wrong by {wrong:.3g} of the largest value")
        return kernels.seconds(_example(norm, ranks.context, dtype, shape))

    candidates = {PLAIN: plain, **{name: alternatives[name] for name in pytorch.everywhere(alternatives, CLASSES)}}
    measured = {name: partial(measure, name, norm) for name, norm in candidates.items()}
    fastest_name, timings = kernels.fastest(measured, ranks.context)
    if ranks.rank == 0:
        details = ", ".join(f"{name} {text}" for name, text in timings.items())
        print(f"batch-norm over groups: {fastest_name} ({details})", file=sys.stderr, flush=True)
    return fastest_name


def _example(norm: Norm, device: torch.device, dtype: torch.dtype, shape: Tuple[int, ...]) -> kernels.Call:
    # Layer training step: output, gradients and running statistics
    numbers = torch.Generator(device).manual_seed(1)
    x, gradient = (
        torch.randn(shape, generator=numbers, device=device).to(dtype, memory_format=torch.channels_last)
        for _ in range(2)
    )
    layer = norm(shape[1]).to(device)
    inputs = [x.requires_grad_(), layer.weight, layer.bias]

    def call() -> kernels.Results:
        y = layer(x)
        gradients = torch.autograd.grad(y, inputs, gradient)
        return [y.detach(), *gradients, layer.running_mean.clone(), layer.running_var.clone()]

    return call
