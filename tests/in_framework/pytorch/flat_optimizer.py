"""FlatOptimizer on two ranks with values of PyTorch's Adam and clipping: plain and fused, complete and split."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from benchmarks.common.frameworks import pytorch
from benchmarks.common.torch import flat_optimizer, gradient_sums, optimizers
from tests.in_framework.torch_checks import projection, record_collectives

RANKS = (2,)
STEPS, ROWS, CLIP = 6, 8, 0.1
RULE = flat_optimizer.ScaleRule(1024, 2, 4096)
ranks = pytorch.start(SimpleNamespace(device="cpu", precision="fp32"))
variants = pytest.mark.parametrize(
    ("kernel", "split"), [("plain", False), ("plain", True), ("fused", False), ("fused", True)]
)


def make_network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def draw_batch(step, rank):
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def weights(layers):
    return parameters_to_vector(layers.parameters()).detach()


# Weights by the largest norm of the gradients, from torch.optim.Adam and clip_grad_norm_ on the rows of both ranks in
# float64
EXPECTED = {
    None: [-0.9947037582, -0.2422048426, 0.5327061695, 0.1305900857],
    CLIP: [-1.0526153688, -0.2560644351, 0.3772844918, 0.1179366454],
}


def projections(layers):
    return [projection(parameter) for parameter in layers.parameters()]


def make_optimizer(layers, kernel, **options):
    candidates = optimizers.adam_candidates(1.0, (0.9, 0.98), 1e-9, None)
    return flat_optimizer.FlatOptimizer(list(layers.parameters()), candidates, kernel, ranks, **options)


def train(layers, optimizer, steps=range(STEPS), overflow=(), skipped=0):
    """Train and return the learning rates.

    At the steps in ``overflow`` rank 1's gradient overflows and the batch is repeated. ``skipped`` of the steps
    before ``steps`` did so.
    """
    table, used = flat_optimizer.Rates(optimizer, lambda step: 0.01 * (step + 1), STEPS + 3), []
    for step, fits in sorted([*((step, False) for step in overflow), *((step, True) for step in steps)]):
        loss = layers(draw_batch(step, ranks.rank)).square().sum()
        optimizer.backward(loss if fits or ranks.rank == 0 else loss * float("inf"))
        used.append(table.of(steps.start + skipped + len(used)))
        assert torch.is_tensor(used[-1]) == (optimizer.kernel == "fused" and optimizer.scale is not None)
        optimizer.step(used[-1], ROWS * 2)
    return [float(value) for value in used]


def train_new(kernel, overflow=(), **options):
    layers = make_network()
    optimizer = make_optimizer(layers, kernel, **options)
    return layers, optimizer, train(layers, optimizer, overflow=overflow)


def assert_same_on_all_ranks(layers, tolerance=0.0):
    mean = torch.tensor(pytorch.total(weights(layers))) / 2
    torch.testing.assert_close(weights(layers), mean, atol=tolerance, rtol=0)


@variants
@pytest.mark.parametrize("clip", [None, CLIP])
def test_weights_match_pytorch(kernel, split, clip):
    layers, _, _ = train_new(kernel, clip=clip, split=split)
    assert projections(layers) == pytest.approx(EXPECTED[clip], abs=2e-6)


@variants
def test_overflows_are_skipped_and_counted(kernel, split):
    layers, optimizer, rates = train_new(kernel, overflow=(0, 3, 3), clip=CLIP, scale=RULE, split=split)
    # A skipped step has the rate of the repeated batch: one at the first step, two at the fourth.
    assert rates == pytest.approx([0.01, 0.01, 0.02, 0.03, 0.04, 0.04, 0.04, 0.05, 0.06])
    assert projections(layers) == pytest.approx(EXPECTED[CLIP], abs=2e-6)
    assert [optimizer.skipped_since(), optimizer.skipped_since(), optimizer.uncounted] == [3, 0, 3]
    # 77 weights in four tensors, each padded to 64 elements.
    assert sum(state["exp_avg"].numel() for state in optimizer.inner.state.values()) == 256 // (2 if split else 1)
    assert_same_on_all_ranks(layers, 1e-6)


@variants
def test_resumed_training_continues_bit_for_bit(kernel, split):
    options = {"clip": CLIP, "scale": RULE, "split": split}
    uninterrupted, _, _ = train_new(kernel, overflow=(1,), **options)
    first, second = make_network(), make_network()
    before = make_optimizer(first, kernel, **options)
    train(first, before, range(3), overflow=(1,))
    second.load_state_dict(first.state_dict())
    after = make_optimizer(second, kernel, **options)
    after.restore(copy.deepcopy({**before.state_dict(), **before.rank_state_dict()}))
    train(second, after, range(3, STEPS), skipped=1)
    assert torch.equal(weights(second), weights(uninterrupted))


@pytest.fixture
def collectives(monkeypatch):
    # Name, first element, length and type of each sum of gradients, in order
    calls = []

    def record(name, tensor, *arguments, **options):
        if tensor.numel() >= 64:  # no norms or counters
            calls.append((name, tensor.storage_offset(), len(tensor), tensor.dtype))

    record_collectives(monkeypatch, ("all_reduce", "reduce"), record)
    return calls


@pytest.fixture
def small_buckets(monkeypatch):
    # Buckets of 64 elements in place of a megabyte
    plain = gradient_sums.GradientSums
    monkeypatch.setattr(
        flat_optimizer,
        "GradientSums",
        lambda *arguments, bucket_bytes, **options: plain(
            *arguments, bucket_bytes=256 if bucket_bytes else 0, **options
        ),
    )


@variants
def test_sums_start_in_the_backward_pass_with_the_same_bits(kernel, split, small_buckets, collectives):
    """Two ranks: the order of a sum does not matter. Only the second of two passes starts sums, last weights first."""
    options = {"clip": CLIP, "scale": RULE, "split": split}
    unbucketed, _, _ = train_new(kernel, overflow=(1,), **options)
    layers, optimizer, _ = train_new(kernel, overflow=(1,), bucket_mb=1, **options)
    assert torch.equal(weights(layers), weights(unbucketed))
    optimizer.backward(layers(draw_batch(0, ranks.rank)).square().sum(), last=False)
    collectives.clear()
    optimizer.backward(layers(draw_batch(1, ranks.rank)).square().sum())
    name = "reduce" if split else "all_reduce"
    assert collectives == [(name, first, 64, torch.float32) for first in (192, 128, 64, 0)]


def test_all_ranks_start_sums_in_the_same_order(small_buckets, collectives):
    """Rank 1 has no gradient of the first layer: the update starts the sums that its backward pass did not."""
    layers = make_network()
    optimizer = make_optimizer(layers, "plain", bucket_mb=1)
    inputs = draw_batch(0, 0)
    outputs = layers(inputs) if ranks.rank == 0 else layers[2](layers[:2](inputs).detach())
    optimizer.backward(outputs.square().sum())
    assert len(collectives) == (4 if ranks.rank == 0 else 2)
    optimizer.step(0.01, ROWS)
    assert [first for _, first, _, _ in collectives] == [192, 128, 64, 0]
    assert_same_on_all_ranks(layers)


@variants
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("bucket_mb", [0, 1])
def test_compressed_gradients(kernel, split, dtype, bucket_mb, small_buckets, collectives):
    options = {"scale": RULE, "split": split, "compression": dtype, "bucket_mb": bucket_mb}
    layers, optimizer, _ = train_new(kernel, overflow=(2,), **options)
    assert {call[3] for call in collectives} == {pytorch.DTYPES[dtype]}
    assert 0 < (weights(layers) - weights(train_new(kernel)[0])).abs().max() < 0.02 and optimizer.skipped_since() == 1


@pytest.mark.parametrize("bucket_mb", [0, 1])
def test_compressed_sums_do_not_overflow_if_the_mean_fits(bucket_mb, small_buckets):
    layers = torch.nn.Linear(1, 1, bias=False)
    optimizer = make_optimizer(layers, "plain", compression="fp16", bucket_mb=bucket_mb)
    optimizer.backward(40_000 * layers.weight.sum())
    optimizer._sums.end()
    assert float(layers.weight.grad) == 80_000


def test_older_pytorch_sums_after_the_backward_pass(small_buckets, collectives, monkeypatch):
    monkeypatch.delattr(torch.Tensor, "register_post_accumulate_grad_hook")
    layers, _, _ = train_new("plain", bucket_mb=1)
    assert projections(layers) == pytest.approx(EXPECTED[None], abs=2e-6)
    assert {length for _, _, length, _ in collectives} == {256}


@pytest.mark.parametrize(
    ("ends", "total", "elements", "shares", "expected"),
    [
        ((64, 128, 192, 256), 256, 128, 1, [(128, 256, None, (2, 3)), (0, 128, None, (0, 1))]),
        ((64, 128, 192, 256), 256, 100, 1, [(128, 256, None, (2, 3)), (0, 128, None, (0, 1))]),
        # A remainder at the beginning and padding after the end
        ((64, 192), 256, 128, 1, [(64, 256, None, (1,)), (0, 64, None, (0,))]),
        ((192,), 256, 128, 1, [(0, 256, None, (0,))]),
        # Both ranks that share a weight wait for it.
        ((64, 192), 256, 64, 2, [(128, 256, 1, (1,)), (64, 128, 0, (1,)), (0, 64, 0, (0,))]),
        ((256,), 256, 64, 4, [(192, 256, 3, (0,)), (128, 192, 2, (0,)), (64, 128, 1, (0,)), (0, 64, 0, (0,))]),
    ],
)
def test_buckets(ends, total, elements, shares, expected):
    places = [gradient_sums.GradientSlice(*bounds) for bounds in zip((0, *ends), ends)]
    assert [tuple(bucket) for bucket in gradient_sums.buckets_of(places, total, elements, shares)] == expected


@pytest.mark.parametrize(
    ("rule", "finite", "expected"),
    [
        (RULE, "+-++++++++", [1024, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096, 4096]),
        (flat_optimizer.ScaleRule(128, 3), "+++-+++", [128, 128, 256, 128, 128, 128, 256]),
    ],
)
def test_dynamic_loss_scale(rule, finite, expected):
    scale = flat_optimizer.LossScale(rule, torch.device("cpu"))
    for sign, value in zip(finite, expected, strict=True):
        scale.update(torch.tensor(sign == "+"))
        assert float(scale.value) == value
