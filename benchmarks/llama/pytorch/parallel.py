"""Parallelism with FSDP2, DTensor tensor parallelism, context parallelism and expert parallelism.

Consecutive ranks form a group that processes the same samples: ``tensor`` ranks share the GEMMs, ``context`` ranks
share the positions. Weights, gradients and optimizer state are sharded over all ranks (FSDP over the ranks with the
same GEMM shard). Alternatively, consecutive ranks share the experts of the mixtures.
"""

from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, ContextManager, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.language.pytorch import low_precision
from benchmarks.llama.pytorch.attention import Attend, choose
from benchmarks.llama.pytorch.experts import Mixture
from benchmarks.llama.pytorch.network import Network, initial_std

SEED_STRIDE = 1_000_003  # between the seeds of two parameters


class MeshPosition(NamedTuple):
    """Where a rank is among the groups that share samples."""

    groups: int
    group: int
    context: int  # ranks that share the positions of the samples
    part: int  # this rank's index in the context group
    tensor: int  # ranks that share the GEMMs

    def positions(self, length: int) -> torch.Tensor:
        """Return this rank's positions, int64: two of 2 * context chunks, one near the start and one near the end.

        Later positions attend to more positions, so this balances the load.
        """
        if self.context == 1:
            return torch.arange(length)
        parts = torch.arange(length).chunk(2 * self.context)
        return torch.cat([parts[self.part], parts[-1 - self.part]])


