"""Mixture of experts (top-k routing) in place of the feed-forward network.

As in Megatron without token dropping and load-balancing loss: router logits in fp32 or bf16, softmax over the top k
in fp32, weighted sum of the expert outputs. The experts are computed with a grouped GEMM. With expert parallelism the
experts are distributed over ranks, and tokens are exchanged with all-to-all.
"""

from typing import Any, List, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from benchmarks.llama.shapes import Shape

LIMIT, STEEPNESS = 7.0, 1.702  # of gpt-oss's gate


# Gates with interleaved gate and up columns: (..., 2 * inner width) to (..., inner width).
def silu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
    return functional.silu(gate) * up


def clamped(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gpt-oss's gate (transformers' GptOssExperts, Megatron's quick_gelu with offset and clamp)."""
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(STEEPNESS * gate) * (up + 1)


GATES = {"silu": silu, "gpt_oss": clamped}


def grouped_product(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Grouped GEMM of rows (N, K), sorted by expert with ``counts`` rows per expert, and weights (E, K, M)."""
    if rows.dtype != torch.float64:
        return functional.grouped_mm(rows, weights, offs=counts.cumsum(0, dtype=torch.int32))
    return torch.cat([part @ weight for part, weight in zip(rows.split(counts.tolist()), weights)])


class Exchanged(torch.autograd.Function):
    """All-to-all of rows with ``send_counts`` and ``receive_counts`` rows per rank."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, send_counts: List[int], receive_counts: List[int], group: Any
    ) -> torch.Tensor:
        ctx.how = receive_counts, send_counts, group
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), receive_counts, send_counts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> Tuple[torch.Tensor, None, None, None]:
        return Exchanged.apply(gradients, *ctx.how), None, None, None


class Reordered(torch.autograd.Function):
    """Rows in another order: row i of the result is row ``order[i] // copies``. ``inverse``: inverse permutation.

    Backward gathers too: the gradient of indexing would sort the indices, and sum in any order on a GPU.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, copies: int = 1
    ) -> torch.Tensor:
        ctx.copies = copies
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order // copies if copies > 1 else order)

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> Tuple[torch.Tensor, None, None, None]:
        grouped = gradients.index_select(0, *ctx.saved_tensors)
        return grouped.unflatten(0, (-1, ctx.copies)).sum(1) if ctx.copies > 1 else grouped, None, None, None


def inverse_of(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class Experts(nn.Module):
    """This rank's experts; gate and up are in turn in the columns of ``gate_up_proj``, as in published weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.shared_by = GATES[shape.gate], 1
        self.gate_up_proj = nn.Parameter(torch.empty(shape.experts, shape.width, 2 * shape.inner_width))
        self.down_proj = nn.Parameter(torch.empty(shape.experts, shape.inner_width, shape.width))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        first, last = (self.local_weights(weights) for weights in (self.gate_up_proj, self.down_proj))
        return grouped_product(self.gate(grouped_product(rows, first, counts)), last, counts)

    def local_weights(self, weights: torch.Tensor) -> torch.Tensor:
        if not isinstance(weights, DTensor):
            return weights
        local_weights = weights.to_local()
        # An expert processes tokens from all ranks that share it, but FSDP averages only over the expert's copies.
        if local_weights.requires_grad:
            local_weights.register_hook(lambda gradient: gradient / self.shared_by)
        return local_weights


def chosen_experts(mixture: Any, hidden: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Route hidden states (..., width): return router logits, selected experts and their weights."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    dtype = torch.bfloat16 if mixture.router_dtype == "bf16" else exact
    logits = functional.linear(hidden.to(dtype), mixture.router.weight.to(dtype))
    highest, experts = logits.topk(mixture.chosen)
    return logits, experts, highest.softmax(-1, dtype=exact).to(hidden.dtype)


def by_all(mixture: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Compute all experts for (B, L, width) and weight the outputs with 0 for experts that were not selected.

    For export: shapes must not depend on the routing or be computed from two other sizes.
    """
    logits, experts, shares = chosen_experts(mixture, hidden)
    count = torch.zeros_like(logits, dtype=hidden.dtype).scatter(-1, experts, shares)
    experts_module = mixture.experts
    gate_up = hidden[:, None] @ experts_module.gate_up_proj
    outputs = experts_module.gate(gate_up) @ experts_module.down_proj  # (B, experts, L, width)
    return (outputs * count.transpose(1, 2)[..., None]).sum(1)


class Mixture(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.chosen, self.count, self.router_dtype = shape.chosen, shape.experts, shape.router_dtype
        self.group = None  # type: Any  # of the ranks that share the experts, see parallel.py
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = Experts(shape)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.flatten(0, 1)
        _, experts, shares = chosen_experts(self, rows)
        experts = experts.flatten()
        order = experts.argsort(stable=True)
        inverse = inverse_of(order)
        # bincount would wait for the GPU to learn the size of its result.
        counts = experts.new_zeros(self.count).scatter_add_(0, experts, torch.ones_like(experts))
        spread = Reordered.apply(rows, order, inverse, self.chosen)
        outputs = self.experts(spread, counts) if self.group is None else self.elsewhere(spread, counts)
        # Fixed order of the summation: results are reproducible on a GPU.
        expert_outputs = Reordered.apply(outputs, inverse, order).unflatten(0, (-1, self.chosen))
        return (expert_outputs * shares[..., None]).sum(1).unflatten(0, hidden.shape[:2])

    def elsewhere(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Compute rows, sorted by expert, on the ranks of the expert-parallel group."""
        size = dist.get_world_size(self.group)
        receive_rows = torch.empty_like(counts)
        dist.all_to_all_single(receive_rows, counts, group=self.group)
        # The only wait for the GPU in a layer.
        send_counts, receive_counts = torch.stack((counts, receive_rows)).view(2, size, -1).sum(-1).tolist()
        received = Exchanged.apply(rows, send_counts, receive_counts, self.group)
        # Rows arrive rank by rank, sorted by expert per rank.
        local_experts = torch.arange(len(counts) // size, device=rows.device)
        experts = local_experts.repeat(size).repeat_interleave(receive_rows, output_size=len(received))
        order = experts.argsort(stable=True)
        inverse = inverse_of(order)
        done = self.experts(Reordered.apply(received, order, inverse), receive_rows.view(size, -1).sum(0))
        return Exchanged.apply(Reordered.apply(done, inverse, order), receive_counts, send_counts, self.group)
