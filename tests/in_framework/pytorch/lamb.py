"""LAMB in all implementations that run on a CPU, with recorded values of the paper's algorithm."""

import copy
import math

import numpy as np
import pytest
import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import lamb
from benchmarks.common.torch.flat_optimizer import FlatOptimizer, ScaleRule
from tests.in_framework.fixed_weights import projection

SHAPES = {"table.weight": (10, 64), "layer.qkv.weight": (96, 32), "layer.qkv.bias": (96 * 2,), "norm.weight": (5,)}
STEPS = 12


def initial_weights():
    generator = np.random.RandomState(1)
    return {**{name: generator.randn(*shape) for name, shape in SHAPES.items()}, "zero.weight": np.zeros((4, 16))}


def gradients(step):
    generator = np.random.RandomState(100 + step)
    return [generator.randn(*weight.shape) * 0.3 * (step % 3) for weight in initial_weights().values()]


@pytest.mark.parametrize(
    ("overflows", "expected"),
    [
        ((), [8.94775299, 74.4987307, -0.867289883, 1.42052502, -0.125846382]),
        ((0, 5), [20.2979071, 85.6393012, -1.06410592, 1.3136686, -0.208088295]),
    ],
)
@pytest.mark.parametrize("kernel", ["plain", "fused"])
def test_updates_match_the_paper_and_the_submission(kernel, overflows, expected):
    """Weights after 12 steps of algorithm 2 of You et al. 2020, tensor by tensor in float64 NumPy.

    As submitted the gradient is clipped by its norm, and the trust ratio is 1 for tensors without weight decay.
    """
    parameters = {name: torch.nn.Parameter(torch.tensor(w).float()) for name, w in initial_weights().items()}
    groups = lamb.parameter_groups(
        list(parameters.items()),
        lambda name: 0.0 if name.endswith("bias") or "norm" in name else 0.0166629,
        lambda name: 3 if ".qkv." in name else 1,
    )
    optimizer = FlatOptimizer(
        list(parameters.values()),
        lamb.lamb_candidates(groups, lamb.Options((0.88, 0.95), 1e-6), None),
        kernel,
        Ranks(0, 1, 0, 1, torch.device("cpu")),
        clip=1.0,
        scale=ScaleRule(8.0, 1000) if overflows else None,
    )
    for step in range(STEPS):
        scale = 1.0 if optimizer.scale is None else float(optimizer.scale.value)
        for parameter, gradient in zip(parameters.values(), gradients(step), strict=True):
            parameter.grad.copy_(torch.tensor(gradient * scale))
            if step in overflows:
                parameter.grad.view(-1)[0] = math.inf
        if step == STEPS // 2:
            optimizer.restore(copy.deepcopy(optimizer.state_dict()))
        optimizer.step(0.01 * (step + 1), 1.0)
    assert [projection(weight) for weight in parameters.values()] == pytest.approx(expected, rel=1e-5)
    assert int(optimizer.inner.steps) == STEPS - len(overflows)
    assert len(groups) == 9, "queries, keys and values have a trust ratio each"
