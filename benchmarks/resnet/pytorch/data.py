"""PyTorch's end of the input: batches of benchmarks/resnet/inputs.py as tensors."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, Optional, Tuple

import torch
from nvidia.dali.plugin.pytorch import feed_ndarray, to_torch_type

from benchmarks.common.ranks import Ranks
from benchmarks.resnet import inputs
from benchmarks.resnet.pytorch.config import Config

Batch = Tuple[torch.Tensor, torch.Tensor]
"""Images (N, C, H, W) in the memory order of config.layout, labels (N,) as int64."""


def _to_tensor(device: torch.device, output: Any) -> torch.Tensor:
    batch = output.as_tensor()
    tensor = torch.empty(batch.shape(), dtype=to_torch_type[batch.dtype], device=device)
    # The copy is queued on PyTorch's stream, so that the network's first kernel comes after it.
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return feed_ndarray(batch, tensor, cuda_stream=stream)


def _to_batch(device: torch.device, is_nhwc: bool, images: Any, labels: Any) -> Batch:
    pixels = _to_tensor(device, images)
    # The axes are renamed, not moved: NHWC in memory is what PyTorch calls channels_last.
    pixels = pixels.permute(0, 3, 1, 2) if is_nhwc else pixels
    # DALI's labels lie where its reader is, on the CPU.
    return pixels, _to_tensor(torch.device("cpu"), labels).reshape(-1).to(device, torch.int64)


def _with_visible_gpu(ranks: Ranks) -> Ranks:
    """``ranks`` with the number of this rank's GPU as the process counts them, which DALI is told.

    Slurm may show each rank its own GPU alone, which is then number 0.
    """
    return dataclasses.replace(ranks, local_rank=ranks.context.index or 0)


def training_input(
    config: Config, data: Path, ranks: Ranks, checkpoint: Optional[bytes] = None
) -> inputs.TrainingInput:
    """Training batches on this rank's device, from the beginning or exactly on from ``checkpoint``."""
    convert = partial(_to_batch, ranks.context, config.layout == "NHWC")
    return inputs.TrainingInput(config, data, _with_visible_gpu(ranks), convert, checkpoint)


def evaluation_input(config: Config, data: Path, ranks: Ranks) -> inputs.EvaluationInput:
    """This rank's share of the validation images."""
    convert = partial(_to_batch, ranks.context, config.layout == "NHWC")
    return inputs.EvaluationInput(config, data, _with_visible_gpu(ranks), convert)
