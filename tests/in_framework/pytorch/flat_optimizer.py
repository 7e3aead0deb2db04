"""FlatOptimizer next to PyTorch's own Adam and clipping: plain and fused, whole and split over the ranks."""

import copy
from types import SimpleNamespace

import pytest
import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.torch import optimizers
from benchmarks.common.torch.flat_optimizer import FlatOptimizer, LossScale, Rates, ScaleRule

RANKS = (1, 2)
STEPS, ROWS, CLIP = 6, 8, 0.1
RULE = ScaleRule(1024, 2, 4096)
ranks = pytorch.start(SimpleNamespace(device="cpu", precision="fp32"))
variants = pytest.mark.parametrize(
    ("kernel", "split"), [("plain", False), ("plain", True), ("fused", False), ("fused", True)]
)


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def batch(step, rank):
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def rate(step):
    return 0.01 * (step + 1)


def expected(clip):
    """Weights after training on the rows of all ranks by PyTorch's own functions."""
    layers = network()
    adam = torch.optim.Adam(layers.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    for step in range(STEPS):
        adam.param_groups[0]["lr"] = rate(step)
        adam.zero_grad()
        rows = torch.cat([batch(step, rank) for rank in range(ranks.size)])
        (layers(rows).square().sum() / len(rows)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(layers.parameters(), clip)
        adam.step()
    return torch.nn.utils.parameters_to_vector(layers.parameters()).detach()


def flat(layers, kernel, **options):
    candidates = optimizers.adam_candidates(1.0, (0.9, 0.98), 1e-9, None)
    return FlatOptimizer(list(layers.parameters()), candidates, kernel, ranks, **options)


def train(layers, optimizer, steps=range(STEPS), overflow=(), before=0):
    """Train; at the steps of ``overflow`` the last rank has a gradient that is too large, and the batch comes again.

    A step has the rate of as many as changed the weights; of those ``before`` these so many did not. Return the rates.
    """
    rates, found = Rates(optimizer, rate, STEPS + 3), []
    for step in steps:
        for bad in [True] * overflow.count(step) + [False]:
            loss = optimizer.scaled(layers(batch(step, ranks.rank)).square().sum())
            (loss * float("inf") if bad and ranks.rank == ranks.size - 1 else loss).backward()
            # What the caller knows of: the batches.
            found.append(rates.of(steps.start + before + len(found)))
            assert torch.is_tensor(found[-1]) == (optimizer.kernel == "fused" and optimizer.scale is not None)
            optimizer.step(found[-1], ROWS * ranks.size)
    return [float(each) for each in found]


def weights(layers):
    return torch.nn.utils.parameters_to_vector(layers.parameters()).detach()


@variants
@pytest.mark.parametrize("clip", [None, CLIP])
def test_weights_are_those_of_pytorch(kernel, split, clip):
    layers = network()
    train(layers, flat(layers, kernel, clip=clip, split=split))
    torch.testing.assert_close(weights(layers), expected(clip), atol=1e-6, rtol=0)


@variants
def test_overflows_are_skipped_and_counted(kernel, split):
    layers = network()
    optimizer = flat(layers, kernel, clip=CLIP, scale=RULE, split=split)
    found = train(layers, optimizer, overflow=(0, 3, 3))
    # A step that overflows has the rate that its batch has again: here at the first, and twice at the fourth.
    assert found == pytest.approx([0.01, 0.01, 0.02, 0.03, 0.04, 0.04, 0.04, 0.05, 0.06])
    torch.testing.assert_close(weights(layers), expected(CLIP), atol=1e-6, rtol=0)
    assert [optimizer.skipped_since(), optimizer.skipped_since(), optimizer.uncounted] == [3, 0, 3]
    # 77 weights, each tensor filled up to 64 elements.
    state = sum(each["exp_avg"].numel() for each in optimizer.inner.state.values())
    assert state == 256 // (ranks.size if split else 1)
    mean = torch.tensor(pytorch.total(weights(layers))) / ranks.size
    torch.testing.assert_close(weights(layers), mean, atol=1e-6, rtol=0)


@variants
def test_a_resumed_training_is_the_same_to_the_bit(kernel, split):
    options = {"clip": CLIP, "scale": RULE, "split": split}
    whole, first, second = network(), network(), network()
    train(whole, flat(whole, kernel, **options), overflow=(1,))
    before = flat(first, kernel, **options)
    train(first, before, range(3), overflow=(1,))
    saved = copy.deepcopy({**before.state_dict(), **before.rank_state_dict()})
    second.load_state_dict(first.state_dict())
    after = flat(second, saved["kernel"], **options)
    after.restore(saved)
    train(second, after, range(3, STEPS), before=1)
    assert torch.equal(weights(second), weights(whole))


@pytest.mark.parametrize(
    ("rule", "finite", "scales"),
    [
        (RULE, "+-++++++++", [1024, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096, 4096]),
        (ScaleRule(128, 3), "+++-+++", [128, 128, 256, 128, 128, 128, 256]),
    ],
)
def test_dynamic_loss_scale(rule, finite, scales):
    scale, found = LossScale(rule, torch.device("cpu")), []
    for each in finite:
        scale.update(torch.tensor(each == "+"))
        found.append(float(scale.value))
    assert found == scales
