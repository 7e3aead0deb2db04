"""The operations between the GEMMs of a layer of BERT: bias and GELU, dropout and residual sum and layer norm.

Each is one function of its inputs, so that a compiler makes one kernel of it (``compiled``).
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional

NORM_EPSILON = 1e-12  # epsilon of every layer norm (google-research/bert, modeling.py)
DEVIATION = 0.02  # standard deviation of fresh weights (initializer_range of the published configuration)


def bias_gelu(product: torch.Tensor, bias: torch.Tensor, kind: str) -> torch.Tensor:
    """GELU of ``product + bias`` (arXiv 1606.08415): ``erf`` exactly, ``tanh`` as the submissions approximate it.

    (T, inner width) and (inner width,), which may be of a wider type; the result is of the product's type.
    """
    return functional.gelu(product + bias.to(product.dtype), approximate="tanh" if kind == "tanh" else "none")


def add_norm(
    update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dropout: float
) -> torch.Tensor:
    """Layer norm of ``residual`` plus what dropout leaves of ``update``, both (T, width).

    Computed in the type of the weights; the result is of the update's type, so that in half precision layers exchange
    half as much, as in the submissions.
    """
    if dropout:
        update = functional.dropout(update, dropout)
    summed = (residual + update).to(weight.dtype)
    return functional.layer_norm(summed, weight.shape, weight, bias, NORM_EPSILON).to(update.dtype)


def compiled(function: Callable[..., torch.Tensor], wanted: bool) -> Any:
    """Return ``function``, compiled for rows of any length if that is ``wanted``."""
    return torch.compile(function, dynamic=True) if wanted else function


def draw_weights(module: nn.Module) -> None:
    """Draw the weights of a product or table from a normal distribution, and set biases to 0 (init_bert_weights).

    Of NVIDIA's submission: the paper's code cuts the distribution off at two deviations.
    """
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=DEVIATION)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
