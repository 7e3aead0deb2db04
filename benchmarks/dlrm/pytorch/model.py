"""Network: MLPs replicated on all ranks, and embedding tables distributed over the ranks.

A rank's tables are stored as one table with offsets: a lookup of the global batch is one gather, an update one
scatter. All-to-all exchanges "all rows, local tables" for "local rows, all tables", and back.
"""

import math
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch.cuda_graphs import Captured
from benchmarks.dlrm.blocks import NUMBERS
from benchmarks.dlrm.placement import Placement, place
from benchmarks.dlrm.pytorch import operators
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import Batch
from benchmarks.dlrm.pytorch.operators import Layout

Wait = Callable[[], torch.Tensor]  # waits for an exchange and returns the received tensor


class LinearReLU(nn.Linear):
    """Linear layer with ReLU as one GEMM with an epilogue, in the type ``kind``: (rows, in) to (rows, out)."""

    kind = torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _LinearReLU.apply(*(tensor.to(self.kind) for tensor in (x, self.weight, self.bias)))
        return y


class _LinearReLU(torch.autograd.Function):
    # PyTorch's operator lacks a backward pass.
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        fused: Any = torch._addmm_activation
        y: torch.Tensor = fused(bias, x, weight.t())
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, y = ctx.saved_tensors
        gradient = torch.ops.aten.threshold_backward(gradients[0], y, 0)
        of_x = gradient.mm(weight) if ctx.needs_input_grad[0] else None
        return of_x, gradient.t().mm(x), gradient.sum(0)


def mlp(widths: Sequence[int], last_is_linear: bool, fused: Optional[torch.dtype] = None) -> nn.Sequential:
    """Return linear layers with ReLU; the last layer is without ReLU if ``last_is_linear``.

    ``fused``: type of layers with a fused ReLU.

    Weights and biases are normal with variances 2 / (in + out) and 1 / out, as in the reference implementation.
    """
    layers: List[nn.Module] = []
    for outputs, inputs in zip(widths[1:], widths):
        linear = nn.Linear(inputs, outputs) if fused is None else LinearReLU(inputs, outputs)
        nn.init.normal_(linear.weight, std=math.sqrt(2 / (inputs + outputs)))
        nn.init.normal_(linear.bias, std=math.sqrt(1 / outputs))
        if isinstance(linear, LinearReLU):
            linear.kind = fused
            layers.append(linear)
        else:
            layers += [linear, nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[: -1 if last_is_linear else None])


