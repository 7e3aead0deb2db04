"""The operators that dominate a step of DLRM, next to the MLPs: lookup, interaction and update of the tables.

Each function here is PyTorch's own operators; its Triton kernels are in kernels.py, and common/torch/kernels.py
compares and chooses.
"""

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import kernels
from benchmarks.common.torch.kernels import Operator
from benchmarks.dlrm.pytorch.config import Config

ALIGNMENT = 8  # the top MLP's input is padded to a multiple, as tensor cores want it: 479 becomes 480, as submitted
MEASURED_ROWS = 1 << 20  # rows of the table of a measurement, at most: 0.5 GB of 128 numbers each
MODULE = "benchmarks.dlrm.pytorch.kernels"


class Layout(NamedTuple):
    """Where the vectors of a batch are in what the ranks sent: one rank's after the other's, each row by row."""

    counts: Tuple[int, ...]  # tables of each rank
    padding: int
    # (pairs,): place of each pair in a row's flat matrix of products, vectors in the order of their arrival.
    lower: torch.Tensor
    mirror: torch.Tensor  # (vectors * vectors,): the pair of each place; the diagonal's entries may be any
    # (3, tables): numbers per row before the table's rank, before the table in its rank's row, in its rank's row.
    places: torch.Tensor


def layout(placement: Sequence[Sequence[int]], width: int, device: torch.device) -> Layout:
    """Return the layout for the tables of each rank, each of which has vectors of ``width``.

    The pairs come out in the order of the tables' numbers, so that the network does not depend on the placement.
    """
    order = torch.tensor([0, *(1 + table for tables in placement for table in tables)])
    count = len(order)
    first, second = order.argsort()[torch.tril_indices(count, count, -1)]
    lower = first * count + second
    mirror = torch.zeros(count * count, dtype=torch.int64)
    mirror[lower] = mirror[second * count + first] = torch.arange(len(lower))
    places = torch.zeros(3, count - 1, dtype=torch.int64)
    before = 0
    for tables in placement:
        for number, table in enumerate(tables):
            places[:, table] = torch.tensor([before, number, len(tables)]) * width
        before += len(tables)
    tensors = (each.to(device) for each in (lower, mirror, places))
    return Layout(tuple(map(len, placement)), -(width + len(lower)) % ALIGNMENT, *tensors)


class Interaction(torch.autograd.Function):
    """Dot products of all pairs of a row's vectors, (rows, vectors, width) to (rows, pairs); see Layout.

    Only the lower triangle of their matrix is gathered.
    """

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, lower: torch.Tensor, mirror: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(vectors, mirror)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return products.view(vectors.shape[0], -1).index_select(1, lower)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[torch.Tensor, None, None]:
        """With S the symmetric matrix of the pairs' gradients, d(X X^T) gives S X."""
        vectors, mirror = ctx.saved_tensors
        rows, count, _ = vectors.shape
        symmetric = gradients[0].index_select(1, mirror).view(rows, count, count)
        symmetric.diagonal(dim1=1, dim2=2).zero_()
        return torch.bmm(symmetric, vectors), None, None


def interact(hidden: torch.Tensor, flat: torch.Tensor, where: Layout) -> torch.Tensor:
    """Input of the top MLP, (rows, width + pairs + padding): the bottom MLP's (rows, width), and all dot products."""
    rows, width = hidden.shape
    parts = flat.split([rows * count * width for count in where.counts])
    each = [part.view(rows, -1, width) for part in parts if part.numel()]
    vectors = each[0] if len(each) == 1 else torch.cat(each, dim=1)
    together = torch.cat((hidden.unsqueeze(1), vectors), dim=1)
    pairs = Interaction.apply(together, where.lower, where.mirror)
    return torch.cat((hidden, pairs, hidden.new_zeros(rows, where.padding)), dim=1)


