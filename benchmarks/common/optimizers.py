"""SGD with momentum and LARS as every implementation must compute them: the definition, in plain NumPy.

Tests compare each framework's optimizer with these functions; nothing trains with them. In both, with gradient g
averaged over the global batch, weight w, momentum buffer v (0 at first), decay d and learning rate r:

    v <- momentum * v - rate * (g + d * w)
    w <- w + v

The learning rate is inside v, so that a change of it does not act on earlier gradients (as in Caffe, and in the
submissions). SGD has rate = r. LARS (You, Gitman and Ginsburg 2017, arXiv 1708.03888, algorithm 1) has, for each
tensor but those that are UNSCALED,

    rate = r * eta * |w| / (|g| + d * |w| + epsilon),    and r where |w| or |g| is 0.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Sequence, Tuple

import numpy as np

UNSCALED = ("gamma", "beta", "bias")
"""Endings of the parameters that LARS treats as SGD does: those of batch-norm, and biases."""


def has_suffix(name: str, suffixes: Sequence[str]) -> bool:
    """Whether a parameter's name ends in one of ``suffixes`` (gamma, beta, bias, weight)."""
    return name.endswith(tuple(suffixes))


def weight_decay_of(name: str, config: Any) -> float:
    """Weight decay of the parameter called ``name``."""
    return 0.0 if has_suffix(name, config.no_weight_decay) else float(config.weight_decay)


def lars_factor(weight: np.ndarray, gradient: np.ndarray, decay: float, eta: float, epsilon: float) -> float:
    """What LARS multiplies the learning rate of one tensor with."""
    weight_norm = float(np.linalg.norm(weight))
    gradient_norm = float(np.linalg.norm(gradient))
    if weight_norm == 0.0 or gradient_norm == 0.0:
        return 1.0
    return eta * weight_norm / (gradient_norm + decay * weight_norm + epsilon)


def step(
    weights: Mapping[str, np.ndarray],
    momenta: Mapping[str, np.ndarray],
    gradients: Mapping[str, np.ndarray],
    rate: float,
    config: Any,
) -> Tuple[Dict[str, np.ndarray], Dict[str, np.ndarray]]:
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
