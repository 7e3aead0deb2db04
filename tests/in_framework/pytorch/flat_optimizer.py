"""FlatOptimizer next to PyTorch's own Adam and clipping: plain and fused, whole and split over the ranks."""

import copy
from types import SimpleNamespace

import pytest
import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.torch import flat_optimizer, gradient_sums, optimizers
from benchmarks.common.torch.flat_optimizer import FlatOptimizer, LossScale, Rates, ScaleRule
from benchmarks.common.torch.gradient_sums import Place, buckets_of

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
            loss = layers(batch(step, ranks.rank)).square().sum()
            optimizer.backward(loss * float("inf") if bad and ranks.rank == ranks.size - 1 else loss)
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


def recorded(monkeypatch, names=("all_reduce", "reduce")):
    """The sums of gradients as they are begun: first element and length of the part, and the type on the wire."""
    begun = []

    def record(name, function):
        def call(tensor, *arguments, **options):
            if tensor.numel() >= 64:  # No norm, and no count of the test
                first = tensor.storage_offset() if tensor.dtype is torch.float32 else None
                begun.append((name, first, len(tensor), tensor.dtype))
            return function(tensor, *arguments, **options)

        return call

    for name in names:
        monkeypatch.setattr(gradient_sums.dist, name, record(name, getattr(gradient_sums.dist, name)))
    return begun


@pytest.fixture
def small_buckets(monkeypatch):
    """Buckets of 64 elements in place of a megabyte."""
    plain = gradient_sums.GradientSums

    def small(*arguments, bucket_bytes, **options):
        return plain(*arguments, bucket_bytes=256 if bucket_bytes else 0, **options)

    monkeypatch.setattr(flat_optimizer, "GradientSums", small)


@variants
def test_sums_begin_in_the_backward_pass_and_change_no_bit(kernel, split, small_buckets, monkeypatch):
    """Two ranks: a sum of two numbers has no order. The last weights come first, in two passes only in the second."""
    whole, parts = network(), network()
    train(whole, flat(whole, kernel, clip=CLIP, scale=RULE, split=split), overflow=(1,))
    optimizer = flat(parts, kernel, clip=CLIP, scale=RULE, split=split, bucket_mb=1)
    begun = recorded(monkeypatch)
    train(parts, optimizer, overflow=(1,))
    assert torch.equal(weights(parts), weights(whole))
    optimizer.backward(parts(batch(0, ranks.rank)).square().sum(), last=False)
    del begun[:]
    optimizer.backward(parts(batch(1, ranks.rank)).square().sum())
    name = "reduce" if split else "all_reduce"
    expected = [(name, first, 64, torch.float32) for first in (192, 128, 64, 0)]
    assert begun == (expected if ranks.size > 1 else [])
    assert all(each.grad.data_ptr() >= optimizer.gradients.data_ptr() for each in parts.parameters())


def test_the_ranks_begin_sums_in_one_order_whatever_comes(small_buckets, monkeypatch):
    """The second rank has no gradient of its first layer: what its backward pass did not begin, the update does."""
    layers = network()
    optimizer = flat(layers, "plain", bucket_mb=1)
    before, begun = weights(layers).clone(), recorded(monkeypatch)
    inputs = batch(0, 0)
    mine = layers(inputs) if ranks.rank == 0 else layers[2](layers[:2](inputs).detach())
    optimizer.backward(mine.square().sum())
    early = len(begun)
    optimizer.step(0.01, ROWS)
    assert early == (0 if ranks.size == 1 else 4 if ranks.rank == 0 else 2)
    assert [first for _, first, _, _ in begun] == ([] if ranks.size == 1 else [192, 128, 64, 0])
    assert not torch.equal(weights(layers)[:40], before[:40])
    mean = torch.tensor(pytorch.total(weights(layers))) / ranks.size
    torch.testing.assert_close(weights(layers), mean, atol=0, rtol=0)


@variants
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("bucket_mb", [0, 1])
def test_gradients_travel_in_sixteen_bits(kernel, split, kind, bucket_mb, small_buckets, monkeypatch):
    layers = network()
    begun = recorded(monkeypatch)
    optimizer = flat(layers, kernel, scale=RULE, split=split, compression=kind, bucket_mb=bucket_mb)
    train(layers, optimizer, overflow=(2,))
    assert {dtype for _, _, _, dtype in begun} == ({pytorch.DTYPES[kind]} if ranks.size > 1 else set())
    found, whole = weights(layers), expected(None)
    torch.testing.assert_close(found, whole, atol=0.02, rtol=0)
    assert torch.equal(found, whole) is False or ranks.size == 1
    assert optimizer.skipped_since() == 1


@pytest.mark.parametrize("bucket_mb", [0, 1])
def test_a_sum_that_sixteen_bits_do_not_hold_is_one_of_means_that_they_do(bucket_mb, small_buckets):
    layers = torch.nn.Linear(1, 1, bias=False)
    optimizer = flat(layers, "plain", compression="fp16", bucket_mb=bucket_mb)
    optimizer.backward(40_000 * layers.weight.sum())
    if ranks.size > 1:
        optimizer._sums.end()
    assert float(layers.weight.grad) == 40_000 * ranks.size


def test_an_older_pytorch_sums_after_the_backward_pass(small_buckets, monkeypatch):
    monkeypatch.delattr(torch.Tensor, "register_post_accumulate_grad_hook")
    whole, late = network(), network()
    train(whole, flat(whole, "plain"))
    begun = recorded(monkeypatch)
    train(late, flat(late, "plain", bucket_mb=1))
    assert torch.equal(weights(late), weights(whole))
    assert {length for _, _, length, _ in begun} == ({256} if ranks.size > 1 else set())


@pytest.mark.parametrize(
    ("ends", "total", "elements", "shares", "found"),
    [
        ((64, 128, 192, 256), 256, 128, 1, [(128, 256, None, (2, 3)), (0, 128, None, (0, 1))]),
        ((64, 128, 192, 256), 256, 100, 1, [(128, 256, None, (2, 3)), (0, 128, None, (0, 1))]),
        # A rest at the beginning and padding behind the end
        ((64, 192), 256, 128, 1, [(64, 256, None, (1,)), (0, 64, None, (0,))]),
        ((192,), 256, 128, 1, [(0, 256, None, (0,))]),
        # A weight that two ranks share is waited for by both.
        ((64, 192), 256, 64, 2, [(128, 256, 1, (1,)), (64, 128, 0, (1,)), (0, 64, 0, (0,))]),
        ((256,), 256, 64, 4, [(192, 256, 3, (0,)), (128, 192, 2, (0,)), (64, 128, 1, (0,)), (0, 64, 0, (0,))]),
    ],
)
def test_buckets(ends, total, elements, shares, found):
    places = [Place(*each) for each in zip((0, *ends), ends)]
    assert [tuple(each) for each in buckets_of(places, total, elements, shares)] == found


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
