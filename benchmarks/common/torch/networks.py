"""Memory format and batch norm statistics of convolutional networks."""

from typing import List, Sequence

import torch
from torch import nn


def memory_format(layout: str) -> torch.memory_format:
    """The order of the axes in memory that a configuration's ``layout`` asks for."""
    return torch.channels_last if layout == "NHWC" else torch.contiguous_format


def statistics(network: nn.Module) -> List[torch.Tensor]:
    """Return the running means and variances, without the step counts of nn.SyncBatchNorm."""
    return [buffer for buffer in network.buffers() if buffer.is_floating_point()]


@torch.no_grad()
def set_statistics(network: nn.Module, values: Sequence[torch.Tensor]) -> None:
    """Set the batch norm statistics returned by ``statistics``."""
    for buffer, value in zip(statistics(network), values):
        buffer.copy_(value)
