"""FP8 GEMMs and kept weights next to float64 and to autocast; on a CPU, whose PyTorch multiplies in FP8 as well."""

import dataclasses
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.bert.pytorch import data
from benchmarks.bert.pytorch.train import Training, build, train_step
from benchmarks.common.data.problem import Problem
from benchmarks.common.torch import low_precision
from benchmarks.common.torch.low_precision import KeptLinear, cast, gathered_product, keep, refresh
from benchmarks.language.pytorch import fp8
from tests.in_framework.pytorch.bert_network import CONFIG, CPU, micro_batch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
IN_FP8 = dataclasses.replace(CONFIG, precision="bf16", fp8="scaled_mm", token_bucket=32)
IN_BF16 = dataclasses.replace(IN_FP8, fp8="none")


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def data_of_one_vocabulary():
    return SimpleNamespace(vocabulary=SimpleNamespace(size=104))


def batch(config):
    # Rows filled up, as FP8 needs them.
    filled = SimpleNamespace(**{**dataclasses.asdict(config), "fills_rows": True})
    return [data.ready(micro_batch(number), filled, CPU, 10) for number in range(2)]


@pytest.mark.parametrize("kind, bits", [(E4M3, 3), (E5M2, 2)])
def test_a_cast_uses_the_range_of_its_type(kind, bits):
    given = drawn(64, 48) * 1e-5
    rounded, inverse = cast(given, kind)
    assert rounded.float().abs().max() == torch.finfo(kind).max
    back = rounded.double() * inverse.double()
    large = given.abs() > given.abs().max() / 256
    # Half a unit of the last bit of the significand.
    error = ((back - given).abs() / given.abs())[large].max()
    assert 2.0 ** -(bits + 3) < error <= 2.0 ** -(bits + 1) * 1.001
    zeros, inverse = cast(torch.zeros(4, 4), kind)
    assert not zeros.float().any() and torch.isfinite(inverse)


def test_a_product_in_fp8_is_that_of_the_rounded_tensors():
    linear = nn.Linear(64, 48)
    kept = KeptLinear(linear, E4M3)
    refresh([kept])
    hidden = drawn(32, 64).bfloat16().requires_grad_()
    gradient = drawn(32, 48, seed=1).bfloat16()
    kept(hidden).backward(gradient)

    def exact(tensor, kind):
        rounded, inverse = cast(tensor, kind)
        return rounded.double() * inverse.double()

    x, w, g = exact(hidden.detach(), E4M3), exact(linear.weight.detach(), E4M3), exact(gradient, E5M2)
    for ours, its in (
        (kept(hidden.detach()).detach(), x @ w.t() + linear.bias.detach().double()),
        (hidden.grad, g @ w),
        (linear.weight.grad, g.t() @ x),
        (linear.bias.grad, gradient.double().sum(0)),
    ):
        assert ((ours.double() - its).abs().max() / its.abs().max()).item() < 2.0**-7, "bf16's last bit, twice"
    assert linear.weight.grad.dtype == torch.float32
    assert low_precision.why_no_fp8(CPU.context) == ""


def test_a_gathered_weight_multiplies_with_the_same_bits():
    linear = nn.Linear(64, 48).bfloat16()
    kept = KeptLinear(linear, E4M3)
    refresh([kept])
    hidden, gradient = drawn(2, 16, 64).bfloat16(), drawn(2, 16, 48, seed=1).bfloat16()
    found = []
    for product in (lambda given: kept.product(given.flatten(0, 1)).view(2, 16, 48),
                    lambda given: gathered_product(given, linear.weight)):  # fmt: skip
        linear.weight.grad = None
        given = hidden.clone().requires_grad_()
        value = product(given)
        value.backward(gradient)
        found.append((value, given.grad, linear.weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*found))
    linear.requires_grad_(False)
    given = hidden.clone().requires_grad_()
    gathered_product(given, linear.weight).backward(gradient)
    assert torch.equal(given.grad, found[0][1])


