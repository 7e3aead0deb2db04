"""PyTorch's end of the input: batches of benchmarks/resnet/inputs.py as tensors."""

from __future__ import annotations

from typing import Any, Tuple

import torch
from nvidia.dali.plugin.pytorch import feed_ndarray, to_torch_type

from benchmarks.common.ranks import Ranks
from benchmarks.resnet.pytorch.config import Config

Batch = Tuple[torch.Tensor, torch.Tensor]
"""Images (N, C, H, W) in the memory order of config.layout, labels (N,) as int64."""


def convert(config: Config, ranks: Ranks, images: Any, labels: Any) -> Batch:
    """Copy DALI's batch into PyTorch's memory."""
    pixels = _to_tensor(ranks.context, images)
    # The axes are renamed, not moved: NHWC in memory is what PyTorch calls channels_last.
    pixels = pixels.permute(0, 3, 1, 2) if config.layout == "NHWC" else pixels
    return pixels, _to_tensor(ranks.context, labels).reshape(-1).to(torch.int64)


def _to_tensor(device: torch.device, output: Any) -> torch.Tensor:
    batch = output.as_tensor()
    tensor = torch.empty(batch.shape(), dtype=to_torch_type[batch.dtype], device=device)
    # Nobody waits for the copy: it is queued on PyTorch's stream, so that the network's first kernel comes after it,
    # and DALI's stream waits for it before DALI fills this memory again (CopyToExternalImplGPU in its backend_impl.cc).
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return feed_ndarray(batch, tensor, cuda_stream=stream)


def gpu(ranks: Ranks) -> int:
    """Slurm may show each rank its own GPU alone, which is then number 0."""
    return ranks.context.index or 0
