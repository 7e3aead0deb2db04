"""apex's batch-norms over groups of neighbouring GPUs, which send the statistics from GPU to GPU without NCCL.

``groupbn`` is what NVIDIA's v0.7 submission trains with (apex.contrib.groupbn, resnet.py of its PyTorch
implementation), ``cudnn_gbn`` its successor. Both want fp16 in channels_last and groups within a node. They are in some
of NGC's images and never required: one is used where it gives what the plain layer gives and is faster.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import nn

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels

Norm = Callable[[int], nn.Module]
"""Makes a batch-norm for so many channels."""
PLAIN = "plain"
CLASSES = {
    "groupbn": ("apex.contrib.groupbn.batch_norm", "BatchNorm2d_NHWC", "bn_group"),
    "cudnn_gbn": ("apex.contrib.cudnn_gbn", "GroupBatchNorm2d", "group_size"),
}
"""Module, class and the name of its argument for the size of a group."""


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
        if not self._by_axes:
            found: torch.Tensor = layer(x)
            return found
        pooled: torch.Tensor = layer(x.permute(0, 2, 3, 1).contiguous())
        return pooled.permute(0, 3, 1, 2)


def find(size: int, import_module: Callable[[str], Any] = importlib.import_module) -> Dict[str, Norm]:
    """Return what makes apex's layers over groups of ``size`` ranks, by the names of CLASSES, where they are here."""
    found: Dict[str, Norm] = {}
    for name, (module, class_name, argument) in CLASSES.items():
        # What is built for another PyTorch fails in many ways.
        try:
            layer = getattr(import_module(module), class_name)
        except Exception:
            continue
        found[name] = partial(_made, layer, {argument: size}, name == "groupbn")
    return found


def _made(layer: Any, options: Dict[str, int], by_axes: bool, channels: int) -> nn.Module:
    return ApexNorm(channels, layer(channels, **options), by_axes)


def choose(plain: Norm, others: Dict[str, Norm], ranks: Ranks, dtype: torch.dtype, shape: Tuple[int, ...]) -> str:
    """Return PLAIN, or the name of what is right and faster on all ranks, which call this together.

    Args:
        plain: makes the layer that any device has.
        others: of ``find``.
        ranks: of the run.
        dtype: of the activations.
        shape: (N, C, h, w) of a rank's activations that are measured.
    """
    operator = kernels.Operator(plain, "", _example, ({"shape": (4, 64, 8, 8)}, {"shape": (2, 128, 5, 7)}))
    measures = {PLAIN: partial(_seconds, plain, ranks, dtype, shape)}
    words = []
    for name in pytorch.everywhere(others, CLASSES):
        made = others[name]
        wrong = _error(operator, made, ranks, dtype)
        # A layer that one rank alone measures would wait for the others.
        if pytorch.total([float(wrong > kernels.tolerance(ranks.context, dtype))])[0]:
            words.append(f"{name} wrong by {wrong:.3g} of the largest value")
        else:
            measures[name] = partial(_seconds, made, ranks, dtype, shape)
    chosen, times = kernels.fastest(measures, ranks.context)
    if ranks.rank == 0:
        words += [f"{name} {text}" for name, text in times.items()]
        print(f"batch-norm over groups: {chosen} ({', '.join(words)})", file=sys.stderr, flush=True)
    return chosen


def _error(operator: kernels.Operator, made: Norm, ranks: Ranks, dtype: torch.dtype) -> float:
    try:
        return kernels.distance_of(operator, made, ranks.context, dtype)
    # Refuses this GPU, type or size of a group, or lacks its compiled part.
    except Exception as problem:
        print(f"apex: {type(problem).__name__}: {problem}", file=sys.stderr)
        return float("inf")


def _seconds(made: Norm, ranks: Ranks, dtype: torch.dtype, shape: Tuple[int, ...]) -> float:
    return kernels.seconds(_example(made, ranks.context, dtype, shape))


def _example(made: Norm, device: torch.device, dtype: torch.dtype, shape: Tuple[int, ...]) -> kernels.Call:
    """A training step of one layer: its result, gradients and running statistics."""
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


def named(chosen: Optional[str], plain: Norm, others: Dict[str, Norm]) -> Norm:
    """Return what makes the layers of a checkpoint's or a measurement's choice.

    Raises:
        ValueError: that is not here.
    """
    if chosen in (None, PLAIN):
        return plain
    if chosen not in others:
        raise ValueError(f"the checkpoint's batch-norm, apex's {chosen}, is not here: resume in the image of the run")
    return others[str(chosen)]
