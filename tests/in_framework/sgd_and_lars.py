"""SGD with momentum and LARS as benchmarks/common/optimizers.py defines them, in plain NumPy."""

from __future__ import annotations

import numpy as np

from benchmarks.common.optimizers import UNSCALED, has_suffix, weight_decay_of


def lars_factor(weight: np.ndarray, gradient: np.ndarray, decay: float, eta: float, epsilon: float) -> float:
    """What LARS multiplies the learning rate of one tensor with."""
    weight_norm = float(np.linalg.norm(weight))
    gradient_norm = float(np.linalg.norm(gradient))
    if weight_norm == 0.0 or gradient_norm == 0.0:
        return 1.0
    return eta * weight_norm / (gradient_norm + decay * weight_norm + epsilon)


def step(
    weights: dict,
    momenta: dict,
    gradients: dict,
    rate: float,
    config: object,
) -> tuple:
    """One step of config.optimizer on all tensors, in float64: the new weights and momenta."""
    new_weights, new_momenta = {}, {}
    for name, weight in weights.items():
        weight = weight.astype("float64")
        gradient = gradients[name].astype("float64")
        decay = weight_decay_of(name, config)
        local = rate
        if config.optimizer == "lars" and not has_suffix(name, UNSCALED):
            local *= lars_factor(weight, gradient, decay, config.lars_eta, config.lars_epsilon)
        new_momenta[name] = config.momentum * momenta[name] - local * (gradient + decay * weight)
        new_weights[name] = weight + new_momenta[name]
    return new_weights, new_momenta
