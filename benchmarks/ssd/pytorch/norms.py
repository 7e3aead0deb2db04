"""Batch-norm over groups of ranks, for small batches on many nodes (bn_group of the submissions since v0.6)."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices
from benchmarks.common.run.ranks import Ranks
from benchmarks.ssd.pytorch import apex_norms
from benchmarks.ssd.pytorch.apex_norms import Norm
from benchmarks.ssd.pytorch.config import Config


def choose(config: Config, ranks: Ranks, saved: Optional[str]) -> Tuple[str, Norm]:
    """Return the name and the maker of the network's batch-norms; ``saved`` is a checkpoint's choice.

    apex's are asked where NVIDIA's submission has them: groups, fp16, channels_last; and nothing of PyTorch that they
    are not made for, which is compiling and CUDA graphs.
    """
    plain = norm_of(group_of(config.bn_group, ranks), ranks.context)
    others: Dict[str, Norm] = {}
    suits = config.bn_group > 1 and config.precision == "fp16" and config.layout == "NHWC"
    if suits and config.compile == "none" and not config.cuda_graph and ranks.context.type == "cuda":
        others = apex_norms.find(config.bn_group)
    side = config.image_size // 8
    shape = (config.batch_size, 4 * config.width, side, side)
    if saved is None and others:
        saved = apex_norms.choose(plain, others, ranks, torch.float16, shape)
    choices.record("norm", saved or apex_norms.PLAIN)
    return saved or apex_norms.PLAIN, apex_norms.named(saved, plain, others)


def group_of(size: int, ranks: Ranks) -> Optional[Any]:
    """Return this rank's group of ``size`` neighbours; None where each rank is alone. All ranks call it together."""
    if size == 1:
        return None
    groups = [pytorch.new_group(range(first, first + size)) for first in range(0, ranks.size, size)]
    return groups[ranks.rank // size]


def norm_of(group: Optional[Any], device: torch.device) -> Norm:
    """Return what makes the network's batch-norms."""

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
