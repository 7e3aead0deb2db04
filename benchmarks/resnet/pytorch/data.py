"""PyTorch's end of the input: batches of benchmarks/resnet/inputs.py as tensors."""

from typing import Any, Tuple

import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch.dali import to_tensor
from benchmarks.resnet.architecture import input_shape
from benchmarks.resnet.pytorch.config import Config

# Images (N, C, H, W) in the memory order of config.layout, labels (N,) as int64.
Batch = Tuple[torch.Tensor, torch.Tensor]


def convert(config: Config, ranks: Ranks, images: Any, labels: Any) -> Batch:
    pixels = to_tensor(ranks.context, images)
    # Only the axes are permuted, not the memory: NHWC in memory is channels_last in PyTorch.
    pixels = pixels.permute(0, 3, 1, 2) if config.layout == "NHWC" else pixels
    return pixels, to_tensor(ranks.context, labels).reshape(-1).to(torch.int64)


def gpu(ranks: Ranks) -> int:
    """If Slurm shows only one GPU to a rank, it has number 0."""
    return ranks.context.index or 0


def synthetic_batch(config: Config, device: torch.device, batch_size: int = 0) -> Batch:
    """Return noise in the type and memory order of real batches, by default with the training batch size."""
    count = batch_size or config.batch_size
    dtype = torch.float16 if config.precision == "fp16" else torch.float32
    images = torch.rand((count, *input_shape(config)[1:])).to(device, dtype)
    images = images.permute(0, 3, 1, 2) if config.layout == "NHWC" else images
    return images, torch.randint(0, config.num_classes, (count,)).to(device)
