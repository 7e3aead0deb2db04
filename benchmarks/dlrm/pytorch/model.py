"""The network: MLPs that every rank has, and embedding tables that are split over the ranks.

A rank keeps its tables as one joint table with offsets. A lookup of the global batch is one gather, an update one
scatter. All-to-all turns "all rows, my tables" into "my rows, all tables" and back.
"""

from __future__ import annotations

import math
from typing import Any, Callable, List, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.common.frameworks import pytorch
from benchmarks.common.frameworks.pytorch import GradientBuffer
from benchmarks.common.ranks import Ranks
from benchmarks.dlrm.blocks import NUMBERS
from benchmarks.dlrm.placement import place
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import Batch

ALIGNMENT = 8
"""The top MLP's input is padded to a multiple, as tensor cores want it: 479 becomes 480, as submitted."""

Wait = Callable[[], torch.Tensor]
"""Waits for an exchange and returns what this rank got."""


def mlp(widths: Sequence[int], last_is_linear: bool) -> nn.Sequential:
    """Linear layers with ReLU between them, and behind the last one unless it is linear.

    Weights and biases are normal with variances 2 / (in + out) and 1 / out, as in the reference implementation.
    """
    layers: List[nn.Module] = []
    for after, before in zip(widths[1:], widths):
        linear = nn.Linear(before, after)
        nn.init.normal_(linear.weight, std=math.sqrt(2 / (before + after)))
        nn.init.normal_(linear.bias, std=math.sqrt(1 / after))
        layers += [linear, nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[: -1 if last_is_linear else None])


class Interaction(torch.autograd.Function):
    """Dot products of all pairs of a row's vectors; only the lower triangle of their matrix is gathered.

    (rows, vectors, width) to (rows, pairs). ``lower`` lists the pairs' places in the flat matrix, ``mirror`` the
    pair of each place; the diagonal's entries may be any.
    """

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, lower: torch.Tensor, mirror: torch.Tensor) -> torch.Tensor:
        """Multiply and gather."""
        ctx.save_for_backward(vectors, mirror)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return products.view(len(vectors), -1).index_select(1, lower)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[torch.Tensor, None, None]:
        """With S the symmetric matrix of the pairs' gradients, d(X X^T) gives S X."""
        vectors, mirror = ctx.saved_tensors
        rows, count, _ = vectors.shape
        symmetric = gradients[0].index_select(1, mirror).view(rows, count, count)
        symmetric.diagonal(dim1=1, dim2=2).zero_()
        return torch.bmm(symmetric, vectors), None, None


def pair_places(order: Sequence[int]) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return ``lower`` and ``mirror`` of Interaction for vectors in ``order`` (names 0, 1, 2, ...).

    The pairs come out in the order of the names, so that the network does not depend on the placement.
    """
    count = len(order)
    first, second = torch.tensor(order).argsort()[torch.tril_indices(count, count, -1)]
    lower = first * count + second
    mirror = torch.zeros(count * count, dtype=torch.int64)
    mirror[lower] = mirror[second * count + first] = torch.arange(len(lower))
    return lower, mirror


class Network(nn.Module):
    """What each rank has whole: bottom MLP, interaction, top MLP.

    ``order`` names the tables in the order in which their vectors arrive.
    """

    def __init__(self, config: Config, order: Sequence[int]) -> None:
        super().__init__()
        width, count = config.bottom_mlp[-1], 1 + len(order)
        pairs = count * (count - 1) // 2
        self.padding = -(width + pairs) % ALIGNMENT
        self.bottom = mlp((NUMBERS, *config.bottom_mlp), last_is_linear=False)
        self.top = mlp((width + pairs + self.padding, *config.top_mlp[:-1]), last_is_linear=False)
        # In fp32: half-precision logits would tie rows that the AUC must tell apart.
        self.last = mlp((width + pairs + self.padding, *config.top_mlp)[-2:], last_is_linear=True)
        lower, mirror = pair_places([0, *(1 + table for table in order)])
        self.register_buffer("lower", lower, persistent=False)
        self.register_buffer("mirror", mirror, persistent=False)

    def score(self, hidden: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Logits (rows,) of the bottom MLP's (rows, width) and the tables' (rows, tables, width)."""
        together = torch.cat((hidden.unsqueeze(1), vectors), dim=1)
        pairs = Interaction.apply(together, self.lower, self.mirror)
        padding = hidden.new_zeros(len(hidden), self.padding)
        features = self.top(torch.cat((hidden, pairs, padding), dim=1))
        with torch.autocast(features.device.type, enabled=False):
            return self.last(features.float()).squeeze(1)


