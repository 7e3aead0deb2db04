"""Operators that both detectors use, with their Triton kernels: see benchmarks/common/torch/kernels.py."""

from __future__ import annotations

import torch

from benchmarks.common.torch import kernels
from benchmarks.common.torch.kernels import Operator
from benchmarks.detection.pytorch import nms


def _suppression_example(
    suppress: nms.Suppress, device: torch.device, dtype: torch.dtype, groups: int, count: int
) -> kernels.Call:
    numbers = torch.Generator(device).manual_seed(1)
    # Whole numbers and a threshold that no quotient of them is equal to: nothing depends on rounding.
    drawn = torch.randint(0, 60, (groups, count, 4), generator=numbers, device=device).float()
    boxes = torch.cat((drawn[..., :2], drawn[..., :2] + drawn[..., 2:] + 1), -1)
    alive = torch.rand(groups, count, generator=numbers, device=device) < 0.9
    return lambda: [suppress(boxes, alive, 0.5001).to(dtype)]


OPERATORS = {
    "suppression": Operator(
        nms.keep_of_groups,
        "benchmarks.detection.pytorch.kernels:keep_of_groups",
        _suppression_example,
        ({"groups": 3, "count": 70}, {"groups": 1, "count": 1}, {"groups": 2, "count": 32}, {"groups": 0, "count": 8}),
    )
}