def test_what_cannot_multiply_in_fp8_says_why(monkeypatch):
    def refused(*args, **options):
        raise RuntimeError("torch._scaled_mm is only supported on devices with compute capability >= 8.9\nmore")

    monkeypatch.setattr(torch, "_scaled_mm", refused)
    assert "compute capability >= 8.9" in low_precision.why_no_fp8(CPU.context)
    with pytest.raises(Problem, match=r"fp8=scaled_mm: RuntimeError: (.|\n)*hint: set fp8=none"):
        Training(IN_FP8, 104, CPU)
    monkeypatch.setattr(torch, "_scaled_mm", lambda left, right, **options: (left.float() @ right.float()).bfloat16())
    assert "wrong by" in low_precision.why_no_fp8(CPU.context), "the scales are left out"
    monkeypatch.delattr(torch, "_scaled_mm")
    assert "has no FP8" in low_precision.why_no_fp8(CPU.context)
    on_gpu = SimpleNamespace(fp8="auto", compile=False, cuda_graph=False, device="gpu")
    assert fp8._choose(on_gpu, CPU) == "transformer_engine"
    on_gpu.cuda_graph = True
    with pytest.raises(Problem):
        fp8._choose(on_gpu, CPU)


@pytest.mark.parametrize("gelu", ["erf", "tanh"])
def test_kept_16_bit_weights_change_no_bit(gelu):
    config = dataclasses.replace(IN_BF16, gelu=gelu)
    kept, cast_each_time = Training(config, 104, CPU), Training(dataclasses.replace(config, accumulation=1), 104, CPU)
    assert len(kept.kept) == 4 * config.layers and not cast_each_time.kept
    for _ in range(3):
        parts = batch(config)
        for training in (kept, cast_each_time):
            train_step(training, parts, 0.01)
    for ours, its in zip(kept.network.parameters(), cast_each_time.network.parameters()):
        assert torch.equal(ours, its)


def test_training_in_fp8_learns_and_resumes_with_the_same_bits():
    plain, rounded = Training(CONFIG, 104, CPU), build(IN_FP8, data_of_one_vocabulary(), CPU, {})
    assert list(plain.network.state_dict()) == list(rounded.network.state_dict()), "a checkpoint fits with and without"
    losses = [[float(train_step(each, batch(IN_FP8), 0.01)) for _ in range(10)] for each in (plain, rounded)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02) and losses[1] != losses[0]
    assert losses[1][-1] < 0.9 * losses[1][0]

    file = io.BytesIO()
    torch.save({**rounded.state_dict(), **rounded.rank_state_dict()}, file)
    file.seek(0)
    resumed = build(IN_FP8, data_of_one_vocabulary(), CPU, torch.load(file))
    after = [float(train_step(each, batch(IN_FP8), 0.01)) for each in (rounded, resumed)]
    assert after[0] == after[1]
    assert all(torch.equal(*pair) for pair in zip(rounded.network.parameters(), resumed.network.parameters()))


def test_an_update_reaches_the_copies():
    module = nn.Module()
    module.one = nn.Linear(16, 16)
    (kept,) = keep([module], ["one"], E4M3)
    before = kept.rows.float().clone()
    with torch.no_grad():
        kept.weight.neg_()
    refresh([kept])
    assert torch.equal(kept.rows.float(), -before)
    assert torch.equal(kept.columns.float(), -before.t()) and kept.columns.is_contiguous()


@pytest.mark.parametrize("kind", [torch.bfloat16, E4M3])
def test_a_compiled_product_is_one_graph(kind):
    kept = KeptLinear(nn.Linear(32, 16), kind)
    refresh([kept])
    hidden = drawn(16, 32).bfloat16()
    compiled = torch.compile(kept.product, backend="aot_eager", fullgraph=True, dynamic=True)
    found = []
    for product in (kept.product, compiled):
        kept.weight.grad = None
        given = hidden.clone().requires_grad_()
        product(given).float().square().sum().backward()
        found.append((product(given).detach(), given.grad, kept.weight.grad))
    for ours, its in zip(*found):
        assert torch.equal(ours, its)
