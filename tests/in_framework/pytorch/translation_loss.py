"""The chunked loss against PyTorch's cross-entropy: values, gradients, types and memory; the choice of apex."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.translation.pytorch import loss, operators
from tests.in_framework.waves import waves

ROWS, VOCABULARY, WIDTH, CHUNK = 50, 301, 24, 7
CPU = torch.device("cpu")


class LargestTensor(TorchDispatchMode):
    # Number of elements of the largest result of any operator
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        self.elements = max([self.elements, *(output.numel() for output in results if torch.is_tensor(output))])
        return result


def example():
    # Hidden states, weights, bias, and targets; every fifth target is padding
    shapes = ((ROWS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    tensors = [torch.from_numpy(waves(*shape, phase=phase)).float() for phase, shape in enumerate(shapes)]
    targets = 1 + torch.arange(ROWS) ** 2 % (VOCABULARY - 1)
    targets[::5] = loss.PAD
    return [tensor.requires_grad_() for tensor in tensors], targets


def results(is_chunked, smoothing, has_bias, dtype=None):
    # The sum, and the gradients of half of it
    inputs, targets = example()
    hidden, weight, bias = inputs = inputs if has_bias else [*inputs[:2], None]
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        if is_chunked:
            total = loss.smoothed_loss(hidden, weight, bias, targets, smoothing, CHUNK)
        else:
            total = loss.plain_loss(torch.nn.functional.linear(hidden, weight, bias), targets, smoothing)
    return [total.detach(), *torch.autograd.grad(total / 2, [tensor for tensor in inputs if tensor is not None])]


def error(ours, theirs):
    # Largest error as a fraction of the largest value of each tensor
    assert [(tensor.dtype, tensor.shape) for tensor in ours] == [(tensor.dtype, tensor.shape) for tensor in theirs]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_chunked_loss_and_gradients_in_every_type(smoothing, has_bias):
    (hidden, weight, bias), targets = example()
    logits = torch.nn.functional.linear(hidden, weight, bias if has_bias else None)
    exact = results(False, smoothing, has_bias)
    options = {"ignore_index": loss.PAD, "reduction": "sum", "label_smoothing": smoothing}
    torch.testing.assert_close(exact[0], torch.nn.functional.cross_entropy(logits, targets, **options).detach())
    assert error(results(True, smoothing, has_bias), exact) < 5e-6
    for dtype, tolerance in ((torch.float16, 5e-3), (torch.bfloat16, 4e-2)):
        plain, chunked = (error(results(is_chunked, smoothing, has_bias, dtype), exact) for is_chunked in (False, True))
        assert 0 < chunked < min(tolerance, 1.5 * plain)


def test_padding_counts_nothing_and_is_never_computed():
    (hidden, weight, bias), targets = example()
    rows = (targets != loss.PAD).nonzero(as_tuple=True)[0]
    of_rows, total = (loss.smoothed_loss(hidden, weight, None, targets, 0.1, rows=some) for some in (rows, None))
    assert of_rows == total and loss.smoothed_loss(hidden, weight, None, targets * 0, 0.1) == 0
    assert torch.autograd.grad(total, [hidden])[0][::5].abs().max() == 0
    frozen = torch.autograd.grad(loss.smoothed_loss(hidden.detach(), weight, None, targets, 0.1), [weight])
    assert error(frozen, torch.autograd.grad(of_rows, [weight])) < 5e-6
    # The gradient of the weights is the largest tensor with any vocabulary, then one chunk of logits.
    for has_gradients in (True, False):
        with LargestTensor() as largest, torch.set_grad_enabled(has_gradients):
            loss.smoothed_loss(hidden, weight, bias, targets, 0.1, CHUNK)
        assert largest.elements == max(VOCABULARY * WIDTH, CHUNK * VOCABULARY) < ROWS * VOCABULARY / 2


class FusedLoss(torch.autograd.Function):
    # apex.contrib.xentropy.SoftmaxCrossEntropyLoss by PyTorch's operators

    @staticmethod
    def forward(ctx, logits, labels, smoothing, padding, to_float):
        assert to_float == (logits.dtype != torch.float32)
        with torch.enable_grad():
            wide = logits.detach().float().requires_grad_()
            found = torch.nn.functional.cross_entropy(wide, labels, reduction="none", label_smoothing=smoothing)
            ctx.by = torch.autograd.grad(found.sum(), wide)[0].to(logits.dtype)
        return found.detach().masked_fill(labels == padding, 0)

    @staticmethod
    def backward(ctx, gradients):
        return ctx.by * gradients[:, None], None, None, None, None


def fused_norm(*, input, weight, bias, normalized_shape, eps):
    return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)


RIGHT = {
    "loss": SimpleNamespace(SoftmaxCrossEntropyLoss=FusedLoss),
    "norm": SimpleNamespace(fused_layer_norm_affine=fused_norm),
}
SIZES = {"loss": {"rows": 4, "vocabulary": 50}, "norm": {"rows": 4, "width": 16}}
choose = partial(operators.choose, sizes=SIZES, ranks=Ranks(0, 1, 0, 1, CPU), dtype=torch.float32)


def test_apex_is_taken_where_it_is_right_and_faster(monkeypatch, capsys):
    for name, function in operators.apex_operators(RIGHT).items():
        for dtype in kernels.TOLERANCES:
            distance = kernels.distance_of(operators.OPERATORS[name], function, CPU, dtype)
            assert distance < kernels.tolerance(CPU, dtype)
    assert choose("apex", saved={}, apex_modules=RIGHT)[0] == {"loss": "apex", "norm": "apex"}
    saved = {"loss": "apex", "norm": "plain"}
    assert choose("auto", saved=saved, apex_modules=RIGHT)[0] == saved
    assert choose("auto", saved={})[0] == {"loss": "plain", "norm": "plain"}
    times = itertools.count(1)
    # apex is measured first, so that it is the faster.
    monkeypatch.setattr(kernels, "seconds", lambda call: (call(), next(times))[1])
    wrong = {**RIGHT, "norm": SimpleNamespace(fused_layer_norm_affine=lambda **names: 1.001 * fused_norm(**names))}
    assert choose("auto", saved={}, apex_modules=wrong)[0] == saved
    printed = capsys.readouterr().err
    assert "loss apex (apex" in printed and "norm plain (apex ArithmeticError: wrong by" in printed
    for wanted, had, hint in (("apex", {}, "use kernels=auto"), ("auto", {"loss": "apex"}, "resume there")):
        with pytest.raises(ValueError, match=hint):
            choose(wanted, apex_modules={}, saved=had)
