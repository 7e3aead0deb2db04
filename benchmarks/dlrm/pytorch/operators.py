"""Operators that dominate a step of DLRM in addition to the MLPs: lookup, interaction and update of tables.

This file has the PyTorch versions; Triton kernels are in kernels.py. common/torch/kernels.py compares and selects.
"""

from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.common.torch.kernels import Operator
from benchmarks.dlrm.pytorch.config import Config

ALIGNMENT = 8  # the top MLP's input is padded to a multiple, as tensor cores want it: 479 becomes 480, as submitted
MEASURED_ROWS = 1 << 20  # maximum number of table rows in a measurement: 0.5 GB with 128 numbers per row
MODULE = "benchmarks.dlrm.pytorch.kernels"


class Layout(NamedTuple):
    """Position of a batch's vectors in the data from the ranks, which are grouped by rank, then by row."""

    counts: Tuple[int, ...]  # number of tables by rank
    padding: int
    # (pairs,): position of the pairs in the flat matrix of products, with vectors in the order of arrival
    lower: torch.Tensor
    mirror: torch.Tensor  # (vectors * vectors,): pair by position; diagonal entries are not used
    # (3, tables): numbers per row in the ranks before, in the tables before on the rank, in all tables of the rank
    positions: torch.Tensor


def layout(placement: Sequence[Sequence[int]], width: int, device: torch.device) -> Layout:
    """Return the layout for a placement with vectors of ``width``.

    Pairs are in the order of table numbers, so that the network does not depend on the placement.
    """
    order = torch.tensor([0, *(1 + table for tables in placement for table in tables)])
    count = len(order)
    first, second = order.argsort()[torch.tril_indices(count, count, -1)]
    lower = first * count + second
    mirror = torch.zeros(count * count, dtype=torch.int64)
    mirror[lower] = mirror[second * count + first] = torch.arange(len(lower))
    table_positions = torch.zeros(3, count - 1, dtype=torch.int64)
    previous = 0
    for tables in placement:
        for number, table in enumerate(tables):
            table_positions[:, table] = torch.tensor([previous, number, len(tables)]) * width
        previous += len(tables)
    tensors = (tensor.to(device) for tensor in (lower, mirror, table_positions))
    return Layout(tuple(map(len, placement)), -(width + len(lower)) % ALIGNMENT, *tensors)


class Interaction(torch.autograd.Function):
    """Dot products of all pairs of vectors in a row, (rows, vectors, width) to (rows, pairs); see Layout.

    Only the lower triangle of the products is gathered.
    """

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, lower: torch.Tensor, mirror: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(vectors, mirror)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return products.view(vectors.shape[0], -1).index_select(1, lower)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[torch.Tensor, None, None]:
        """With the symmetric matrix S of the pairs' gradients, d(X X^T) is S X."""
        vectors, mirror = ctx.saved_tensors
        rows, count, _ = vectors.shape
        symmetric = gradients[0].index_select(1, mirror).view(rows, count, count)
        symmetric.diagonal(dim1=1, dim2=2).zero_()
        return torch.bmm(symmetric, vectors), None, None


def interact(hidden: torch.Tensor, flat: torch.Tensor, table_layout: Layout) -> torch.Tensor:
    """Input of the top MLP, (rows, width + pairs + padding): the bottom MLP's (rows, width), and all dot products."""
    rows, width = hidden.shape
    parts = flat.split([rows * count * width for count in table_layout.counts])
    tensors = [part.view(rows, -1, width) for part in parts if part.numel()]
    vectors = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
    together = torch.cat((hidden.unsqueeze(1), vectors), dim=1)
    pairs = Interaction.apply(together, table_layout.lower, table_layout.mirror)
    return torch.cat((hidden, pairs, hidden.new_zeros(rows, table_layout.padding)), dim=1)


