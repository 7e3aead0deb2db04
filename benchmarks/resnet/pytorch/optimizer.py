"""SGD with momentum and LARS as benchmarks/common/optimizers.py defines them, in PyTorch's fused kernels.

There the velocity v carries the learning rate of each gradient's own step; torch.optim.SGD multiplies its whole
buffer b by the present rate. With v = -rate * b the two agree when b is scaled by old rate / new rate at each
step (Goyal et al. 2017, arXiv 1706.02677, section 3, "momentum correction"). Here the momentum takes that
factor, which costs nothing.
"""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import torch
from torch import nn

from benchmarks.common import optimizers
from benchmarks.resnet.pytorch import model
from benchmarks.resnet.pytorch.config import Config

LEAST_MOMENTUM = 1e-30
"""In place of 0, with which torch.optim.SGD would leave the buffer as it is. A warm-up starts at rate 0."""


class MomentumSGD(torch.optim.SGD):
    """SGD with that velocity, and with LARS's rates for the groups that are ``scaled``."""

    def __init__(self, groups: List[Dict[str, Any]], config: Config) -> None:
        # On a CPU the fused kernel took twice the time of the plain one on NHWC weights, and less than half on NCHW.
        fused = config.device == "gpu" or config.layout == "NCHW"
        super().__init__(groups, lr=0.0, momentum=config.momentum, fused=fused)
        self._momentum, self._eta, self._epsilon = config.momentum, config.lars_eta, config.lars_epsilon
        self._gradient_factor = 1.0 / config.loss_scale

    def set_learning_rate(self, rate: float) -> None:
        """Give the next step its rate, and its momentum the factor old rate / new rate."""
        for group in self.param_groups:
            factor = group["lr"] / rate if rate > 0 else 1.0
            group["momentum"] = max(self._momentum * factor, LEAST_MOMENTUM)
            group["lr"] = rate

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Undo the loss scale, scale what LARS scales, and update all weights."""
        for group in self.param_groups:
            weights = group["params"]
            gradients = [weight.grad for weight in weights]
            if self._gradient_factor != 1.0:
                torch._foreach_mul_(gradients, self._gradient_factor)
            if group["scaled"]:
                self._scale(weights, gradients, group["lars_decay"])
        super().step()

    def _scale(self, weights: List[torch.Tensor], gradients: List[torch.Tensor], decay: float) -> None:
        """Turn each gradient g into factor * (g + decay * w), without a stop of the device.

        The factor is LARS's; torch.optim.SGD adds no decay of its own to these groups.
        """
        weight_norms = torch.stack(torch._foreach_norm(weights))
        gradient_norms = torch.stack(torch._foreach_norm(gradients))
        factors = self._eta * weight_norms / (gradient_norms + decay * weight_norms + self._epsilon)
        factors = torch.where((weight_norms > 0) & (gradient_norms > 0), factors, torch.ones_like(factors))
        torch._foreach_add_(gradients, weights, alpha=decay)
        torch._foreach_mul_(gradients, list(factors.unbind()))


def build(network: nn.Module, config: Config) -> MomentumSGD:
    """The optimizer of ``config`` over the parameters of ``network``, in groups that are treated alike."""
    groups: Dict[Tuple[bool, float], Dict[str, Any]] = {}
    for name, parameter in network.named_parameters():
        neutral = model.neutral_name(name)
        decay = optimizers.weight_decay_of(neutral, config)
        scaled = config.optimizer == "lars" and not optimizers.has_suffix(neutral, optimizers.UNSCALED)
        new = {"params": [], "scaled": scaled, "lars_decay": decay, "weight_decay": 0.0 if scaled else decay}
        groups.setdefault((scaled, decay), new)["params"].append(parameter)
    return MomentumSGD(list(groups.values()), config)