def gather(weight: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The ``rows`` of ``weight``, flat, in the type of the activations."""
    return weight.index_select(0, rows).to(dtype).view(-1)


def scatter(weight: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor, rate: torch.Tensor) -> None:
    """weight[row] -= rate * gradient for each of ``rows``; a row that comes twice gets the sum."""
    step = gradient.view(-1, weight.shape[1]).float() * -rate
    if weight.is_cuda:
        weight.index_add_(0, rows, step)
    else:
        # On a CPU index_add_ goes row by row; scatter_add_ of an expanded index sorts and sums.
        weight.scatter_add_(0, rows.long().unsqueeze(1).expand_as(step), step)


def scatter_sorted(weight: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor, rate: torch.Tensor) -> None:
    """The same, added in a fixed order on a GPU too."""
    step = gradient.view(-1, weight.shape[1]).float() * -rate
    weight.index_put_((rows,), step, accumulate=True)


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
    where = layout(placement, width, device)
    columns = width + len(where.lower) + where.padding
    shapes = ((rows, width), (rows * sum(where.counts) * width,), (rows, columns))
    hidden, flat, gradient = (
        torch.randn(shape, generator=numbers, device=device).to(dtype).requires_grad_(number < 2)
        for number, shape in enumerate(shapes)
    )

    def call() -> kernels.Results:
        features = interaction(hidden, flat, where)
        return [*features.detach().tensor_split([width], 1), *torch.autograd.grad(features, (hidden, flat), gradient)]

    return call


def _lookups(
    device: torch.device, rows: int, lookups: int, width: int, index: str
) -> Tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator(device).manual_seed(1)
    weight = torch.randn(rows, width, generator=numbers, device=device)
    # Popular rows, as clicks have them: half of the lookups go to a sixteenth of the rows.
    drawn = torch.rand(lookups, generator=numbers, device=device) ** 4 * rows
    return weight, drawn.to(getattr(torch, index)).clamp_(max=rows - 1)


def _gather_example(
    gathered: Any, device: torch.device, dtype: torch.dtype, rows: int, lookups: int, width: int, index: str
) -> kernels.Call:
    weight, chosen = _lookups(device, rows, lookups, width, index)
    return lambda: [gathered(weight, chosen, dtype)]


def _scatter_example(
    scattered: Any, device: torch.device, dtype: torch.dtype, rows: int, lookups: int, width: int, index: str
) -> kernels.Call:
    weight, chosen = _lookups(device, rows, lookups, width, index)
    gradient = torch.randn(lookups * width, device=device, generator=torch.Generator(device).manual_seed(2)).to(dtype)
    rate = torch.full((), 0.1, device=device)

    def call() -> kernels.Results:
        scattered(weight, chosen, gradient, rate)
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


class Chosen(NamedTuple):
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
) -> Chosen:
    """Choose by measuring on the sizes of this rank, which has ``table_rows``; ``saved`` is a checkpoint's choice."""
    width, index = config.bottom_mlp[-1], "int64"
    lookups = max(1, len(placement[ranks.rank])) * config.batch_size * ranks.size
    of_tables = {"rows": max(1, min(table_rows, MEASURED_ROWS)), "lookups": lookups, "width": width, "index": index}
    sizes: Dict[str, Mapping[str, Any]] = {
        "interaction": {"rows": config.batch_size, "placement": placement, "width": width},
        "gather": of_tables,
        "update": of_tables,
    }
    operators = dict(OPERATORS)
    sorts = config.embedding_update == "sorted"
    if sorts:
        del operators["update"]  # Triton's kernel adds in any order
    dtype, clock = pytorch.DTYPES[config.precision], kernels.clock(config.cuda_graph)
    names = kernels.choose(operators, config.kernels, ranks, dtype, sizes, saved, clock)
    found: List[Any] = [kernels.implementation(operators[name], names[name]) for name in operators]
    return Chosen(names, *found, *([scatter_sorted] if sorts else []))
