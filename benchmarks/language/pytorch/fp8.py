"""The products of BERT's layers in FP8, by NVIDIA's TransformerEngine, where the image has it.

Its Linear multiplies in E4M3, the gradients in E5M2, each tensor scaled by the largest value of its last calls (delayed
scaling: its documentation, "Using FP8"; arXiv 2209.05433). Weights, sums and everything between the products stay as
they are, and so do the names of the weights. Rows must be a multiple of 16 tokens long.
"""

import importlib
from functools import partial
from typing import Any, Callable, ContextManager, Tuple

import torch
from torch import nn

from benchmarks.common.data.problem import Problem
from benchmarks.language.pytorch.encoder import Encoder

PRODUCTS = ("qkv", "out", "inner", "outer")
HISTORY = 16  # calls of which the largest value counts


def find(name: str = "transformer_engine.pytorch") -> Tuple[Any, Any]:
    """Return TransformerEngine's module for PyTorch and that of its recipes.

    Raises:
        Problem: the image has none, or this GPU no FP8.
    """
    hint = "set fp8=false, or take an NGC image from 22.10 on, on a GPU with FP8 (H100 or later)"
    try:
        engine = importlib.import_module(name)
        recipes = importlib.import_module(f"{name.partition('.')[0]}.common.recipe")
    except ImportError as error:
        raise Problem(
            f"no TransformerEngine in this Python ({error})", "transformer_engine for fp8=true", hint
        ) from None
    # Where a release has no such question, its first product asks it.
    asked = getattr(getattr(engine, "fp8", None), "check_fp8_support", None)
    there, reason = asked() if asked is not None else (True, "")
    if not there:
        raise Problem(f"no FP8 on this GPU: {reason}", "a GPU with FP8 for fp8=true", hint)
    return engine, recipes


def use(encoder: Encoder, found: Tuple[Any, Any]) -> Callable[[], ContextManager[Any]]:
    # Let TransformerEngine multiply in all layers; return what makes the context of a forward pass.
    engine, recipes = found
    for layer in encoder.layers:
        for name in PRODUCTS:
            setattr(layer, name, _product(engine, getattr(layer, name), alone=name == "inner"))
        # GELU adds that product's bias.
        layer.product = _without_bias
    recipe = recipes.DelayedScaling(fp8_format=recipes.Format.HYBRID, amax_history_len=HISTORY, amax_compute_algo="max")
    return partial(engine.fp8_autocast, enabled=True, fp8_recipe=recipe)


def _product(engine: Any, linear: nn.Linear, alone: bool) -> nn.Module:
    weight = linear.weight
    made: nn.Module = engine.Linear(
        linear.in_features, linear.out_features, bias=True, params_dtype=weight.dtype, device=weight.device,
        return_bias=alone,
    )  # fmt: skip
    with torch.no_grad():
        made.weight.copy_(weight)
        made.bias.copy_(linear.bias)
    return made


def _without_bias(linear: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return linear(hidden)[0]