class Network(nn.Module):
    """Replicated part: bottom MLP, interaction, top MLP."""

    def __init__(self, config: Config, table_layout: Layout, interact: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        joined = config.bottom_mlp[-1] + len(table_layout.lower) + table_layout.padding
        self._layout, self._interact = table_layout, interact
        fused = pytorch.DTYPES[config.precision] if config.fused_relu else None
        self.bottom = mlp((NUMBERS, *config.bottom_mlp), last_is_linear=False, fused=fused)
        self.top = mlp((joined, *config.top_mlp[:-1]), last_is_linear=False, fused=fused)
        # In fp32: half-precision logits would have ties, which affect the AUC.
        self.last = mlp((joined, *config.top_mlp)[-2:], last_is_linear=True)

    def score(self, hidden: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return logits (rows,) from the output of the bottom MLP (rows, width) and the vectors of Tables.send."""
        features = self.top(self._interact(hidden, vectors, self._layout))
        with torch.autocast(features.device.type, enabled=False):
            return self.last(features.float()).squeeze(1)


class Tables:
    """Embedding tables of this rank as one table, and their exchange with other ranks.

    Tables are uniform in +-1 / sqrt(rows) with a generator per table, so that initial weights do not depend on the
    placement.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        config: Config,
        ranks: Ranks,
        kernels: Optional[Mapping[str, str]] = None,
        placement: Optional[Placement] = None,
    ) -> None:
        """Initialize the weights and select the operators; ``kernels`` and ``placement`` are from a checkpoint."""
        self.placement = placement or place(sizes, ranks.size)
        self.mine = self.placement[ranks.rank]
        self.width = config.bottom_mlp[-1]
        self.count = len(sizes)
        self._ranks = ranks
        rows = [sizes[table] for table in self.mine]
        starts = [sum(rows[:number]) for number in range(len(rows))]
        self.offsets = torch.tensor(starts, dtype=torch.int64, device=ranks.context).unsqueeze(1)
        self.weight = torch.empty(sum(rows), self.width, device=ranks.context)
        for table, start, count in zip(self.mine, starts, rows):
            generator = torch.Generator(ranks.context).manual_seed(config.seed * 1000 + table + 1)
            bound = math.sqrt(1 / count)
            self.weight[start : start + count].uniform_(-bound, bound, generator=generator)
        self.operators = operators.choose(config, self.placement, len(self.weight), ranks, kernels)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the joint table (global batch * my tables) of ``indices`` (my tables, global batch)."""
        return (indices + self.offsets).t().reshape(-1)

    def send(self, rows: torch.Tensor, batch_size: int, dtype: torch.dtype, group: Any = None) -> Wait:
        """Look up ``rows`` and start sending to every rank the vectors for its ``batch_size`` rows.

        The returned function waits and returns the flat vectors of the local rows, grouped by rank. Exchanges in a
        step, which may be captured in a CUDA graph, use the default ``group``.
        """
        vectors = self.operators.gather(self.weight, rows, dtype)
        return self._exchange(vectors, *self._shares(batch_size), group)

    def send_back(self, gradient: torch.Tensor) -> Wait:
        """Start sending the gradient of the vectors of ``send`` back to the ranks of the tables."""
        receive_sizes, send_sizes = self._shares(len(gradient) // (self.width * self.count))
        return self._exchange(gradient.contiguous(), send_sizes, receive_sizes)

    def update(self, rows: torch.Tensor, gradient: torch.Tensor, rate: torch.Tensor) -> None:
        """Apply weight[row] -= rate * gradient for ``rows``; gradients of repeated rows are summed."""
        self.operators.update(self.weight, rows, gradient, rate)

    # Numbers that ``send`` receives from and sends to the ranks
    def _shares(self, batch_size: int) -> Tuple[List[int], List[int]]:
        counts = [batch_size * len(tables) * self.width for tables in self.placement]
        return counts, [counts[self._ranks.rank]] * self._ranks.size

    # Start an all-to-all of ``values`` with ``send_sizes`` numbers per rank
    def _exchange(
        self, values: torch.Tensor, receive_sizes: List[int], send_sizes: List[int], group: Any = None
    ) -> Wait:
        if self._ranks.size == 1:
            return lambda: values
        received = values.new_empty(sum(receive_sizes))
        work = dist.all_to_all_single(received, values, receive_sizes, send_sizes, group=group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return received

        return wait


class Training:
    """Network and tables, and the two step halves around the backward pass of loss * loss_scale.

    Exchanges between ranks overlap with computation if possible.
    """

    def __init__(
        self,
        config: Config,
        sizes: Tuple[int, ...],
        ranks: Ranks,
        kernels: Optional[Mapping[str, str]] = None,
        placement: Optional[Placement] = None,
    ) -> None:
        """Initialize the weights, independent of the number of ranks; ``kernels`` and ``placement`` are from a
        checkpoint.
        """
        self.config, self.ranks = config, ranks
        self.tables = Tables(sizes, config, ranks, kernels, placement)
        table_layout = operators.layout(self.tables.placement, self.tables.width, ranks.context)
        torch.manual_seed(config.seed)
        self.network = Network(config, table_layout, self.tables.operators.interact).to(ranks.context)
        # All parameters become views into one tensor, which the optimizer updates in one operation.
        self.weights = parameters_to_vector(self.network.parameters()).detach()
        vector_to_parameters(self.weights, self.network.parameters())
        self.gradients = pytorch.flat_gradients(self.network.parameters())
        self.loss_scale = config.loss_scale if config.precision == "fp16" else 1.0
        self._dtype = pytorch.DTYPES[config.precision]
        self._rows = self._vectors = torch.zeros(0)
        self.graph: Optional[Captured] = None  # the full step on a batch with the rate as a tensor ()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Mean loss of this rank's rows; clears the gradients."""
        network, tables, size = self.network, self.tables, len(batch.labels)
        self.gradients.zero_()
        self._rows = tables.rows(batch.indices)
        received = tables.send(self._rows, size, self._dtype)
        with pytorch.autocast(self.ranks.context, self.config.precision):
            hidden = network.bottom(batch.numbers)
            self._vectors = received().requires_grad_()
            logits = network.score(hidden, self._vectors)
        return functional.binary_cross_entropy_with_logits(logits.float(), batch.labels)

    def update(self, rate: torch.Tensor) -> None:
        """Tables and MLPs minus ``rate``, a tensor (), times the mean gradient of all ranks."""
        config, tables, weights, gradients = self.config, self.tables, self.weights, self.gradients
        # The mean over all ranks' rows is the mean of the ranks' means.
        part = rate / (self.loss_scale * self.ranks.size)
        received = tables.send_back(self._vectors.grad)
        summed = dist.all_reduce(gradients, async_op=True) if self.ranks.size > 1 else None
        tables.update(self._rows, received(), part * config.table_learning_rate_factor)
        if summed is not None:
            summed.wait()
        if config.weight_decay:
            weights.mul_(1.0 - rate * config.weight_decay)
        weights.sub_(gradients * part)

    def state_dict(self) -> Dict[str, Any]:
        placement = [list(tables) for tables in self.tables.placement]
        return {"weights": self.weights, "kernels": self.tables.operators.names, "placement": placement}

    def scores(self, batch: Batch) -> torch.Tensor:
        tables, size = self.tables, len(batch.labels)
        with torch.no_grad(), pytorch.autocast(self.ranks.context, self.config.precision):
            received = tables.send(tables.rows(batch.indices), size, self._dtype, pytorch.eager())
            hidden = self.network.bottom(batch.numbers)
            return self.network.score(hidden, received()).float()
