"""The chunked loss next to the plain one: values, gradients, types, and the largest tensor that it makes.

Prints what it found as JSON.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.translation.pytorch import loss

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
    """Both sums, and the gradients of half the first."""
    (hidden, weight, bias), targets = example(torch.float32)
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        if name == "plain":
            logits = torch.nn.functional.linear(hidden, weight, bias if with_bias else None)
            sums = loss.plain_loss(logits, targets, smoothing)
        else:
            sums = loss.smoothed_loss(hidden, weight, bias if with_bias else None, targets, smoothing, CHUNK)
    return [*(each.detach() for each in sums), *torch.autograd.grad(sums[0] / 2, inputs)]


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
            lambda *inputs: loss.smoothed_loss(*inputs, chosen, smoothing, chunk)[0],  # noqa: B023
            [each.clone().requires_grad_() for each in small],
        )
        for smoothing, chunk in ((0.0, 4), (0.1, 4), (0.1, 100))
    )


def largest(with_gradients: bool) -> int:
    (hidden, weight, bias), targets = example(torch.float32)
    with LargestTensor() as seen, torch.set_grad_enabled(with_gradients):
        loss.smoothed_loss(hidden, weight, bias, targets, 0.1, CHUNK)
    return seen.elements


def main() -> None:
    (hidden, weight, _), targets = example(torch.float32)
    kinds = [(smoothing, with_bias) for smoothing in (0.0, 0.1) for with_bias in (False, True)]
    exact = [results("plain", *kind) for kind in kinds]
    rows = (targets != loss.PAD).nonzero(as_tuple=True)[0]
    given = [loss.smoothed_loss(hidden, weight, None, targets, 0.1, rows=each)[0].item() for each in (None, rows)]
    nothing = loss.smoothed_loss(hidden, weight, None, targets * 0, 0.1)
    untouched = torch.autograd.grad(loss.smoothed_loss(hidden, weight, None, targets, 0.1)[0], [hidden])[0]
    # The weights alone are trained.
    alone = torch.autograd.grad(loss.smoothed_loss(hidden.detach(), weight, None, targets, 0.1)[0], [weight])[0]
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
        "nothing but padding": [each.item() for each in nothing],
        "gradient of padding": float(untouched[::5].abs().max()),
        "weights alone": error([alone], [exact[2][3] * 2]),
        "logits": ROWS * VOCABULARY,
        "largest tensors": [largest(True), largest(False)],
        "inputs and a chunk": max(VOCABULARY * WIDTH, CHUNK * VOCABULARY),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
