"""FP8 copies of a matrix for GEMMs: row-major for forward, transposed for backward; kernels.py has a Triton kernel.

PyTorch's casts write both copies at 0.4 TB/s of bf16 input on an H200 (2026-11-27). The kernel moves 4 bytes per
element: it reads 2 and writes 1 + 1. Expected at 4.8 TB/s, not measured: 0.028 ms for (8192, 4096) instead of 0.170,
0.196 ms for (8192, 28672) instead of 1.093, 0.271 ms for (79360, 4096) instead of 1.546. The scale requires the
maximum, a pass over the input that took 0.107 ms for (79360, 4096), unless torch.compile fuses it with the
input's producer.
"""

from typing import Any, Callable, Dict, Mapping, Tuple

import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.common.torch.kernels import Operator

MEASURED = {"height": 8192, "width": 4096, "exact": False}  # size of the measurement: the hidden states of Llama 3.1 8B


def cast_copies(
    values: torch.Tensor, scale: torch.Tensor, kind: torch.dtype, rows: bool, columns: bool
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return ``values`` (M, N) times ``scale`` in FP8 of ``kind``: as (M, N), and as (N, M); empty if not requested.

    Larger values, infinite too, become the largest of ``kind``; NaN remains NaN.
    """
    limit = torch.finfo(kind).max
    cast = (values.float() * scale).clamp(-limit, limit).to(kind)
    return cast if rows else cast.new_empty(0), cast.t().contiguous() if columns else cast.new_empty(0)


def _example(
    candidate: Any, device: torch.device, dtype: torch.dtype, height: int, width: int, exact: bool = True
) -> Callable[[], Any]:
    generator = torch.Generator().manual_seed(1)
    # Values of both formats: Triton's interpreter does not round to FP8 as hardware does.
    values = (2.0 ** torch.randint(-5, 8, (height, width), generator=generator)).to(device, dtype)
    values = values * (1 + torch.randint(0, 4, (height, width), generator=generator) / 4).to(device, dtype)
    scale = torch.ones((), device=device)
    bits = torch.arange(8, device=device)

    def call() -> Any:
        copies = [
            copy
            for kind in (torch.float8_e4m3fn, torch.float8_e5m2)
            for copy in candidate(values, scale, kind, True, True)
        ]
        # As bits: one wrong bit exceeds every tolerance.
        return [(copy.view(torch.uint8)[..., None] >> bits & 1).float() for copy in copies] if exact else copies

    return call


OPERATORS: Mapping[str, Operator] = {
    "cast": Operator(
        cast_copies,
        "benchmarks.language.pytorch.kernels:cast_copies",
        _example,
        ({"height": 48, "width": 160}, {"height": 131, "width": 37}),
    )
}
selected: Dict[str, Any] = {"cast": cast_copies}  # implementations of this process; both have the same bits


def choose(ranks: Ranks) -> None:
    """Select the faster implementation on the ranks' devices."""
    names = kernels.choose(OPERATORS, "auto", ranks, torch.bfloat16, {"cast": MEASURED})
    selected["cast"] = kernels.implementation(OPERATORS["cast"], names["cast"])