def mesh_position(config: Any, ranks: Ranks) -> MeshPosition:
    tensor, size = config.tensor_parallelism, config.group
    part = ranks.rank % size // tensor
    return MeshPosition(ranks.size // size, ranks.rank // size, config.context_parallelism, part, tensor)


def policy_of(config: Any) -> MixedPrecisionPolicy:
    """Return the types of GEMMs with the weights that they gather, and of the sums of gradients.

    Keep cos and sin in fp32: they are the only layer input with a type different from the weights.
    """
    types = pytorch.DTYPES[config.precision], pytorch.DTYPES[config.gradient_reduction]
    return MixedPrecisionPolicy(*types, cast_forward_inputs=False)


def select_attention(config: Any, ranks: Ranks, position: MeshPosition) -> Optional[Attend]:
    """Return the attention of ranks that share a sequence, or of the selected kernel; None: PyTorch's default."""
    attend = choose(config, ranks)
    return across(context_group(ranks, position), position) if position.context > 1 else attend


def distribute(
    network: Network,
    ranks: Ranks,
    position: MeshPosition,
    policy: MixedPrecisionPolicy,
    compiles: bool = False,
    extra_plan: Mapping[str, ParallelStyle] = MappingProxyType({}),
    expert_parallelism: int = 1,
) -> None:
    """Shard a network on the meta device over all ranks. A single rank in fp32 keeps the full network.

    ``extra_plan``: tensor-parallel plan of modules added to the layers. ``expert_parallelism``: number of ranks that
    share a mixture's experts.
    """
    if compiles:
        compile_parts(network, position, has_fixed_rows=expert_parallelism == 1)
    if ranks.size == 1 and policy.param_dtype == torch.float32:
        return
    kind = ranks.context.type
    if not dist.is_initialized():  # FSDP casts dtypes, also on a single rank
        dist.init_process_group("gloo" if kind == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(kind, (ranks.size // position.tensor, position.tensor), mesh_dim_names=("shard", "tensor"))
    if position.tensor > 1:
        split_products(network, mesh["tensor"], extra_plan)
    if expert_parallelism > 1:
        split_experts(network, ranks, expert_parallelism, policy)
    for layer in network.layers:
        fully_shard(layer, mesh=mesh["shard"], mp_policy=policy)
    fully_shard(network, mesh=mesh["shard"], mp_policy=policy)
    if expert_parallelism > 1:
        # A layer waits for its row counts on the GPU; without prefetching, the next weights would be gathered after it.
        for layer, following in zip(network.layers, network.layers[1:]):
            layer.set_modules_to_forward_prefetch([following, following.mlp.experts])


def compile_parts(network: Network, position: MeshPosition, has_fixed_rows: bool) -> None:
    """Compile the layers and the loss; in layers with experts, attention and the experts' gate.

    A mixture waits for its row counts, which ends a graph. With tensor parallelism the logits are sharded, and their
    loss is not compiled. Training and evaluation get separate graphs with static shapes: after an evaluation with
    another batch size, the compiler would make the batch size of training dynamic. ``has_fixed_rows``: whether the
    experts' number of rows is the same in each step.
    """
    for layer in network.layers:
        if isinstance(layer.mlp, Mixture):
            layer.self_attn.compile(dynamic=False)
            layer.mlp.experts.gate = torch.compile(layer.mlp.experts.gate, dynamic=False if has_fixed_rows else None)
        else:
            layer.compile(dynamic=False)
    if position.tensor == 1:
        network.head.cross_entropy = torch.compile(network.head.cross_entropy, dynamic=False)


def split_products(network: Network, mesh: Any, extra_plan: Mapping[str, ParallelStyle]) -> None:
    """Shard the GEMMs over the ranks of ``mesh``, and the positions between the GEMMs.

    ``extra_plan``: tensor-parallel plan of modules added to the layers.
    """
    by_positions = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    around = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": by_positions,
        "head.lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    within = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": by_positions,
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    }
    frozen = [name for name, parameter in network.named_parameters() if not parameter.requires_grad]
    parallelize_module(network, mesh, around)
    for layer in network.layers:
        parallelize_module(layer, mesh, {**within, **extra_plan})
    for name in frozen:  # SequenceParallel makes parameters anew, to be trained
        network.get_parameter(name).requires_grad_(False)


def split_experts(network: Network, ranks: Ranks, share_of: int, policy: MixedPrecisionPolicy) -> None:
    """Distribute the experts over ``share_of`` consecutive ranks; FSDP shards each expert's copies."""
    shape, names = (ranks.size // share_of, share_of), ("copies", "experts")
    mesh = init_device_mesh(ranks.context.type, shape, mesh_dim_names=names)
    for layer in network.layers:
        mixture = layer.mlp
        mixture.group = mesh["experts"].get_group()
        for name, parameter in list(mixture.experts.named_parameters(recurse=False)):
            setattr(mixture.experts, name, nn.Parameter(distribute_tensor(parameter, mesh["experts"], [Shard(0)])))
        fully_shard(mixture.experts, mesh=mesh["copies"], mp_policy=policy, shard_placement_fn=lambda _: Shard(1))
        mixture.experts.shared_by = share_of


def by_mesh(parameters: Iterable[nn.Parameter]) -> List[List[nn.Parameter]]:
    """Group parameters by device mesh: PyTorch can combine only tensors on the same mesh."""
    groups: Dict[Any, List[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clip the gradient norm to ``max_norm`` in place, as clip_grad_norm_; return the norm before."""
    gradients = [[weight.grad for weight in group if weight.grad is not None] for group in by_mesh(parameters)]
    norms = [full_tensor(nn.utils.get_total_norm(group, foreach=True)) for group in gradients]
    norm = torch.stack(norms).square().sum().sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in (gradient for group in gradients for gradient in group):
        local(grad).mul_(factor)
    return norm


def loss_context(position: MeshPosition) -> ContextManager[Any]:
    """Return the context for forward and backward: with tensor parallelism, logits stay sharded."""
    return loss_parallel() if position.tensor > 1 else nullcontext()


# -- positions -----------------------------------------------------------------------------------------


def context_group(ranks: Ranks, position: MeshPosition) -> Any:
    """Return the group of the ranks that share this rank's samples by positions; all ranks call this together."""
    size, local_group = position.tensor * position.context, None
    for first in range(0, ranks.size, size):
        for offset in range(position.tensor):
            members = [first + offset + position.tensor * part for part in range(position.context)]
            new_group = pytorch.new_group(members)
            local_group = new_group if ranks.rank in members else local_group
    return local_group


class Gathered(torch.autograd.Function):
    """All-gather over a group, (ranks, ...); backward reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        count = dist.get_world_size(group)
        gathered = values.new_empty((count * len(values), *values.shape[1:]))
        dist.all_gather_into_tensor(gathered, values.contiguous(), group=group)
        return gathered.unflatten(0, (count, -1))

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> Tuple[torch.Tensor, None]:
        summed = gradients.new_empty(gradients.shape[1:])
        dist.reduce_scatter_tensor(summed, gradients.flatten(0, 1).contiguous(), group=ctx.group)
        return summed, None


def across(group: Any, position: MeshPosition) -> Attend:
    """Return the causal attention of this rank's queries to the keys of the group.

    Keys and values are all-gathered, as for Llama 3 (arXiv 2407.21783, section 3.3.2): with grouped queries they are
    small compared with the computation.
    """
    last = 2 * position.context - 1

    def of_all(values: torch.Tensor) -> torch.Tensor:
        # In the order of the positions.
        near, far = Gathered.apply(values, group).chunk(2, dim=3)
        return torch.cat([*near, *far.flip(0)], dim=2)

    @torch.compiler.disable  # cannot trace the mask of causal_lower_right
    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        keys, values = of_all(keys), of_all(values)
        outputs, size = [], queries.shape[2] // 2
        for part, q_chunk in zip((position.part, last - position.part), queries.chunk(2, dim=2)):
            end = (part + 1) * size
            mask = causal_lower_right(size, end)
            outputs.append(
                functional.scaled_dot_product_attention(
                    q_chunk, keys[:, :, :end], values[:, :, :end], attn_mask=mask, enable_gqa=True
                )
            )
        return torch.cat(outputs, dim=2)

    return attend


# -- values --------------------------------------------------------------------------------------------


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard; shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor; a collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share(tensor: torch.Tensor) -> Tuple[slice, ...]:
    """Return the slices of the full tensor that this rank has."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, begins = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(begins, sizes))


def fill(tensor: torch.Tensor, begins: Sequence[int], values: torch.Tensor) -> None:
    """Copy the part of ``values`` that this rank has; ``begins``: offset of ``values`` in the full tensor."""
    target, source = [], []
    for part, first, size in zip(share(tensor), begins, values.shape):
        start, end = max(part.start, first), min(part.stop, first + size)
        target.append(slice(start - part.start, max(start, end) - part.start))
        source.append(slice(start - first, max(start, end) - first))
    local(tensor)[tuple(target)] = values[tuple(source)].to(tensor.device)


@torch.no_grad()
def keep(network: Network, name: str, part: torch.Tensor) -> None:
    """Set this rank's parameter shard; a collective call.

    FP8 parameters are divided by the module's ``scale``, computed from the absolute maximum of the full tensor.
    """
    parameter = local(network.get_parameter(name))
    if parameter.dtype.itemsize > 1:
        parameter.copy_(part)
        return
    parameter = parameter.view(getattr(torch, low_precision.INPUTS))
    part = part.to(parameter.device, torch.float32)
    largest = part.abs().max() if part.numel() else part.new_zeros(())
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    scale = largest.clamp_min(low_precision.SMALLEST) / torch.finfo(parameter.dtype).max
    parameter.copy_(part / scale)
    network.get_submodule(name.rpartition(".")[0]).scale = scale


@torch.no_grad()
def initialize(network: Network, initial: float, seed: int, device: torch.device) -> None:
    """Initialize the weights, independent of the number of ranks.

    A full matrix is generated from a per-parameter seed; each rank copies its shard.
    """
    network.to_empty(device=device)
    for number, (name, parameter) in enumerate(network.named_parameters()):
        spread = initial_std(name, network.shape, initial)
        if not spread:
            local(parameter).fill_(1.0 if "norm" in name else 0.0)
            continue
        generator = torch.Generator(device).manual_seed(seed * SEED_STRIDE + number)
        values = torch.empty(parameter.shape, device=device).normal_(0.0, spread, generator=generator)
        keep(network, name, values[share(parameter)])
