"""BERT's Triton kernels in the interpreter next to float64: gelu of both kinds, dropout; and how they are chosen.

Prints what it found as JSON.
"""

import contextlib
import dataclasses
import io
import itertools
import json
from types import SimpleNamespace

import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.language.pytorch import kernels as triton_kernels
from benchmarks.language.pytorch import operators
from benchmarks.language.pytorch.pieces import add_norm, bias_gelu

CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))
ROWS, WIDTH, DROPOUT = 40, 96, 0.25


def drawn(*sizes):
    return [torch.randn(size).requires_grad_() for size in sizes]


def distance(ours, theirs):
    return max(float((a.detach() - b.detach()).abs().max() / b.detach().abs().max()) for a, b in zip(ours, theirs))


def with_gradients(found, given):
    return [found, *torch.autograd.grad(found.square().sum(), given)]


def gelu(kind):
    given = drawn((ROWS, WIDTH), WIDTH)
    exact = [each.detach().double().requires_grad_() for each in given]
    ours = with_gradients(triton_kernels.bias_gelu(*given, kind), given)
    return distance(ours, with_gradients(bias_gelu(*exact, kind), exact))


def dropout():
    """Values and gradients next to float64 with the very mask that the gradient shows."""
    given = drawn((ROWS, WIDTH), (ROWS, WIDTH), WIDTH, WIDTH)
    ours = with_gradients(triton_kernels.add_norm(*given, DROPOUT), given)
    mask = (ours[1] != 0).double()
    exact = [each.detach().double().requires_grad_() for each in given]
    theirs = with_gradients(add_norm(exact[0] * mask / (1 - DROPOUT), *exact[1:], 0.0), exact)
    again = with_gradients(triton_kernels.add_norm(*given, DROPOUT), given)
    torch.manual_seed(2)
    first = triton_kernels.add_norm(*given, DROPOUT)
    torch.manual_seed(2)
    return {
        "distance": distance(ours, theirs),
        "kept": float(mask.mean()),
        "by rows": [float(mask.mean(1).min()), float(mask.mean(1).max())],
        "by columns": [float(mask.mean(0).min()), float(mask.mean(0).max())],
        "same as the call before": float(((again[1] != 0).double() == mask).double().mean()),
        "same seed, same values": torch.equal(first, triton_kernels.add_norm(*given, DROPOUT)),
    }


def choices():
    """The choice with what a compiler makes of the operators being the fastest, of which one may be wrong."""
    config = SimpleNamespace(kernels="auto", compile=False, width=32, inner_width=48, gelu="tanh", dropout=0.1)
    # Its type alone is asked for.
    device = SimpleNamespace(type="cuda")
    by_compiler, choose = operators.compiled_operators, kernels.choose
    right = {"gelu": lambda *given: bias_gelu(*given), "norm": lambda *given: add_norm(*given)}
    wrong = {**right, "norm": lambda *given: 1.001 * add_norm(*given)}
    found = {}
    times = itertools.count(1)

    def timed(call):
        call()
        return next(times)  # compiled is measured first, so that it is the fastest

    kernels.choose = lambda names, wanted, ranks, *rest: choose(names, wanted, CPU, *rest)
    operators.kernels.or_other, other = (
        (lambda name, operator, best, theirs, ranks, *rest: other(name, operator, best, theirs, CPU, *rest)),
        kernels.or_other,
    )
    for name, made in (("right", right), ("wrong", wrong)):
        operators.compiled_operators = lambda made=made: made
        with contextlib.redirect_stderr(io.StringIO()) as reported:
            names, functions = operators.choose(
                config, 8, dataclasses.replace(CPU, context=device), torch.float32, {}, timed
            )
        found[name] = {"names": names, "reported": reported.getvalue()}
        found[name]["functions"] = [functions[each] is made[each] for each in names]
    saved = {"gelu": "compiled", "norm": "plain"}
    found["saved"] = operators.choose(config, 8, CPU, torch.float32, saved, timed)[0]
    operators.compiled_operators, kernels.choose = by_compiler, choose
    kernels.or_other = other
    whole = SimpleNamespace(**{**vars(config), "compile": True, "kernels": "triton"})
    found["layers compiled whole"] = operators.choose(whole, 8, CPU, torch.float32, {}, timed)[0]
    return found


def main():
    torch.manual_seed(1)
    print(
        json.dumps({"gelu": {kind: gelu(kind) for kind in ("erf", "tanh")}, "dropout": dropout(), "choices": choices()})
    )


if __name__ == "__main__":
    main()
