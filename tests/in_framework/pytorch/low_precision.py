"""FP8 GEMMs compared with float64, and stored low-precision weights. PyTorch also multiplies FP8 on a CPU."""

import dataclasses
import io
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.bert.pytorch import data, train
from benchmarks.common.data.problem import Problem
from benchmarks.language.pytorch import low_precision
from tests.in_framework.pytorch.bert_network import CONFIG, CPU, micro_batch

LONG = True
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
IN_FP8 = dataclasses.replace(CONFIG, precision="bf16", fp8="scaled_mm", token_bucket=32)
IN_BF16 = dataclasses.replace(IN_FP8, fp8="none")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_linear(dtype, size_in=64, size_out=48):
    linear = nn.Linear(size_in, size_out)
    kept = low_precision.KeptLinear(linear, dtype)
    low_precision.refresh([kept])
    return linear, kept


def run_with_gradients(product, hidden, gradient, weight):
    # Return the output and the gradients of the input and the weight
    weight.grad, hidden = None, hidden.clone().requires_grad_()
    output = product(hidden)
    output.backward(gradient)
    return output.detach(), hidden.grad, weight.grad


def padded_batch(config):
    config = SimpleNamespace(**{**dataclasses.asdict(config), "fills_rows": True})
    return [data.ready(micro_batch(number), config, CPU, 10) for number in range(2)]


@pytest.mark.parametrize("dtype, bits", [(E4M3, 3), (E5M2, 2)])
def test_cast_uses_the_range_of_its_type(dtype, bits):
    values = draw(64, 48) * 1e-5
    rounded, _, inverse = low_precision.cast(values, dtype)
    assert rounded.float().abs().max() == torch.finfo(dtype).max
    error = ((rounded.double() * inverse.double() - values).abs() / values.abs())[values.abs() > values.max() / 256]
    # Half a unit of the last bit of the significand.
    assert 2.0 ** -(bits + 3) < error.max() <= 2.0 ** -(bits + 1) * 1.001
    zeros, _, inverse = low_precision.cast(torch.zeros(4, 4), dtype)
    assert not zeros.float().any() and torch.isfinite(inverse)


def test_fp8_product_matches_float64_of_the_rounded_tensors():
    linear, kept = make_linear(E4M3)
    hidden, gradient = draw(32, 64).bfloat16(), draw(32, 48, seed=1).bfloat16()
    output, hidden_grad, weight_grad = run_with_gradients(kept, hidden, gradient, linear.weight)

    def round_trip(tensor, dtype):
        rounded, _, inverse = low_precision.cast(tensor.detach(), dtype)
        return rounded.double() * inverse.double()

    x, w, g = round_trip(hidden, E4M3), round_trip(linear.weight, E4M3), round_trip(gradient, E5M2)
    for tensor, expected in (
        (output, x @ w.t() + linear.bias.detach().double()),
        (hidden_grad, g @ w),
        (weight_grad, g.t() @ x),
        (linear.bias.grad, gradient.double().sum(0)),
    ):
        error = (tensor.double() - expected).abs().max() / expected.abs().max()
        assert error < 2.0**-7, "two units of bf16's last bit"
    assert weight_grad.dtype == torch.float32
    assert low_precision.why_no_fp8(CPU.context) == ""


def test_missing_fp8_is_explained(monkeypatch):
    error = RuntimeError("torch._scaled_mm is only supported on devices with compute capability >= 8.9\nmore")
    monkeypatch.setattr(torch, "_scaled_mm", mock.Mock(side_effect=error))
    with pytest.raises(Problem, match=r"fp8=scaled_mm: RuntimeError: .* capability >= 8.9(.|\n)*hint: set fp8=none"):
        train.Training(IN_FP8, 104, CPU)
    monkeypatch.setattr(torch, "_scaled_mm", lambda left, right, **_: (left.float() @ right.float()).bfloat16())
    assert "wrong by" in low_precision.why_no_fp8(CPU.context)
    monkeypatch.delattr(torch, "_scaled_mm")
    assert "has no FP8" in low_precision.why_no_fp8(CPU.context)


@pytest.mark.parametrize("gelu", ["erf", "tanh"])
def test_stored_bf16_weights_train_with_the_same_bits_as_autocast(gelu):
    config = dataclasses.replace(IN_BF16, gelu=gelu)
    stored, autocast = (train.Training(dataclasses.replace(config, accumulation=n), 104, CPU) for n in (2, 1))
    assert len(stored.kept) == 4 * config.layers and not autocast.kept
    for training in (stored, autocast):
        for _ in range(3):
            train.train_step(training, padded_batch(config), 0.01)
    assert all(map(torch.equal, stored.network.parameters(), autocast.network.parameters()))


def test_fp8_training_learns_and_resumes_bit_for_bit():
    batch, data_set = padded_batch(IN_FP8), SimpleNamespace(vocabulary=SimpleNamespace(size=104))
    plain, in_fp8 = train.Training(CONFIG, 104, CPU), train.build(IN_FP8, data_set, CPU, {})
    assert list(plain.network.state_dict()) == list(in_fp8.network.state_dict()), "checkpoints fit with and without"
    expected, losses = ([float(train.train_step(each, batch, 0.01)) for _ in range(10)] for each in (plain, in_fp8))
    assert expected != losses == pytest.approx(expected, rel=0.02) and losses[-1] < 0.9 * losses[0]
    file = io.BytesIO()
    torch.save({**in_fp8.state_dict(), **in_fp8.rank_state_dict()}, file)
    file.seek(0)
    resumed = train.build(IN_FP8, data_set, CPU, torch.load(file, weights_only=True))
    assert torch.equal(*(train.train_step(training, batch, 0.01) for training in (in_fp8, resumed)))
    assert all(map(torch.equal, in_fp8.network.parameters(), resumed.network.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_product_compiles_to_one_graph_with_the_same_bits(dtype):
    linear, kept = make_linear(dtype, 32, 16)
    inputs = draw(16, 32).bfloat16(), draw(16, 16, seed=1).bfloat16(), linear.weight
    compiled = torch.compile(kept.product, backend="aot_eager", fullgraph=True, dynamic=True)
    assert all(map(torch.equal, run_with_gradients(compiled, *inputs), run_with_gradients(kept.product, *inputs)))
