"""BERT's layer GEMMs in FP8 (``fp8=scaled_mm``) or with cached 16-bit weights; see language/pytorch/low_precision.py.

FP8 multiplies in E4M3, gradients in E5M2 (arXiv 2209.05433). Weights, sums and everything between the GEMMs are
unchanged, and so are the weight names. Row lengths must be multiples of 16 tokens.
"""

import sys
from typing import Any, List

import torch
from torch import nn

from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices
from benchmarks.common.run.ranks import Ranks
from benchmarks.language.pytorch import low_precision, operators
from benchmarks.language.pytorch.encoder import Encoder

LINEARS = ("qkv", "out", "inner", "outer")


def set_up(encoder: Encoder, config: Any, ranks: Ranks) -> List[Any]:
    """Configure the encoder layers' GEMMs; return those with cached weights, which ``low_precision.refresh`` updates.

    Weights are cached in FP8, or in 16 bits if a step's passes share them.

    Raises:
        Problem: FP8 is requested and not available.
    """
    if config.fp8 != "none":
        reason = pytorch.agreed(low_precision.why_no_fp8(ranks.context))
        if reason:
            raise Problem(f"fp8={config.fp8}: {reason}", "PyTorch 2.5 or newer, on a GPU with FP8", "set fp8=none")
        operators.choose(ranks)
        choices.record("fp8", config.fp8)
        if ranks.rank == 0:
            print(f"fp8: {config.fp8}", file=sys.stderr, flush=True)
        dtype = getattr(torch, low_precision.INPUTS)
    elif config.accumulation > 1 and config.precision in ("fp16", "bf16"):
        dtype = pytorch.DTYPES[config.precision]
    else:
        return []
    for layer in encoder.layers:
        layer.product = _kept_product
    return low_precision.keep(list(encoder.layers), LINEARS, dtype)


def _kept_product(linear: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    fp8_weight: Any = linear
    product: torch.Tensor = fp8_weight.product(hidden)
    return product
