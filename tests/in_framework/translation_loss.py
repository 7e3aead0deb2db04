"""The chunked loss next to the plain one: values, gradients, types, and the largest tensor that it makes.

Prints what it found as JSON.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.translation.pytorch import loss, operators

ROWS, VOCABULARY, WIDTH, CHUNK = 50, 301, 24, 7


class LargestTensor(TorchDispatchMode):
    """Keeps the number of elements of the largest result of any operator."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if torch.is_tensor(each):
                self.elements = max(self.elements, each.numel())
        return result


def example(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden states, weights and bias, and targets of which every fifth is padding."""
    torch.manual_seed(1)
    tensors = [torch.randn(ROWS, WIDTH), torch.randn(VOCABULARY, WIDTH) / 4, torch.randn(VOCABULARY)]
    targets = torch.randint(1, VOCABULARY, (ROWS,))
    targets[::5] = loss.PAD
    return [tensor.to(dtype).requires_grad_() for tensor in tensors], targets


def results(name: str, smoothing: float, with_bias: bool, autocast: torch.dtype | None = None) -> list[torch.Tensor]:
    """The sum, and the gradients of half of it."""
    (hidden, weight, bias), targets = example(torch.float32)
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        if name == "plain":
            logits = torch.nn.functional.linear(hidden, weight, bias if with_bias else None)
            found = loss.plain_loss(logits, targets, smoothing)
        else:
            found = loss.smoothed_loss(hidden, weight, bias if with_bias else None, targets, smoothing, CHUNK)
    return [found.detach(), *torch.autograd.grad(found / 2, inputs)]


def error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Largest error as a share of the largest value of each tensor; infinite where types or shapes differ."""
    if [(each.dtype, each.shape) for each in ours] != [(each.dtype, each.shape) for each in theirs]:
        return float("inf")
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


def gradients_are_the_values() -> bool:
    """Compare with finite differences in double precision."""
    (hidden, weight, bias), targets = example(torch.float64)
    small = [hidden[:9, :4].detach(), weight[:11, :4].detach(), bias[:11].detach()]
    chosen = targets[:9] % 11
    return all(
        torch.autograd.gradcheck(
            lambda *inputs: loss.smoothed_loss(*inputs, chosen, smoothing, chunk),  # noqa: B023
            [each.clone().requires_grad_() for each in small],
        )
        for smoothing, chunk in ((0.0, 4), (0.1, 4), (0.1, 100))
    )


def largest(with_gradients: bool) -> int:
    (hidden, weight, bias), targets = example(torch.float32)
    with LargestTensor() as seen, torch.set_grad_enabled(with_gradients):
        loss.smoothed_loss(hidden, weight, bias, targets, 0.1, CHUNK)
    return seen.elements


class FusedLoss(torch.autograd.Function):
    """What apex.contrib.xentropy.SoftmaxCrossEntropyLoss does, by PyTorch's operators."""

    @staticmethod
    def forward(ctx: Any, logits: Any, labels: Any, smoothing: float, padding: int, to_float: bool) -> Any:
        assert to_float == (logits.dtype != torch.float32)
        wide = logits.float()
        found = torch.nn.functional.cross_entropy(wide, labels, reduction="none", label_smoothing=smoothing)
        by = wide.softmax(1) - smoothing / wide.shape[1]
        by.scatter_add_(1, labels[:, None], torch.full_like(labels[:, None], smoothing - 1, dtype=by.dtype))
        ctx.save_for_backward(by)
        ctx.dtype = logits.dtype
        return found.masked_fill(labels == padding, 0)

    @staticmethod
    def backward(ctx: Any, gradients: Any) -> Any:
        return (ctx.saved_tensors[0] * gradients[:, None]).to(ctx.dtype), None, None, None, None


def fused_norm(*, input: Any, weight: Any, bias: Any, normalized_shape: Any, eps: float) -> Any:
    return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)


def apex_is_chosen_where_it_is_right() -> dict[str, Any]:
    """The choice with modules of apex's names, of which one may be wrong; a CPU has no apex of its own."""
    right = {
        "loss": SimpleNamespace(SoftmaxCrossEntropyLoss=FusedLoss),
        "norm": SimpleNamespace(fused_layer_norm_affine=fused_norm),
    }
    wrong = {**right, "norm": SimpleNamespace(fused_layer_norm_affine=lambda **names: 1.001 * fused_norm(**names))}
    sizes = {"loss": {"rows": 4, "vocabulary": 50}, "norm": {"rows": 4, "width": 16}}
    choose = partial(operators.choose, sizes=sizes, ranks=Ranks(0, 1, 0, 1, torch.device("cpu")), dtype=torch.float32)
    cpu = torch.device("cpu")
    found = {
        "errors": {
            f"{name} {dtype}": kernels.distance_of(operators.OPERATORS[name], function, cpu, dtype)
            / kernels.tolerance(cpu, dtype)
            for name, function in operators.apex_operators(right).items()
            for dtype in kernels.TOLERANCES
        },
        "wanted": choose("apex", saved={}, found=right)[0],
        "resumed": choose("auto", saved={"loss": "apex", "norm": "plain"}, found=right)[0],
        "of this machine": choose("auto", saved={})[0],
    }
    times, measured = itertools.count(1), kernels.seconds
    kernels.seconds = lambda call: (call(), next(times))[1]  # apex is measured first, so that it is the faster
    with contextlib.redirect_stderr(io.StringIO()) as told:
        found["faster, wrong"] = choose("auto", saved={}, found=wrong)[0]
    kernels.seconds = measured
    found["told"] = told.getvalue()
    for name, arguments in (("apex", {"saved": {}}), ("auto", {"saved": {"loss": "apex"}})):
        try:
            choose(name, found={}, **arguments)
        except ValueError as problem:
            found[f"refused {name}"] = str(problem)
    return found


def main() -> None:
    (hidden, weight, _), targets = example(torch.float32)
    kinds = [(smoothing, with_bias) for smoothing in (0.0, 0.1) for with_bias in (False, True)]
    exact = [results("plain", *kind) for kind in kinds]
    rows = (targets != loss.PAD).nonzero(as_tuple=True)[0]
    given = [loss.smoothed_loss(hidden, weight, None, targets, 0.1, rows=each).item() for each in (None, rows)]
    nothing = loss.smoothed_loss(hidden, weight, None, targets * 0, 0.1)
    untouched = torch.autograd.grad(loss.smoothed_loss(hidden, weight, None, targets, 0.1), [hidden])[0]
    # The weights alone are trained.
    alone = torch.autograd.grad(loss.smoothed_loss(hidden.detach(), weight, None, targets, 0.1), [weight])[0]
    found = {
        "gradcheck": gradients_are_the_values(),
        "float32": max(error(results("chunked", *kind), exact[at]) for at, kind in enumerate(kinds)),
        "low precision": {
            str(dtype).rpartition(".")[2]: {
                name: max(error(results(name, *kind, dtype), exact[at]) for at, kind in enumerate(kinds))
                for name in ("plain", "chunked")
            }
            for dtype in (torch.float16, torch.bfloat16)
        },
        "rows given": given[0] == given[1],
        "nothing but padding": nothing.item(),
        "gradient of padding": float(untouched[::5].abs().max()),
        "weights alone": error([alone], [exact[2][2] * 2]),
        "apex": apex_is_chosen_where_it_is_right(),
        "logits": ROWS * VOCABULARY,
        "largest tensors": [largest(True), largest(False)],
        "inputs and a chunk": max(VOCABULARY * WIDTH, CHUNK * VOCABULARY),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
