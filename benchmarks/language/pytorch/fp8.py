"""The GEMMs of BERT's layers in FP8 or with kept 16-bit weights: ``fp8`` of a configuration.

``scaled_mm``           PyTorch's own kernel, compiled and in CUDA graphs too (common/torch/low_precision.py)
``transformer_engine``  NVIDIA's TransformerEngine, where the image has it, without either
``auto``                the first of the two that runs here

Both multiply in E4M3, gradients in E5M2 (arXiv 2209.05433); TransformerEngine scales each tensor by the largest value
of its last calls (delayed scaling: its documentation, "Using FP8"). Weights, sums and everything between the GEMMs
stay as they are, and so do the names of the weights. Rows must be a multiple of 16 tokens long.
"""

import importlib
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, ContextManager, List, Tuple

import torch
from torch import nn

from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import low_precision
from benchmarks.language.pytorch.encoder import Encoder

LINEARS = ("qkv", "out", "inner", "outer")
HISTORY = 16  # calls of which the largest value counts


def set_up(encoder: Encoder, config: Any, ranks: Ranks) -> Tuple[Callable[[], ContextManager[Any]], List[Any]]:
    """Let the encoder's layers multiply as ``config`` has it.

    Returns:
        What makes the context of a forward pass, and the GEMMs whose copies ``low_precision.refresh`` makes anew
        after each update: in FP8, and in 16 bits where a step has several passes, which share the copies.

    Raises:
        Problem: FP8 is asked for and is not here.
    """
    if config.fp8 != "none":
        backend = _choose(config, ranks)
        choices.record("fp8", backend)
        if ranks.rank == 0:
            print(f"fp8: {backend}", file=sys.stderr, flush=True)
        if backend == "transformer_engine":
            return use(encoder, find()), []
        return nullcontext, _keep(encoder, getattr(torch, low_precision.INPUTS))
    if config.accumulation > 1 and config.precision in ("fp16", "bf16"):
        return nullcontext, _keep(encoder, pytorch.DTYPES[config.precision])
    return nullcontext, []


def _choose(config: Any, ranks: Ranks) -> str:
    if config.fp8 == "transformer_engine":
        return "transformer_engine"
    reason = pytorch.agreed(low_precision.why_no_fp8(ranks.context))
    if not reason:
        return "scaled_mm"
    if config.fp8 == "auto" and not (config.compile or config.cuda_graph or config.device == "cpu"):
        return "transformer_engine"
    raise Problem(f"fp8={config.fp8}: {reason}", "PyTorch 2.5 or newer, on a GPU with FP8", "set fp8=none")


def _keep(encoder: Encoder, kind: torch.dtype) -> List[Any]:
    for layer in encoder.layers:
        layer.product = _kept_product
    return low_precision.keep(list(encoder.layers), LINEARS, kind)


def _kept_product(linear: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    fp8_weight: Any = linear
    product: torch.Tensor = fp8_weight.product(hidden)
    return product


def find(name: str = "transformer_engine.pytorch") -> Tuple[Any, Any]:
    """Return TransformerEngine's module for PyTorch and that of its recipes.

    Raises:
        Problem: the image has none, or this GPU no FP8.
    """
    hint = "set fp8=none, or take an NGC image from 22.10 on, on a GPU with FP8 (H100 or later)"
    try:
        engine = importlib.import_module(name)
        recipes = importlib.import_module(f"{name.partition('.')[0]}.common.recipe")
    except ImportError as error:
        raise Problem(f"no TransformerEngine in this Python ({error})", "transformer_engine for fp8", hint) from None
    # Where a release has no such question, its first product asks it.
    check = getattr(getattr(engine, "fp8", None), "check_fp8_support", None)
    there, reason = check() if check is not None else (True, "")
    if not there:
        raise Problem(f"no FP8 on this GPU: {reason}", "a GPU with FP8", hint)
    return engine, recipes


def use(encoder: Encoder, engine_and_recipe: Tuple[Any, Any]) -> Callable[[], ContextManager[Any]]:
    # Let TransformerEngine multiply in all layers; return what makes the context of a forward pass.
    engine, recipes = engine_and_recipe
    for layer in encoder.layers:
        for name in LINEARS:
            setattr(layer, name, _product(engine, getattr(layer, name), is_plain=name == "inner"))
        # GELU adds that product's bias.
        layer.product = _without_bias
    recipe = recipes.DelayedScaling(fp8_format=recipes.Format.HYBRID, amax_history_len=HISTORY, amax_compute_algo="max")
    return partial(engine.fp8_autocast, enabled=True, fp8_recipe=recipe)


def _product(engine: Any, linear: nn.Linear, is_plain: bool) -> nn.Module:
    weight = linear.weight
    module: nn.Module = engine.Linear(
        linear.in_features, linear.out_features, bias=True, params_dtype=weight.dtype, device=weight.device,
        return_bias=is_plain,
    )  # fmt: skip
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(linear.bias)
    return module


def _without_bias(linear: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return linear(hidden)[0]
