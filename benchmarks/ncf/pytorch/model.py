"""NeuMF (He et al. 2017, section 3.3): matrix factorisation and an MLP over user and item embeddings.

score(u, i) = w_g . (p_u * q_i) + w_m . MLP([r_u, s_i]) + b        equations 8 to 12, before the sigmoid
"""

import math
from typing import Any, Optional, Tuple

import torch
import torch.nn.functional as F

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices
from benchmarks.ncf.pytorch.config import Config

EMBEDDING_DEVIATION = 0.01  # standard deviation of fresh embeddings, in the authors' code and in MLPerf's reference


class NeuMF(torch.nn.Module):
    """Scores of user-item pairs; ``layers`` as in Config: the first value is the width of both MLP embeddings together.

    The input of the first layer is [r_u, s_i], so its product is W_u r_u + W_i s_i. With ``by_tables`` both terms
    are computed for all users and items and then looked up, which is less work if a batch has more pairs than users
    and items. The results are equal up to rounding. ``read_as``: type of copies of the tables for lookups, made in
    every step; None: no copies.
    """

    def __init__(
        self,
        users: int,
        items: int,
        factors: int,
        layers: Tuple[int, ...],
        by_tables: bool,
        read_as: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        width = layers[0] // 2
        self.by_tables, self.read_as = by_tables, read_as
        self.gmf_users = _embedding(users, factors)
        self.gmf_items = _embedding(items, factors)
        self.mlp_users = _embedding(users, width)
        self.mlp_items = _embedding(items, width)
        # Glorot's limit, Keras' default for a dense layer.
        weights = [_uniform(math.sqrt(6.0 / sum(shape)), *shape) for shape in zip(layers[1:], layers)]
        self.weights = torch.nn.ParameterList(weights)
        self.biases = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(after)) for after in layers[1:]])
        # Keras' lecun_uniform, as the authors have it.
        limit = math.sqrt(3.0 / (factors + layers[-1]))
        self.out_gmf, self.out_mlp = _uniform(limit, factors), _uniform(limit, layers[-1])
        self.out_bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """(n,) scores before the sigmoid of the pairs ``users`` (n,), ``items`` (n,)."""
        read_as = self.read_as
        score = dot(rows(self.gmf_users, users, read_as) * rows(self.gmf_items, items, read_as), self.out_gmf)  # (n,)
        if self.by_tables:
            of_users, of_items = self.first_layer_tables()
            hidden = F.relu(rows(of_users, users, None) + rows(of_items, items, None))  # (n, layers[1])
        else:
            both = torch.cat((rows(self.mlp_users, users, read_as), rows(self.mlp_items, items, read_as)), dim=1)
            hidden = F.relu(F.linear(both, self.weights[0], self.biases[0]))
        return score + dot(self._upper_layers(hidden), self.out_mlp) + self.out_bias

    def loss_sum(self, users: torch.Tensor, items: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(): binary cross-entropy (equation 7), summed over the pairs; ``labels`` (n,) are 0 or 1."""
        return F.binary_cross_entropy_with_logits(self(users, items), labels, reduction="sum")

    def first_layer_tables(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """W_u r_u + b of every user and W_i s_i of every item: (users, layers[1]) and (items, layers[1])."""
        width = self.mlp_users.shape[1]
        weight = self.weights[0]
        of_users = F.linear(self.mlp_users, weight[:, :width], self.biases[0])
        return of_users, F.linear(self.mlp_items, weight[:, width:])

    def score_candidates(
        self, first: int, part: slice, candidates: torch.Tensor, tables: Tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return the scores (users, candidates) of the users in ``part``, relative to user ``first``.

        ``tables`` are from first_layer_tables.
        """
        of_users, of_items = tables
        users = slice(first + part.start, first + part.stop)
        hidden = self._upper_layers(F.relu(of_users[users].unsqueeze(1) + F.embedding(candidates, of_items)))
        weighted = (self.gmf_users[users] * self.out_gmf).unsqueeze(2)
        product = torch.bmm(F.embedding(candidates, self.gmf_items), weighted).squeeze(2)
        return product.float() + dot(hidden, self.out_mlp) + self.out_bias

    def _upper_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        for weight, bias in zip(self.weights[1:], self.biases[1:]):
            hidden = F.relu(F.linear(hidden, weight, bias))
        return hidden


# Rows (n, width) of a table (rows, width) at an index (n,), or rows from a copy in a different type; gradients are
# summed in fp32. A popular item is in thousands of pairs per batch: a sum in 16 bits would stagnate. Without
# synchronization, it can be captured in a CUDA graph.
class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, index: torch.Tensor, read_as: Optional[torch.dtype]) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype = table.shape, table.dtype
        return table.to(read_as or table.dtype).index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[torch.Tensor, None, None]:
        (index,) = ctx.saved_tensors
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=dtype, device=gradient.device)
        return total.index_add_(0, index, gradient.to(dtype)).to(ctx.dtype), None, None


rows = _Rows.apply


def dot(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(...,) fp32: the last axis of ``values`` times ``weight`` (width,), in the type that autocast chooses."""
    # Not torch.mv: autocast on a CPU does not cast both operands.
    return F.linear(values, weight.unsqueeze(0)).squeeze(-1).float()


def _embedding(count: int, width: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(count, width).normal_(0.0, EMBEDDING_DEVIATION))


def _uniform(limit: float, *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape).uniform_(-limit, limit))


def build(config: Config, users: int, items: int) -> NeuMF:
    by_tables = config.first_layer == "tables" or (config.first_layer == "auto" and config.batch_size >= users + items)
    choices.record("first_layer", "tables" if by_tables else "rows")
    read_as = pytorch.DTYPES[config.precision] if config.tables == "16-bit" else None
    return NeuMF(users, items, config.factors, config.layers, by_tables, read_as)
