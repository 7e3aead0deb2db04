"""The kernel of FP8 copies in Triton's interpreter: the bits of PyTorch's casts, alone and in linear layers."""

import pytest
import torch
from torch import nn
from triton.runtime import interpreter

from benchmarks.language.pytorch import low_precision, operators
from benchmarks.language.pytorch.kernels import cast_copies
from tests.in_framework.waves import waves

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE = torch.ones(())


@pytest.fixture(autouse=True)
def round_as_hardware(monkeypatch):
    """Triton's interpreter rounds ties away from zero and loses carries in FP8; hardware rounds to even as PyTorch."""
    convert, formats = interpreter._convert_float, {"fp8e4nv": E4M3, "fp8e5": E5M2}

    def rounded(values, before, after, mode):
        if after.name not in formats:
            return convert(values, before, after, mode)
        cast = torch.from_numpy(values.copy()).to(formats[after.name])
        return cast.view(torch.uint8).numpy().reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def bits(copies):
    return [copy.view(torch.uint8) for copy in copies]


def matrix(height, width, dtype=torch.bfloat16, phase=0):
    return torch.from_numpy(waves(height, width, phase=phase)).to(dtype)


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (131, 37), (16, 272)])
def test_copies_have_the_bits_of_the_casts(kind, dtype, shape):
    # Half of the values are too large: they saturate.
    values, scale = matrix(*shape, dtype), torch.tensor(2 * torch.finfo(kind).max)
    values.view(-1)[::3] *= 1e-6  # subnormal
    copies = cast_copies(values, scale, kind, True, True)
    expected = (values.float() * scale).clamp(-torch.finfo(kind).max, torch.finfo(kind).max).to(kind)
    assert copies[0].dtype == kind and copies[1].shape == shape[::-1] and copies[1].is_contiguous()
    assert all(map(torch.equal, bits(copies), bits([expected, expected.t().contiguous()])))
    assert all(map(torch.equal, bits(copies), bits(operators.cast_copies(values, scale, kind, True, True))))


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_every_bf16_value_is_cast_as_in_pytorch(kind):
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16).view(256, 256)
    rows, columns = cast_copies(values, ONE, kind, True, True)
    assert torch.equal(rows.isnan(), values.isnan()), "NaN remains NaN"
    assert rows.float()[values.isinf()].abs().unique() == torch.finfo(kind).max, "infinite values saturate"
    expected, transposed = operators.cast_copies(values, ONE, kind, True, True)
    for copy, plain in ((rows, expected), (columns, transposed)):
        assert torch.equal(copy.isnan(), plain.isnan())
        assert torch.equal(*(t.float().nan_to_num() for t in (copy, plain)))


def test_only_requested_copies_are_written_and_strides_do_not_matter():
    values = matrix(48, 32).t()
    rows, columns = operators.cast_copies(values, ONE, E4M3, True, True)
    only_rows, nothing = cast_copies(values, ONE, E4M3, True, False)
    assert torch.equal(*bits([only_rows, rows])) and not nothing.numel()
    nothing, only_columns = cast_copies(rows, ONE, E4M3, False, True)  # the transposed copy of an FP8 weight
    assert torch.equal(*bits([only_columns, columns])) and not nothing.numel()


@pytest.mark.parametrize("stored", [True, False])
def test_linear_layers_with_the_kernel_have_the_same_bits(monkeypatch, stored):
    linear = nn.Linear(64, 48).bfloat16()
    kept = low_precision.KeptLinear(linear, E4M3)

    def run(cast):
        monkeypatch.setitem(operators.selected, "cast", cast)
        low_precision.refresh([kept])
        hidden = matrix(32, 64).requires_grad_()
        output = kept.product(hidden) if stored else low_precision.gathered_product(hidden, linear.weight)
        return [output, *torch.autograd.grad(output, [hidden, linear.weight], matrix(32, 48, phase=1))]

    results, expected = run(cast_copies), run(operators.cast_copies)
    assert all(map(torch.equal, results, expected))
    # E4M3 has 3 bits, E5M2 of the gradient 2: an error of 2^-4 and 2^-3 per value, averaged over sums.
    x, w, g = (t.detach().double() for t in (matrix(32, 64), linear.weight, matrix(32, 48, phase=1)))
    for tensor, exact, tolerance in zip(results, (x @ w.t(), g @ w, g.t() @ x), (2**-4, 2**-3, 2**-3)):
        assert (tensor.double() - exact).norm() / exact.norm() < tolerance


def test_kernel_is_one_operator_in_a_compiled_graph(monkeypatch):
    monkeypatch.setitem(operators.selected, "cast", cast_copies)
    weight = matrix(48, 64).requires_grad_()
    torch.library.opcheck(cast_copies, (matrix(16, 32), ONE, E4M3, True, False))
    compiled = torch.compile(low_precision.gathered_product, backend="aot_eager", fullgraph=True)
    results = []
    for product in (compiled, low_precision.gathered_product):
        hidden = matrix(32, 64).requires_grad_()
        output = product(hidden, weight)
        results.append([output, *torch.autograd.grad(output.sum(), [hidden, weight])])
    assert all(map(torch.equal, *results))
