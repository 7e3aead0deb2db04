"""One step of the training, plain or replayed from a CUDA graph."""

from __future__ import annotations

from typing import Callable, NamedTuple, Tuple

import torch
import torch.distributed as dist
from torch.nn import functional

from benchmarks.common import torch_precision, torch_ranks
from benchmarks.common.ranks import Ranks
from benchmarks.common.torch_ranks import GradientBuffer
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import Batch
from benchmarks.dlrm.pytorch.model import FlatWeights, Network, Tables

WARM_UP_STEPS = 3
"""Before a graph is recorded, as PyTorch's documentation of CUDA graphs asks."""


class Model(NamedTuple):
    """All that is trained."""

    network: Network
    weights: FlatWeights
    gradients: GradientBuffer
    tables: Tables


Step = Callable[[Batch, torch.Tensor], torch.Tensor]
"""Trains on a batch at a learning rate, a tensor (); returns the mean loss of this rank's rows."""


def build(config: Config, sizes: Tuple[int, ...], ranks: Ranks) -> Model:
    """Network and tables with fresh weights, the same for any number of ranks."""
    torch.manual_seed(config.seed)
    tables = Tables(sizes, config, ranks)
    network = Network(config, tables.order).to(ranks.context)
    weights = FlatWeights(network)
    return Model(network, weights, GradientBuffer(network.parameters()), tables)


def scores(model: Model, batch: Batch, config: Config, device: torch.device) -> torch.Tensor:
    """Log-odds of this rank's rows, for an evaluation."""
    size = len(batch.labels)
    with torch.no_grad(), torch_precision.autocast(device, config.precision):
        sent = model.tables.send(model.tables.rows(batch.indices), size, _dtype(config))
        hidden = model.network.bottom(batch.numbers)
        return model.network.score(hidden, model.tables.split(sent.wait(), size)).float()


def _dtype(config: Config) -> torch.dtype:
    return torch_precision.DTYPES[config.precision]


class Update:
    """Forward and update of a batch; the caller does the backward pass of loss * loss_scale between them.

    The exchanges with the other ranks run beside the computation where that is possible.
    """

    def __init__(self, model: Model, config: Config, ranks: Ranks) -> None:
        self._model = model
        self._config = config
        self._ranks = ranks
        self.loss_scale = config.loss_scale if config.precision == "fp16" else 1.0
        self._rows = self._vectors = torch.zeros(0)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Mean loss of this rank's rows; clears the gradients."""
        network, _, gradients, tables = self._model
        size = len(batch.labels)
        gradients.zero()
        self._rows = tables.rows(batch.indices)
        sent = tables.send(self._rows, size, _dtype(self._config))
        with torch_precision.autocast(self._ranks.context, self._config.precision):
            hidden = network.bottom(batch.numbers)
            self._vectors = sent.wait().requires_grad_()
            odds = network.score(hidden, tables.split(self._vectors, size))
        return functional.binary_cross_entropy_with_logits(odds.float(), batch.labels)

    def step(self, rate: torch.Tensor) -> None:
        """Tables and MLPs minus ``rate``, a tensor (), times the mean gradient of all ranks."""
        _, weights, gradients, tables = self._model
        # The mean over all ranks' rows is the mean of the ranks' means.
        part = rate / (self.loss_scale * self._ranks.size)
        gradient = self._vectors.grad
        back = tables.send_back(gradient, len(gradient) // (tables.width * tables.count))
        summed = dist.all_reduce(gradients.flat, async_op=True) if self._ranks.size > 1 else None
        tables.update(self._rows, back.wait(), part * self._config.table_learning_rate_factor)
        if summed is not None:
            summed.wait()
        if self._config.weight_decay:
            weights.flat.mul_(1.0 - rate * self._config.weight_decay)
        weights.flat.sub_(gradients.flat * part)


def plain(model: Model, config: Config, ranks: Ranks) -> Step:
    """Forward, backward and update in one call."""
    update = Update(model, config, ranks)

    def step(batch: Batch, rate: torch.Tensor) -> torch.Tensor:
        loss = update.forward(batch)
        (loss * update.loss_scale).backward()
        update.step(rate)
        return loss.detach()

    return step


def recorded(model: Model, config: Config, ranks: Ranks, example: Batch) -> Step:
    """The same step as one CUDA graph; warm-up and recording train at rate 0, which changes nothing."""
    eager = plain(model, config, ranks)
    held = Batch(*(tensor.clone() for tensor in example))
    held_rate = torch.zeros((), device=ranks.context)
    side = torch.cuda.Stream(ranks.context)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_STEPS):
            eager(held, held_rate)
    torch.cuda.current_stream().wait_stream(side)
    torch_ranks.barrier()
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
