"""Attention weights with Triton kernels; common/torch/kernels.py compares and selects implementations."""

from typing import Any

import torch

from benchmarks.common.torch import kernels
from benchmarks.gnmt.pytorch import attention


def _example(
    weigh: Any, device: torch.device, dtype: torch.dtype, sentences: int, targets: int, sources: int, width: int
) -> kernels.Call:
    numbers = torch.Generator(device).manual_seed(1)
    shapes = ((sentences, targets, width), (sentences, sources, width), (width,), (sentences, targets, sources))
    queries, keys, vector, gradient = (torch.randn(size, generator=numbers, device=device) for size in shapes)
    # Sentences of all lengths, including a full row.
    lengths = sources - torch.arange(sentences, device=device) % sources
    padding = torch.arange(sources, device=device) >= lengths.unsqueeze(1)
    inputs = [tensor.to(dtype).requires_grad_() for tensor in (queries, keys, vector / width**0.5)]

    def call() -> kernels.Results:
        outputs = weigh(*inputs, padding)
        return [outputs.detach(), *torch.autograd.grad(outputs, inputs, gradient)]

    return call


OPERATORS = {
    "attention": kernels.Operator(
        attention.chunked,
        "benchmarks.gnmt.pytorch.kernels:weights",
        _example,
        (
            {"sentences": 3, "targets": 9, "sources": 18, "width": 40},
            {"sentences": 2, "targets": 1, "sources": 1, "width": 16},
        ),
    )
}
