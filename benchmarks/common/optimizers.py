"""SGD with momentum and LARS as every implementation must compute them: the definition, which all frameworks share.

tests/in_framework/sgd_and_lars.py has it in NumPy, and each framework's optimizer is held against that. In both, with
gradient g averaged over the global batch, weight w, momentum buffer v (0 at first), decay d and learning rate r:

    v <- momentum * v - rate * (g + d * w)
    w <- w + v

The learning rate is inside v, so that a change of it does not act on earlier gradients (as in Caffe, and in the
submissions). SGD has rate = r. LARS (You, Gitman and Ginsburg 2017, arXiv 1708.03888, algorithm 1) has, for each
tensor but those that are UNSCALED,

    rate = r * eta * |w| / (|g| + d * |w| + epsilon),    and r where |w| or |g| is 0.
"""

from __future__ import annotations

from typing import Any, Sequence

UNSCALED = ("gamma", "beta", "bias")
"""Endings of the parameters that LARS treats as SGD does: those of batch-norm, and biases."""


def has_suffix(name: str, suffixes: Sequence[str]) -> bool:
    """Return whether a parameter's name ends in one of ``suffixes`` (gamma, beta, bias, weight)."""
    return name.endswith(tuple(suffixes))


def weight_decay_of(name: str, config: Any) -> float:
    """Return the weight decay of the parameter called ``name``."""
    return 0.0 if has_suffix(name, config.no_weight_decay) else float(config.weight_decay)
