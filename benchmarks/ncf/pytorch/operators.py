"""The lookups of NeuMF and what follows each of them.

Each function here is PyTorch's own operators; its Triton kernels are in kernels.py, and common/torch/kernels.py
compares and chooses.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.common.torch.kernels import Operator
from benchmarks.ncf.pytorch.config import Config

MODULE = "benchmarks.ncf.pytorch.kernels"


class _Rows(torch.autograd.Function):
    """(n, width): rows of a table (rows, width) at an index (n,); gradients add up in fp32, whatever the table's type.

    A popular item is in thousands of pairs of a batch: a sum in 16 bits would stop growing. Nothing here waits
    for the device, so it can be part of a CUDA graph.
    """

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype = table.shape, table.dtype
        return table.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=dtype, device=gradient.device)
        return total.index_add_(0, index, gradient.to(dtype)).to(ctx.dtype), None


rows = _Rows.apply


def dot(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(...,) fp32: the last axis of ``values`` times ``weight`` (width,), in the type that autocast chooses."""
    # Not torch.mv: on a CPU autocast leaves its operands in two types.
    return F.linear(values, weight.unsqueeze(0)).squeeze(-1).float()


def factors(
    of_users: torch.Tensor, of_items: torch.Tensor, weight: torch.Tensor, users: torch.Tensor, items: torch.Tensor
) -> torch.Tensor:
    """(n,) fp32: weight . (p_u * q_i), what the matrix factorisation adds to a score."""
    return dot(rows(of_users, users) * rows(of_items, items), weight)


def first_layer(
    of_users: torch.Tensor, of_items: torch.Tensor, users: torch.Tensor, items: torch.Tensor
) -> torch.Tensor:
    """(n, width): ReLU of the two products of the MLP's first layer, each computed once per user and item."""
    return F.relu(rows(of_users, users) + rows(of_items, items))


# -- compared and chosen ------------------------------------------------------------------------------


def _pairs(device: torch.device, users: int, items: int, pairs: int) -> Tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator(device).manual_seed(1)
    # Popular items, as films are: half of the pairs have one of a sixteenth of them.
    user, item = (torch.rand(pairs, generator=numbers, device=device) ** power for power in (1, 4))
    return (user * users).long().clamp_(max=users - 1), (item * items).long().clamp_(max=items - 1)


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    numbers = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=numbers, device=device).to(dtype)


def _factors_example(
    implementation: Any, device: torch.device, dtype: torch.dtype, users: int, items: int, pairs: int, width: int
) -> kernels.Call:
    inputs = [
        _random(device, torch.float32, *shape).requires_grad_() for shape in ((users, width), (items, width), (width,))
    ]
    index = _pairs(device, users, items, pairs)
    gradient = _random(device, torch.float32, pairs)

    def call() -> kernels.Results:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
            scores = implementation(*inputs, *index)
        return [scores.detach(), *torch.autograd.grad(scores, inputs, gradient)]

    return call


def _first_layer_example(
    implementation: Any, device: torch.device, dtype: torch.dtype, users: int, items: int, pairs: int, width: int
) -> kernels.Call:
    inputs = [_random(device, dtype, count, width).requires_grad_() for count in (users, items)]
    index = _pairs(device, users, items, pairs)
    gradient = _random(device, dtype, pairs, width)

    def call() -> kernels.Results:
        hidden = implementation(*inputs, *index)
        return [hidden.detach(), *torch.autograd.grad(hidden, inputs, gradient)]

    return call


_SMALL = ({"users": 60, "items": 7, "pairs": 300, "width": 64}, {"users": 2, "items": 3, "pairs": 5, "width": 10})
OPERATORS = {
    "factors": Operator(factors, f"{MODULE}:factors", _factors_example, _SMALL),
    "first layer": Operator(first_layer, f"{MODULE}:first_layer", _first_layer_example, _SMALL),
}


class Chosen(NamedTuple):
    """The implementations of a run."""

    names: Dict[str, str]
    factors: Callable[..., torch.Tensor] = factors
    first_layer: Callable[..., torch.Tensor] = first_layer


PLAIN = Chosen(dict.fromkeys(OPERATORS, "plain"))


def choose(config: Config, users: int, items: int, ranks: Ranks, saved: Optional[Mapping[str, str]] = None) -> Chosen:
    """Choose by measuring on the sizes of a step; ``saved`` is a checkpoint's choice."""
    common = {"users": users, "items": items, "pairs": config.batch_size}
    sizes = {
        "factors": {**common, "width": config.factors},
        "first layer": {**common, "width": config.layers[1]},
    }
    dtype, clock = pytorch.DTYPES[config.precision], kernels.clock(config.cuda_graph)
    names = kernels.choose(OPERATORS, config.kernels, ranks, dtype, sizes, saved, clock)
    found: List[Any] = [kernels.implementation(OPERATORS[name], names[name]) for name in OPERATORS]
    return Chosen(names, *found)
