"""What a step works on: built, captured as a CUDA graph."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Tuple

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.common.frameworks import pytorch
from benchmarks.common.frameworks.pytorch import GradientBuffer
from benchmarks.common.ranks import Ranks
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import Batch
from benchmarks.dlrm.pytorch.model import Network, Tables

WARM_UP_STEPS = 3
"""Before a capture, as PyTorch's documentation of CUDA graphs asks."""

Step = Callable[[Batch, torch.Tensor], torch.Tensor]
"""Train on a batch at a learning rate, a tensor (); return the mean loss of this rank's rows."""


class Training:
    """Network and tables, and the two halves of a step around the backward pass of loss * loss_scale.

    The exchanges with the other ranks run while the computation does, where that is possible.
    """

    def __init__(self, config: Config, sizes: Tuple[int, ...], ranks: Ranks) -> None:
        """Build with fresh weights, the same for any number of ranks."""
        torch.manual_seed(config.seed)
        self.config, self.ranks = config, ranks
        self.tables = Tables(sizes, config, ranks)
        self.network = Network(config, self.tables.order).to(ranks.context)
        # All parameters become views of one tensor, so that the optimizer's step is one operation.
        self.weights = parameters_to_vector(self.network.parameters()).detach()
        vector_to_parameters(self.weights, self.network.parameters())
        self.gradients = GradientBuffer(self.network.parameters())
        self.loss_scale = config.loss_scale if config.precision == "fp16" else 1.0
        self._dtype = pytorch.DTYPES[config.precision]
        self._rows = self._vectors = torch.zeros(0)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Mean loss of this rank's rows; clears the gradients."""
        network, tables, size = self.network, self.tables, len(batch.labels)
        self.gradients.zero()
        self._rows = tables.rows(batch.indices)
        received = tables.send(self._rows, size, self._dtype)
        with pytorch.autocast(self.ranks.context, self.config.precision):
            hidden = network.bottom(batch.numbers)
            self._vectors = received().requires_grad_()
            logits = network.score(hidden, tables.split(self._vectors, size))
        return functional.binary_cross_entropy_with_logits(logits.float(), batch.labels)

    def update(self, rate: torch.Tensor) -> None:
        """Tables and MLPs minus ``rate``, a tensor (), times the mean gradient of all ranks."""
        config, tables, weights, gradients = self.config, self.tables, self.weights, self.gradients
        # The mean over all ranks' rows is the mean of the ranks' means.
        part = rate / (self.loss_scale * self.ranks.size)
        gradient = self._vectors.grad
        received = tables.send_back(gradient, len(gradient) // (tables.width * tables.count))
        summed = dist.all_reduce(gradients.flat, async_op=True) if self.ranks.size > 1 else None
        tables.update(self._rows, received(), part * config.table_learning_rate_factor)
        if summed is not None:
            summed.wait()
        if config.weight_decay:
            weights.mul_(1.0 - rate * config.weight_decay)
        weights.sub_(gradients.flat * part)

    def scores(self, batch: Batch) -> torch.Tensor:
        """Logits of this rank's rows, for an evaluation."""
        tables, size = self.tables, len(batch.labels)
        with torch.no_grad(), pytorch.autocast(self.ranks.context, self.config.precision):
            received = tables.send(tables.rows(batch.indices), size, self._dtype)
            hidden = self.network.bottom(batch.numbers)
            return self.network.score(hidden, tables.split(received(), size)).float()


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
    held = Batch(*(tensor.clone() for tensor in example))
    held_rate = torch.zeros((), device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_STEPS):
            eager(held, held_rate)
    torch.cuda.current_stream().wait_stream(side)
    pytorch.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = eager(held, held_rate)

    def step(batch: Batch, rate: torch.Tensor) -> torch.Tensor:
        for kept, new in zip(held, batch):
            kept.copy_(new, non_blocking=True)
        held_rate.copy_(rate)
        graph.replay()
        return loss

    return step
