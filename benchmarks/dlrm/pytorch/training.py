"""What a step works on: built, captured as a CUDA graph."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Tuple

import torch

from benchmarks.common.cuda_graphs import Captured, repeated
from benchmarks.common.frameworks import pytorch
from benchmarks.common.ranks import Ranks
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import Batch
from benchmarks.dlrm.pytorch.model import Training

WARM_UP_STEPS = 3
"""Before a capture, as PyTorch's documentation of CUDA graphs asks."""

Step = Callable[[Batch, torch.Tensor], torch.Tensor]
"""Train on a batch at a learning rate, a tensor (); return the mean loss of this rank's rows."""


def build(config: Config, sizes: Tuple[int, ...], ranks: Ranks, saved: Mapping[str, Any]) -> Training:
    """Build with the weights of a checkpoint, or with fresh ones."""
    training = Training(config, sizes, ranks)
    if saved:
        training.weights.copy_(saved["weights"])
        training.tables.weight.copy_(saved["tables"])
    pytorch.broadcast([training.weights])
    return training


def captured(eager: Step, device: torch.device, example: Batch) -> Step:
    """Capture the same step as one CUDA graph; warm-up and capture train at rate 0, which changes nothing."""

    def flat(*tensors: torch.Tensor) -> torch.Tensor:
        return eager(Batch(*tensors[:-1]), tensors[-1])

    graph = Captured(flat, (*example, torch.zeros((), device=device)), repeated(flat, WARM_UP_STEPS))
    return lambda batch, rate: graph(*batch, rate)
