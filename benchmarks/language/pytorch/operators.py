"""What is between BERT's products: PyTorch's operators, those that torch.compile makes of them, or Triton kernels.

Equal results, chosen by measuring on the sizes of a step; rank 0 prints the choice and a checkpoint holds it. See
benchmarks/common/torch/kernels.py.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, Tuple

import torch

from benchmarks.common.run import choices
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.common.torch.kernels import Operator
from benchmarks.language.pytorch.pieces import add_norm, bias_gelu, compiled


def _gelu_example(
    gelu: Any, device: torch.device, dtype: torch.dtype, rows: int, width: int, kind: str = "tanh"
) -> kernels.Call:
    numbers = torch.Generator(device).manual_seed(1)
    product = (2 * torch.randn(rows, width, generator=numbers, device=device)).to(dtype)
    bias = torch.randn(width, generator=numbers, device=device)

    def call() -> kernels.Results:
        given = [product.detach().requires_grad_(), bias.detach().requires_grad_()]
        found = gelu(*given, kind)
        return [found.detach(), *torch.autograd.grad(found, given, product)]

    return call


def _norm_example(
    norm: Any, device: torch.device, dtype: torch.dtype, rows: int, width: int, dropout: float = 0.0
) -> kernels.Call:
    numbers = torch.Generator(device).manual_seed(1)
    drawn = [torch.randn(size, generator=numbers, device=device) for size in ((3, rows, width), width, width)]
    update, residual, gradient = drawn[0].to(dtype).unbind(0)

    def call() -> kernels.Results:
        given = [each.detach().requires_grad_() for each in (update, residual, drawn[1], drawn[2])]
        found = norm(*given, dropout)
        return [found.detach(), *torch.autograd.grad(found, given, gradient)]

    return call


OPERATORS = {
    "gelu": Operator(
        bias_gelu,
        "benchmarks.language.pytorch.kernels:bias_gelu",
        _gelu_example,
        ({"rows": 9, "width": 600}, {"rows": 2, "width": 512, "kind": "erf"}, {"rows": 1, "width": 16}),
    ),
    # Without dropout, which draws other numbers in each.
    "norm": Operator(
        add_norm,
        "benchmarks.language.pytorch.kernels:add_norm",
        _norm_example,
        ({"rows": 7, "width": 48}, {"rows": 1, "width": 1024}),
    ),
}
COMPILED = "compiled"


def compiled_operators() -> Dict[str, Callable[..., torch.Tensor]]:
    """Return what torch.compile makes of each operator, for rows of any length, when it is first called."""
    return {name: compiled(operator.plain, True) for name, operator in OPERATORS.items()}


def choose(
    config: Any, rows: int, ranks: Ranks, dtype: torch.dtype, saved: Mapping[str, str], time: kernels.Time
) -> Tuple[Dict[str, str], Dict[str, Any]]:
    """Return name and implementation of each operator, for steps of so many ``rows`` of tokens.

    ``config`` has kernels, compile, width, inner_width, gelu and dropout; ``saved`` are the names of a checkpoint;
    ``time`` measures. Layers that are compiled whole have the plain ones.

    Raises:
        ValueError: what is wanted cannot run.
    """
    sizes: Dict[str, Dict[str, Any]] = {
        "gelu": {"rows": rows, "width": config.inner_width, "kind": config.gelu},
        "norm": {"rows": rows, "width": config.width, "dropout": config.dropout},
    }
    by_compiler = compiled_operators()
    wanted = "plain" if config.compile else config.kernels
    names = dict(saved)
    if not saved and wanted == COMPILED:
        names = dict.fromkeys(OPERATORS, COMPILED)
    elif not saved or COMPILED not in saved.values():
        names = kernels.choose(OPERATORS, wanted, ranks, dtype, sizes, saved or None, time)
    for name in OPERATORS if not saved and wanted == "auto" and ranks.context.type == "cuda" else ():
        other = kernels.Other(COMPILED, by_compiler[name])
        names[name] = kernels.or_other(name, OPERATORS[name], names[name], other, ranks, dtype, sizes[name], time)
    choices.record("kernels", names)
    return names, {
        name: by_compiler[name] if names[name] == COMPILED else kernels.implementation(OPERATORS[name], names[name])
        for name in names
    }