def gather(weight: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The ``rows`` of ``weight``, flat, in the type of the activations."""
    return weight.index_select(0, rows).to(dtype).view(-1)


def scatter(weight: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor, rate: torch.Tensor) -> None:
    """Apply weight[row] -= rate * gradient for ``rows``; gradients of repeated rows are summed."""
    step = gradient.view(-1, weight.shape[1]).float() * -rate
    if weight.is_cuda:
        weight.index_add_(0, rows, step)
    else:
        # On a CPU index_add_ is a loop over rows; scatter_add_ with an expanded index sorts and sums.
        weight.scatter_add_(0, rows.long().unsqueeze(1).expand_as(step), step)


# -- compared and chosen ------------------------------------------------------------------------------


def _interaction_example(
    interaction: Any,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    placement: Sequence[Sequence[int]],
    width: int,
) -> kernels.Call:
    numbers = torch.Generator(device).manual_seed(1)
    table_layout = layout(placement, width, device)
    columns = width + len(table_layout.lower) + table_layout.padding
    shapes = ((rows, width), (rows * sum(table_layout.counts) * width,), (rows, columns))
    hidden, flat, gradient = (
        torch.randn(shape, generator=numbers, device=device).to(dtype).requires_grad_(number < 2)
        for number, shape in enumerate(shapes)
    )

    def call() -> kernels.Results:
        features = interaction(hidden, flat, table_layout)
        return [*features.detach().tensor_split([width], 1), *torch.autograd.grad(features, (hidden, flat), gradient)]

    return call


def _lookups(
    device: torch.device, rows: int, lookups: int, width: int, index: str
) -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    weight = torch.randn(rows, width, generator=generator, device=device)
    # Skewed distribution as in clicks: half of the lookups use a sixteenth of the rows.
    row_indices = torch.rand(lookups, generator=generator, device=device) ** 4 * rows
    return weight, row_indices.to(getattr(torch, index)).clamp_(max=rows - 1)


def _gather_example(
    gathered: Any, device: torch.device, dtype: torch.dtype, rows: int, lookups: int, width: int, index: str
) -> kernels.Call:
    weight, row_indices = _lookups(device, rows, lookups, width, index)
    return lambda: [gathered(weight, row_indices, dtype)]


def _scatter_example(
    scattered: Any, device: torch.device, dtype: torch.dtype, rows: int, lookups: int, width: int, index: str
) -> kernels.Call:
    weight, row_indices = _lookups(device, rows, lookups, width, index)
    gradient = torch.randn(lookups * width, device=device, generator=torch.Generator(device).manual_seed(2)).to(dtype)
    rate = torch.full((), 0.1, device=device)

    def call() -> kernels.Results:
        scattered(weight, row_indices, gradient, rate)
        return [weight]

    return call


_SMALL_LOOKUPS: Tuple[Dict[str, Any], ...] = (
    {"rows": 90, "lookups": 300, "width": 128, "index": "int64"},
    {"rows": 3, "lookups": 37, "width": 20, "index": "int32"},
    {"rows": 3, "lookups": 0, "width": 16, "index": "int64"},
)
OPERATORS = {
    "interaction": Operator(
        interact,
        f"{MODULE}:interact",
        _interaction_example,
        (
            {"rows": 9, "placement": [range(26)], "width": 128},
            {"rows": 5, "placement": [[], [2, 0], [1]], "width": 20},
        ),
    ),
    "gather": Operator(gather, f"{MODULE}:gather", _gather_example, _SMALL_LOOKUPS),
    "update": Operator(scatter, f"{MODULE}:scatter", _scatter_example, _SMALL_LOOKUPS),
}


class OperatorSet(NamedTuple):
    names: Dict[str, str]
    interact: Callable[[torch.Tensor, torch.Tensor, Layout], torch.Tensor] = interact
    gather: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor] = gather
    update: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None] = scatter


def choose(
    config: Config,
    placement: Sequence[Sequence[int]],
    table_rows: int,
    ranks: Ranks,
    saved: Optional[Mapping[str, str]] = None,
) -> OperatorSet:
    """Choose by measuring on the sizes of this rank, which has ``table_rows``; ``saved`` is a checkpoint's choice."""
    width, index = config.bottom_mlp[-1], "int64"
    lookups = max(1, len(placement[ranks.rank])) * config.batch_size * ranks.size
    of_tables = {"rows": max(1, min(table_rows, MEASURED_ROWS)), "lookups": lookups, "width": width, "index": index}
    sizes: Dict[str, Mapping[str, Any]] = {
        "interaction": {"rows": config.batch_size, "placement": placement, "width": width},
        "gather": of_tables,
        "update": of_tables,
    }
    dtype, clock = pytorch.DTYPES[config.precision], kernels.clock(config.cuda_graph)
    names = kernels.choose(OPERATORS, config.kernels, ranks, dtype, sizes, saved, clock)
    return OperatorSet(names, *(kernels.implementation(OPERATORS[name], names[name]) for name in OPERATORS))
