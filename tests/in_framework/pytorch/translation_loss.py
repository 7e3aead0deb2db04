"""The chunked loss next to the plain one: values, gradients, types and memory; and the choice of apex's operators."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.translation.pytorch import loss, operators

ROWS, VOCABULARY, WIDTH, CHUNK = 50, 301, 24, 7
CPU = torch.device("cpu")


class LargestTensor(TorchDispatchMode):
    # Keeps the number of elements of the largest result of any operator.

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        self.elements = max([self.elements, *(each.numel() for each in results if torch.is_tensor(each))])
        return result


def example():
    # Hidden states, weights and bias, and targets of which every fifth is padding.
    torch.manual_seed(1)
    tensors = [torch.randn(ROWS, WIDTH), torch.randn(VOCABULARY, WIDTH) / 4, torch.randn(VOCABULARY)]
    targets = torch.randint(1, VOCABULARY, (ROWS,))
    targets[::5] = loss.PAD
    return [tensor.requires_grad_() for tensor in tensors], targets


def results(name, smoothing, with_bias, autocast=None):
    # The sum, and the gradients of half of it.
    (hidden, weight, bias), targets = example()
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        if name == "plain":
            logits = torch.nn.functional.linear(*inputs)
            found = loss.plain_loss(logits, targets, smoothing)
        else:
            found = loss.smoothed_loss(hidden, weight, bias if with_bias else None, targets, smoothing, CHUNK)
    return [found.detach(), *torch.autograd.grad(found / 2, inputs)]


def error(ours, theirs):
    # Largest error as a share of the largest value of each tensor.
    assert [(each.dtype, each.shape) for each in ours] == [(each.dtype, each.shape) for each in theirs]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_plain_one_in_every_type(smoothing, with_bias):
    exact = results("plain", smoothing, with_bias)
    assert error(results("chunked", smoothing, with_bias), exact) < 5e-6
    for dtype, most in ((torch.float16, 5e-3), (torch.bfloat16, 4e-2)):
        plain, chunked = (error(results(name, smoothing, with_bias, dtype), exact) for name in ("plain", "chunked"))
        assert 0 < chunked < min(most, 1.5 * plain)


def test_padding_counts_nothing_and_is_never_computed():
    (hidden, weight, bias), targets = example()
    rows = (targets != loss.PAD).nonzero(as_tuple=True)[0]
    given, found = (loss.smoothed_loss(hidden, weight, None, targets, 0.1, rows=each) for each in (rows, None))
    assert given == found and loss.smoothed_loss(hidden, weight, None, targets * 0, 0.1) == 0
    assert torch.autograd.grad(found, [hidden])[0][::5].abs().max() == 0
    alone = torch.autograd.grad(loss.smoothed_loss(hidden.detach(), weight, None, targets, 0.1), [weight])
    assert error(alone, [torch.autograd.grad(given, [weight])[0]]) < 5e-6
    # The gradient of the weights is the largest tensor with any vocabulary, then one chunk of logits.
    for with_gradients in (True, False):
        with LargestTensor() as seen, torch.set_grad_enabled(with_gradients):
            loss.smoothed_loss(hidden, weight, bias, targets, 0.1, CHUNK)
        assert seen.elements == max(VOCABULARY * WIDTH, CHUNK * VOCABULARY) < ROWS * VOCABULARY / 2


class FusedLoss(torch.autograd.Function):
    # What apex.contrib.xentropy.SoftmaxCrossEntropyLoss does, by PyTorch's operators.

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
    assert choose("apex", saved={}, found=RIGHT)[0] == {"loss": "apex", "norm": "apex"}
    saved = {"loss": "apex", "norm": "plain"}
    assert choose("auto", saved=saved, found=RIGHT)[0] == saved
    assert choose("auto", saved={})[0] == {"loss": "plain", "norm": "plain"}
    times = itertools.count(1)
    # apex is measured first, so that it is the faster.
    monkeypatch.setattr(kernels, "seconds", lambda call: (call(), next(times))[1])
    wrong = {**RIGHT, "norm": SimpleNamespace(fused_layer_norm_affine=lambda **names: 1.001 * fused_norm(**names))}
    assert choose("auto", saved={}, found=wrong)[0] == saved
    printed = capsys.readouterr().err
    assert "loss apex (apex" in printed and "norm plain (apex ArithmeticError: wrong by" in printed
    for wanted, had, hint in (("apex", {}, "use kernels=auto"), ("auto", {"loss": "apex"}, "resume there")):
        with pytest.raises(ValueError, match=hint):
            choose(wanted, found={}, saved=had)
