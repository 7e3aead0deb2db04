"""Batch-norm over groups of ranks, for small batches on many nodes (bn_group of the submissions since v0.6).

PyTorch's own, or apex's, which send the statistics from GPU to GPU without NCCL: ``groupbn`` is what NVIDIA's v0.7
submission trains with (apex.contrib.groupbn, resnet.py of its PyTorch implementation), ``cudnn_gbn`` its successor.
Both want fp16 in channels_last and groups within a node. They are in some of NGC's images and never required: one is
used where it gives what the plain layer gives and is faster.
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
# Module, class and the name of its argument for the size of a group
CLASSES = {
    "groupbn": ("apex.contrib.groupbn.batch_norm", "BatchNorm2d_NHWC", "bn_group"),
    "cudnn_gbn": ("apex.contrib.cudnn_gbn", "GroupBatchNorm2d", "group_size"),
}


def choose(config: Config, ranks: Ranks, saved: Optional[str]) -> Tuple[str, Norm]:
    """Return the name and the maker of the network's batch-norms; ``saved`` is a checkpoint's choice.

    apex's are measured where NVIDIA's submission has them: groups, fp16, channels_last; and nothing of PyTorch that
    they are not made for, which is compiling and CUDA graphs.

    Raises:
        ValueError: the checkpoint's choice is not installed.
    """
    plain = norm_of(group_of(config.bn_group, ranks), ranks.context)
    others: Dict[str, Norm] = {}
    suits = config.bn_group > 1 and config.precision == "fp16" and config.layout == "NHWC"
    if suits and config.compile == "none" and not config.cuda_graph and ranks.context.type == "cuda":
        others = find_apex(config.bn_group)
    side = config.image_size // 8
    shape = (config.batch_size, 4 * config.width, side, side)
    if saved is None and others:
        saved = fastest(plain, others, ranks, torch.float16, shape)
    name = saved or PLAIN
    choices.record("norm", name)
    if name not in (PLAIN, *others):
        raise ValueError(f"the checkpoint's batch-norm, apex's {name}, is not here: resume in the image of the run")
    return name, others.get(name, plain)


def group_of(size: int, ranks: Ranks) -> Optional[Any]:
    """Return this rank's group of ``size`` neighbours; None where each rank is alone. All ranks call it together."""
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
        # Only an average without momentum needs this count, which costs a kernel per layer and step.
        norm.num_batches_tracked = None
        return norm

    return make


class GroupBatchNorm(nn.BatchNorm2d):
    """What nn.SyncBatchNorm computes, which PyTorch has on GPUs alone."""

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
    """The sum of a tensor over a group of ranks, whose gradient is the sum of theirs."""

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
    """A batch-norm that trains by a layer of apex; weights, statistics and their names are those of any other."""

    def __init__(self, channels: int, layer: nn.Module, by_axes: bool) -> None:
        """With ``by_axes`` the layer takes (N, h, w, C), else (N, C, h, w) in channels_last."""
        super().__init__(channels)
        # Not a part of this one: it is given the weights of this one at each step, wherever they have moved.
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
    """Return what makes apex's layers over groups of ``size`` ranks, by the names of CLASSES, where they are here."""

    def make(layer: Any, options: Dict[str, int], by_axes: bool, channels: int) -> nn.Module:
        return ApexNorm(channels, layer(channels, **options), by_axes)

    found: Dict[str, Norm] = {}
    for name, (module, class_name, argument) in CLASSES.items():
        # What is built for another PyTorch fails in many ways.
        try:
            layer = getattr(import_module(module), class_name)
        except Exception:
            continue
        found[name] = partial(make, layer, {argument: size}, name == "groupbn")
    return found


def fastest(plain: Norm, others: Dict[str, Norm], ranks: Ranks, dtype: torch.dtype, shape: Tuple[int, ...]) -> str:
    """Return PLAIN, or the name of what is right and faster on all ranks, which call this together.

    Args:
        plain: makes the layer that any device has.
        others: of ``find_apex``.
        ranks: of the run.
        dtype: of the activations.
        shape: (N, C, h, w) of a rank's activations that are measured.
    """

    operator = kernels.Operator(plain, "", _example, ({"shape": (4, 64, 8, 8)}, {"shape": (2, 128, 5, 7)}))

    def measure(name: str, made: Norm) -> float:
        try:
            wrong = kernels.distance_of(operator, made, ranks.context, dtype)
        # Refuses this GPU, type or size of a group, or lacks its compiled part.
        except Exception as problem:
            print(f"{name}: {type(problem).__name__}: {problem}", file=sys.stderr)
            wrong = float("inf")
        # A layer that one rank alone measures would wait for the others.
        if pytorch.total([float(wrong > kernels.tolerance(ranks.context, dtype))])[0]:
            raise ArithmeticError(f"wrong by {wrong:.3g} of the largest value")
        return kernels.seconds(_example(made, ranks.context, dtype, shape))

    candidates = {PLAIN: plain, **{name: others[name] for name in pytorch.everywhere(others, CLASSES)}}
    measured = {name: partial(measure, name, made) for name, made in candidates.items()}
    chosen, found = kernels.fastest(measured, ranks.context)
    if ranks.rank == 0:
        words = ", ".join(f"{name} {text}" for name, text in found.items())
        print(f"batch-norm over groups: {chosen} ({words})", file=sys.stderr, flush=True)
    return chosen


def _example(made: Norm, device: torch.device, dtype: torch.dtype, shape: Tuple[int, ...]) -> kernels.Call:
    # A training step of one layer: its result, gradients and running statistics
    numbers = torch.Generator(device).manual_seed(1)
    x, gradient = (
        torch.randn(shape, generator=numbers, device=device).to(dtype, memory_format=torch.channels_last)
        for _ in range(2)
    )
    layer = made(shape[1]).to(device)
    given = [x.requires_grad_(), layer.weight, layer.bias]

    def call() -> kernels.Results:
        y = layer(x)
        found = torch.autograd.grad(y, given, gradient)
        return [y.detach(), *found, layer.running_mean.clone(), layer.running_var.clone()]

    return call
