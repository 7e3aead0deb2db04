"""LAMB in all its implementations here next to a float64 reference of You et al. 2020."""

import math

import numpy as np
import pytest
import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import lamb
from benchmarks.common.torch.flat_optimizer import FlatOptimizer, ScaleRule

SHAPES = {"table.weight": (10, 64), "layer.qkv.weight": (96, 32), "layer.qkv.bias": (96 * 2,), "norm.weight": (5,)}
ZERO = "zero.weight"

STEPS, BETAS, EPSILON, CLIP = 12, (0.88, 0.95), 1e-6, 1.0


def decay_of(name):
    return 0.0 if name.endswith("bias") or "norm" in name else 0.0166629


def parts_of(name):
    return 3 if ".qkv." in name else 1


def rate_of(step):
    return 0.01 * (step + 1)


def start():
    generator = np.random.RandomState(1)
    weights = {name: generator.randn(*shape) for name, shape in SHAPES.items()}
    return {**weights, ZERO: np.zeros((4, 16))}


def gradients(step):
    generator = np.random.RandomState(100 + step)
    return {name: generator.randn(*weight.shape) * 0.3 * (step % 3) for name, weight in start().items()}


def expected(skipped=()):
    """Algorithm 2 with the clipping and the exception of the submission, tensor by tensor in float64."""
    weights, done = start(), 0
    first, second = ({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    for step in range(STEPS):
        if step in skipped:
            continue
        done += 1
        drawn = gradients(step)
        whole = math.sqrt(sum((g**2).sum() for g in drawn.values()))
        for name, g in drawn.items():
            g = g * min(1.0, CLIP / (whole + 1e-6))
            first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * g
            second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * g**2
            m, v = first[name] / (1 - BETAS[0] ** done), second[name] / (1 - BETAS[1] ** done)
            update = m / (np.sqrt(v) + EPSILON) + decay_of(name) * weights[name]
            groups = zip(*(np.split(each, parts_of(name)) for each in (weights[name], update)))
            changed = []
            for w, u in groups:
                sizes = np.linalg.norm(w), np.linalg.norm(u)
                ratio = sizes[0] / sizes[1] if decay_of(name) and min(sizes) > 0 else 1.0
                changed.append(w - rate_of(step) * ratio * u)
            weights[name] = np.concatenate(changed)
    return weights


def trained(kernel, skipped=()):
    """The same by FlatOptimizer; a skipped step has a gradient that is not finite."""
    named = [(name, torch.nn.Parameter(torch.tensor(w, dtype=torch.float32))) for name, w in start().items()]
    groups = lamb.parameter_groups(named, decay_of, parts_of)
    updates = FlatOptimizer(
        [parameter for _, parameter in named],
        lamb.lamb_candidates(groups, lamb.Options(BETAS, EPSILON), None),
        kernel,
        Ranks(0, 1, 0, 1, torch.device("cpu")),
        clip=CLIP,
        scale=ScaleRule(8.0, 1000) if skipped else None,
    )
    for step in range(STEPS):
        drawn = gradients(step)
        factor = 1.0 if updates.scale is None else float(updates.scale.value)
        for name, parameter in named:
            parameter.grad.copy_(torch.tensor(drawn[name] * factor))
            if step in skipped:
                parameter.grad.view(-1)[0] = math.inf
        if step == STEPS // 2:
            # A checkpoint in the middle changes nothing.
            saved = updates.state_dict()
            saved = {**saved, "optimizer": json_like(saved["optimizer"])}
            updates.restore(saved)
        updates.step(rate_of(step), 1.0)
    count = int(updates.inner.steps)
    return {name: parameter.detach().double().numpy() for name, parameter in named}, count, len(groups)


def json_like(state):
    copied = {number: {name: each.clone() for name, each in held.items()} for number, held in state["state"].items()}
    return {**state, "state": copied}


def error(found, wanted):
    return max(float(np.abs(found[name] - w).max() / max(1e-9, np.abs(w).max())) for name, w in wanted.items())


@pytest.mark.parametrize("skipped", [(), (0, 5)])
@pytest.mark.parametrize("kernel", ["plain", "fused"])
def test_updates_are_the_paper_and_the_submission(kernel, skipped):
    weights, count, groups = trained(kernel, skipped)
    assert error(start(), expected()) > 0.1
    assert error(weights, expected(skipped)) < 1e-6
    assert count == STEPS - len(skipped)
    assert groups == 9, "queries, keys and values have a ratio each"
