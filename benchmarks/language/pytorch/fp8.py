"""BERT's layer GEMMs in FP8 or with cached 16-bit weights: configuration key ``fp8``.

``scaled_mm``           PyTorch's own kernel, compiled and in CUDA graphs too (common/torch/low_precision.py)
``transformer_engine``  NVIDIA's TransformerEngine, if installed in the image, without either
``auto``                the first of these that device and configuration support

Both multiply in E4M3, gradients in E5M2 (arXiv 2209.05433); TransformerEngine scales each tensor by the maximum in its
last calls (delayed scaling: its documentation, "Using FP8"). Weights, sums and everything between the GEMMs are
unchanged, and so are the weight names. Row lengths must be multiples of 16 tokens.
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
HISTORY = 16  # number of calls whose maximum determines the scale


def set_up(encoder: Encoder, config: Any, ranks: Ranks) -> Tuple[Callable[[], ContextManager[Any]], List[Any]]:
    """Configure the encoder layers' GEMMs according to ``config``.

    Returns:
        A function that creates a forward pass context, and the GEMMs with cached weights, which
        ``low_precision.refresh`` updates after each step: in FP8, or in 16 bits if a step's passes share them.

    Raises:
        Problem: FP8 is requested and not available.
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
    """Return TransformerEngine's PyTorch module and its recipe module.

    Raises:
        Problem: TransformerEngine is not installed, or this GPU does not support FP8.
    """
    hint = "set fp8=none, or take an NGC image from 22.10 on, on a GPU with FP8 (H100 or later)"
    try:
        engine = importlib.import_module(name)
        recipes = importlib.import_module(f"{name.partition('.')[0]}.common.recipe")
    except ImportError as error:
        raise Problem(f"no TransformerEngine in this Python ({error})", "transformer_engine for fp8", hint) from None
    # Releases without this function check in their first GEMM.
    check = getattr(getattr(engine, "fp8", None), "check_fp8_support", None)
    there, reason = check() if check is not None else (True, "")
    if not there:
        raise Problem(f"no FP8 on this GPU: {reason}", "a GPU with FP8", hint)
    return engine, recipes


def use(encoder: Encoder, engine_and_recipe: Tuple[Any, Any]) -> Callable[[], ContextManager[Any]]:
    # Use TransformerEngine's GEMMs in all layers; return a function that creates a forward pass context.
    engine, recipes = engine_and_recipe
    for layer in encoder.layers:
        for name in LINEARS:
            setattr(layer, name, _product(engine, getattr(layer, name), is_plain=name == "inner"))
        # GELU adds the bias of ``inner``.
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
