"""NVIDIA's update rules in plain NumPy, written from the submitted code and not from this project's definition.

lars: SGDwFASTLARS (v0.7, NVIDIA/benchmarks/resnet/implementations/mxnet/common/fit.py) with 54 tensors a call, the
    operators multi_lars and lars_multi_mp_sgd_mom_update, and PolySchedule.
sgd: mx.optimizer.SGD with its own set_wd_mult, operator multi_mp_sgd_mom_update.
"""

from __future__ import annotations

import numpy as np


def decays(name: str, optimizer: str) -> bool:
    # Whether set_wd_mult keeps the weight decay of a parameter
    if optimizer == "lars":
        return name.endswith(("weight", "bias"))  # the only bias is that of fc1
    return name.endswith(("weight", "gamma"))


def rate_at(iteration: int, base: float, iterations: int, warmup: int, end: float = 0.0001) -> float:
    # PolySchedule; MXNet's num_update is 1 at the first update.
    if iteration <= warmup:
        return base * iteration / warmup
    left = 1 - (iteration - warmup) / (iterations - warmup)
    return end + (base - end) * left * left


def trained(weights: dict, gradients: list, rates: list, config: object) -> dict:
    # The weights after a step with each of ``gradients`` (averaged) and ``rates``, in float64.
    weights = {name: weight.astype("float64") for name, weight in weights.items()}
    states = {name: np.zeros(weight.shape) for name, weight in weights.items()}
    last_lr = rates[0]
    for gradient, lr in zip(gradients, rates):
        for name, weight in weights.items():
            grad = gradient[name].astype("float64")
            wd = config.weight_decay if decays(name, config.optimizer) else 0.0
            new_lr, momentum = lr, config.momentum
            if config.optimizer == "lars" and name.endswith("weight"):
                momentum = config.momentum * (lr / last_lr)  # in the first call of a step alone
                w_norm, g_norm = np.sqrt((weight * weight).sum()), np.sqrt((grad * grad).sum())
                if w_norm > 0 and g_norm > 0:
                    new_lr = lr * config.lars_eta * w_norm / (g_norm + wd * w_norm + config.lars_epsilon)
            states[name] = momentum * states[name] - new_lr * (grad + wd * weight)
            weights[name] = weight + states[name]
        last_lr = lr
    return weights
