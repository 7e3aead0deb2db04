"""PyTorch's end of step reports and checkpoints; the rest is in benchmarks/common/progress.py."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, List, Optional

import torch
from torch import nn

from benchmarks.common.ranks import Ranks
from benchmarks.common.torch_ranks import LaggedSums
from benchmarks.resnet.pytorch import model

FILE = "training.pt"


class LossSums:
    """[loss, stop] summed over all ranks, for StepReports."""

    def __init__(self, ranks: Ranks) -> None:
        self._sums = LaggedSums()
        self._votes = torch.tensor([[0.0], [1.0]], device=ranks.context)

    def send(self, loss: torch.Tensor, stop: bool) -> Optional[List[float]]:
        """Send without waiting; the loss is copied, so that its memory may be used again."""
        return self._sums.send(torch.cat((loss.detach().float().reshape(1), self._votes[int(stop)])))

    def drain(self) -> List[List[float]]:
        """Wait for the sums that were not handed out yet."""
        return self._sums.drain()


def save(folder: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write weights and momentum into ``folder``."""
    torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict()}, str(folder / FILE))


def restore(checkpoint: Optional[Path], network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and momentum, if there is a checkpoint."""
    if checkpoint is None:
        return
    state = torch.load(str(checkpoint / FILE), map_location="cpu")
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])


def pack_own(input_state: bytes, network: nn.Module) -> bytes:
    """What a rank has for itself: the state of its input, and its own running statistics."""
    buffer = io.BytesIO()
    content: List[Any] = [torch.frombuffer(bytearray(input_state), dtype=torch.uint8)]
    torch.save(content + [tensor.cpu() for tensor in model.statistics(network)], buffer)
    return buffer.getvalue()


def unpack_own(own: Optional[bytes], network: nn.Module) -> Optional[bytes]:
    """Take back what ``pack_own`` made: sets the statistics, returns the state of the input."""
    if own is None:
        return None
    input_state, *saved = torch.load(io.BytesIO(own), map_location="cpu")
    with torch.no_grad():
        for buffer, value in zip(model.statistics(network), saved):
            buffer.copy_(value)
    return bytes(input_state.numpy())
