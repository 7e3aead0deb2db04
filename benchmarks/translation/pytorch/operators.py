"""Operators shared by the translators, with Triton kernels and apex's; see common/torch/kernels.py.

Implementations are equivalent and chosen by measuring with the step's sizes; rank 0 prints the choice, and
checkpoints store it.
"""

import importlib
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import torch
from torch.nn import functional

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.translation.pytorch.loss import RowLoss, row_loss

LOSS_ROWS = 1024  # rows of logits on which implementations of the loss are measured
NEVER = -100  # not a target: apex ignores rows with its padding index, and our rows contain no padding


def layer_norm(
    values: torch.Tensor, shape: Sequence[int], weight: torch.Tensor, bias: torch.Tensor, epsilon: float
) -> torch.Tensor:
    # PyTorch's, over the last dimensions ``shape`` (arXiv 1607.06450, equation 4).
    return functional.layer_norm(values, shape, weight, bias, epsilon)


def join(
    residual: torch.Tensor,
    update: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    epsilon: float,
    dropout: float,
    norm: Any = layer_norm,
) -> Tuple[torch.Tensor, torch.Tensor]:
    # The residual sum (..., width) of dropout(``update``), and its norm.
    summed = residual + functional.dropout(update, dropout)
    return summed, norm(summed, weight.shape, weight, bias, epsilon)


def _loss_example(
    of_rows: RowLoss, device: torch.device, dtype: torch.dtype, rows: int, vocabulary: int, smoothing: float = 0.1
) -> kernels.Call:
    numbers = torch.Generator(device).manual_seed(1)
    logits = 3 * torch.randn(rows, vocabulary, generator=numbers, device=device)
    targets = torch.randint(0, vocabulary, (rows,), generator=numbers, device=device)

    def call() -> kernels.Results:
        loss, gradient = of_rows(logits.to(dtype, copy=True), targets, smoothing, True)
        assert gradient is not None
        return [loss.float(), gradient.to(dtype)]

    return call


def _norm_example(norm: Any, device: torch.device, dtype: torch.dtype, rows: int, width: int) -> kernels.Call:
    numbers = torch.Generator(device).manual_seed(1)
    inputs = [torch.randn(size, generator=numbers, device=device).to(dtype) for size in ((rows, width), width, width)]

    def call() -> kernels.Results:
        values, weight, bias = (tensor.clone().requires_grad_() for tensor in inputs)
        outputs = norm(values, (width,), weight, bias, 1e-5)
        return [outputs.detach(), *torch.autograd.grad(outputs.float().square().sum(), (values, weight, bias))]

    return call


def _join_example(
    joined: Any, device: torch.device, dtype: torch.dtype, rows: int, width: int, dropout: float = 0.0
) -> kernels.Call:
    numbers = torch.Generator(device).manual_seed(1)
    shapes = ((rows, width), (rows, width), width, width)
    inputs = [torch.randn(size, generator=numbers, device=device).to(dtype).requires_grad_() for size in shapes]
    upstream = [torch.randn(rows, width, generator=numbers, device=device).to(dtype) for _ in range(2)]

    def call() -> kernels.Results:
        outputs = joined(*inputs, 1e-5, dropout)
        return [*(tensor.detach() for tensor in outputs), *torch.autograd.grad(outputs, inputs, upstream)]

    return call


OPERATORS = {
    "loss": kernels.Operator(
        row_loss,
        "benchmarks.translation.pytorch.kernels:row_loss",
        _loss_example,
        (
            {"rows": 5, "vocabulary": 301},
            {"rows": 3, "vocabulary": 4097, "smoothing": 0.0},
            {"rows": 1, "vocabulary": 16},
        ),
    ),
    "join": kernels.Operator(
        join,
        "benchmarks.translation.pytorch.kernels:join",
        _join_example,
        ({"rows": 20, "width": 48}, {"rows": 1, "width": 1024}),
    ),
    # PyTorch's norm is one kernel per direction, and torch.compile fuses it with adjacent operations.
    "norm": kernels.Operator(layer_norm, "", _norm_example, ({"rows": 7, "width": 48}, {"rows": 1, "width": 1024})),
}


def find_apex() -> Dict[str, Any]:
    # Return apex's modules of the operators it has, by operator; empty where the image has none.
    modules = {}
    for name, module in (("loss", "apex.contrib.xentropy"), ("norm", "apex.normalization.fused_layer_norm")):
        try:
            modules[name] = importlib.import_module(module)
        except ImportError:
            continue
    return modules if torch.cuda.is_available() else {}


def apex_operators(modules: Mapping[str, Any]) -> Dict[str, Any]:
    # Return the implementations that apex's ``modules`` offer, by operator.

    def of_rows(
        logits: torch.Tensor, targets: torch.Tensor, smoothing: float, with_gradient: bool
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_(with_gradient)
            to_float = logits.dtype != torch.float32
            losses = modules["loss"].SoftmaxCrossEntropyLoss.apply(leaf, targets, smoothing, NEVER, to_float)
            loss = losses.float().sum()
            gradient = torch.autograd.grad(loss, leaf)[0] if with_gradient else None
        return loss.detach(), gradient

    def norm(
        values: torch.Tensor, shape: Sequence[int], weight: torch.Tensor, bias: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        # By name: releases of apex differ in the order.
        return modules["norm"].fused_layer_norm_affine(
            input=values, weight=weight, bias=bias, normalized_shape=tuple(shape), eps=epsilon
        )

    return {name: function for name, function in (("loss", of_rows), ("norm", norm)) if name in modules}


def choose(
    requested: str,
    sizes: Mapping[str, Mapping[str, Any]],
    ranks: Ranks,
    dtype: torch.dtype,
    saved: Mapping[str, str],
    apex_modules: Optional[Mapping[str, Any]] = None,
    registry: Mapping[str, kernels.Operator] = OPERATORS,
) -> Tuple[Dict[str, str], Dict[str, Any]]:
    """Return name and implementation per operator in ``sizes``, the step's sizes.

    ``saved``: names in a checkpoint. ``apex_modules``: apex's modules (default: as installed). ``registry``:
    operators of the network.
    Raises ValueError if a ``requested`` implementation is missing.
    """
    from_apex = apex_operators(find_apex() if apex_modules is None else apex_modules)
    apex = kernels.Library("apex", from_apex, "apex is not installed, or lacks its CUDA extensions")
    operators = {name: registry[name] for name in sizes}
    return kernels.choose_with(apex, operators, requested, ranks, dtype, sizes, saved)