class Tables:
    """This rank's embedding tables as one, and their exchange with the other ranks.

    Rows of a table start uniform in +-1 / sqrt(rows), by a generator of the table's own, so that they do not
    depend on the placement.
    """

    def __init__(self, sizes: Sequence[int], config: Config, ranks: Ranks) -> None:
        self.placement = place(sizes, ranks.size)
        self.mine = self.placement[ranks.rank]
        # The order in which ``split`` gives the tables' vectors.
        self.order = [table for tables in self.placement for table in tables]
        self.width = config.bottom_mlp[-1]
        self.count = len(sizes)
        self._ranks = ranks
        self._sorted = config.embedding_update == "sorted"
        self._on_gpu = ranks.context.type == "cuda"
        rows = [sizes[table] for table in self.mine]
        starts = [sum(rows[:number]) for number in range(len(rows))]
        self.offsets = torch.tensor(starts, dtype=torch.int64, device=ranks.context).unsqueeze(1)
        self.weight = torch.empty(sum(rows), self.width, device=ranks.context)
        for table, start, count in zip(self.mine, starts, rows):
            generator = torch.Generator(ranks.context).manual_seed(config.seed * 1000 + table + 1)
            bound = math.sqrt(1 / count)
            self.weight[start : start + count].uniform_(-bound, bound, generator=generator)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the joint table (global batch * my tables) of ``indices`` (my tables, global batch)."""
        return (indices + self.offsets).t().reshape(-1)

    def send(self, rows: torch.Tensor, batch_size: int, dtype: torch.dtype) -> Wait:
        """Look ``rows`` up and begin to send each rank the vectors of its ``batch_size`` rows.

        The call that is returned gives the flat vectors of this rank's rows, one rank's tables after the other's.
        """
        found = self.weight.index_select(0, rows).to(dtype).view(-1)
        return self._exchange(found, self._shares(batch_size), self._own_shares(batch_size))

    def split(self, flat: torch.Tensor, batch_size: int) -> torch.Tensor:
        """Vectors (batch_size, tables, width), in ``order``, of what ``send`` brought."""
        parts = flat.split(self._shares(batch_size))
        each = [part.view(batch_size, -1, self.width) for part in parts if part.numel()]
        return each[0] if len(each) == 1 else torch.cat(each, dim=1)

    def send_back(self, gradient: torch.Tensor, batch_size: int) -> Wait:
        """Begin to send the gradient of ``send``'s flat vectors back to the tables' ranks."""
        return self._exchange(gradient.contiguous(), self._own_shares(batch_size), self._shares(batch_size))

    def update(self, rows: torch.Tensor, gradient: torch.Tensor, rate: torch.Tensor) -> None:
        """weight[row] -= rate * gradient for each of ``rows``; a row that comes twice gets the sum."""
        step = gradient.view(-1, self.width).float() * -rate
        if self._sorted:
            self.weight.index_put_((rows,), step, accumulate=True)
        elif self._on_gpu:
            self.weight.index_add_(0, rows, step)
        else:
            # On a CPU index_add_ goes row by row; scatter_add_ of an expanded index sorts and sums.
            self.weight.scatter_add_(0, rows.unsqueeze(1).expand_as(step), step)

    def _shares(self, batch_size: int) -> List[int]:
        return [batch_size * len(tables) * self.width for tables in self.placement]

    def _own_shares(self, batch_size: int) -> List[int]:
        return [batch_size * len(self.mine) * self.width] * self._ranks.size

    def _exchange(self, values: torch.Tensor, taken: List[int], given: List[int]) -> Wait:
        """Begin an all-to-all of ``values``, of which each rank gets its number in ``given``."""
        if self._ranks.size == 1:
            return lambda: values
        received = values.new_empty(sum(taken))
        work = dist.all_to_all_single(received, values, taken, given, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return received

        return wait


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
