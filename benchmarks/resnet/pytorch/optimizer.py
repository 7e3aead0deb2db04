"""SGD with momentum and LARS as defined in benchmarks/common/run/optimizers.py, with PyTorch's fused kernels.

torch.optim.SGD multiplies the buffer b by the current rate r. With v = -r * b this is the corrected momentum of
LARS. For other tensors v contains the rate of the step of every gradient: their momentum is multiplied by last rate
/ rate, at no cost.
"""

import inspect
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import nn

from benchmarks.common.run import optimizers
from benchmarks.resnet.pytorch import model
from benchmarks.resnet.pytorch.config import Config


class MomentumSGD(torch.optim.SGD):
    """SGD with that velocity, and LARS for the groups that are ``scaled``."""

    def __init__(self, groups: List[Dict[str, Any]], config: Config) -> None:
        # On a CPU the fused kernel took twice the time of the plain one on NHWC weights, and less than half on NCHW.
        fused = config.device == "gpu" or config.layout == "NCHW"
        has_fused = "fused" in inspect.signature(torch.optim.SGD.__init__).parameters  # since PyTorch 2.3
        kernels: Dict[str, Any] = {"fused": fused} if has_fused else {}
        super().__init__(groups, lr=config.learning_rate, momentum=config.momentum, **kernels)
        self._momentum, self._eta, self._epsilon = config.momentum, config.lars_eta, config.lars_epsilon
        self._gradient_factor = 1.0 / config.loss_scale
        self._rate: Optional[torch.Tensor] = None

    def make_capturable(self, device: torch.device) -> None:
        """Keep values that change between steps in tensors on the device, for CUDA graphs."""
        self._last_rate = float(self.param_groups[0]["lr"])
        self._rate, self._factor = torch.tensor(self._last_rate, device=device), torch.ones((), device=device)
        for group in self.param_groups:
            group["lr"], group["momentum"] = self._rate, self._momentum

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the next step, and scale the momentum of tensors without LARS scaling by last rate / rate."""
        if self._rate is not None:
            self._factor.fill_(self._last_rate / rate if rate > 0 else 1.0)
            self._rate.fill_(rate)
            self._last_rate = rate
            return
        for group in self.param_groups:
            if not group["scaled"] and rate > 0:
                # A captured run has a tensor in its checkpoint.
                group["momentum"] = self._momentum * float(group["lr"]) / rate
            group["lr"] = rate

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Divide by the loss scale, apply LARS scaling, and update all weights."""
        for group in self.param_groups:
            weights = group["params"]
            if self._rate is not None and self.state and not group["scaled"]:
                # The fused kernel reads the rate from a tensor, but not the momentum.
                torch._foreach_mul_([self.state[weight]["momentum_buffer"] for weight in weights], self._factor)
            gradients = [weight.grad for weight in weights]
            if self._gradient_factor != 1.0:
                torch._foreach_mul_(gradients, self._gradient_factor)
            if group["scaled"]:
                self._scale(weights, gradients, group["lars_decay"])
        super().step()

    # Replace gradients g by factor * (g + decay * w), without synchronization. The factor is from LARS; torch.optim.SGD
    # adds no decay for these groups.
    def _scale(self, weights: List[torch.Tensor], gradients: List[torch.Tensor], decay: float) -> None:
        weight_norms = torch.stack(torch._foreach_norm(weights))
        gradient_norms = torch.stack(torch._foreach_norm(gradients))
        factors = self._eta * weight_norms / (gradient_norms + decay * weight_norms + self._epsilon)
        factors = torch.where((weight_norms > 0) & (gradient_norms > 0), factors, torch.ones_like(factors))
        torch._foreach_add_(gradients, weights, alpha=decay)
        torch._foreach_mul_(gradients, list(factors.unbind()))


def build(network: nn.Module, config: Config) -> MomentumSGD:
    """Return the optimizer, with parameters grouped by scaling and decay."""
    groups: Dict[Tuple[bool, float], Dict[str, Any]] = {}
    for name, parameter in network.named_parameters():
        neutral = model.neutral_name(name)
        decay = optimizers.weight_decay_of(neutral, config)
        scaled = config.optimizer == "lars" and not optimizers.has_suffix(neutral, optimizers.UNSCALED)
        new = {"params": [], "scaled": scaled, "lars_decay": decay, "weight_decay": 0.0 if scaled else decay}
        groups.setdefault((scaled, decay), new)["params"].append(parameter)
    return MomentumSGD(list(groups.values()), config)
