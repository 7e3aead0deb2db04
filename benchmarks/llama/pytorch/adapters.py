"""LoRA adapters of the attention projections on a frozen network (Hu et al. 2021, arXiv 2106.09685).

Q, K and V share the down projection, as with a fused QKV projection. The dropout mask depends only on the seed, the
sample and the adapter: it is independent of the number of ranks, and the same after a resume and in recomputation.
"""

import json
import math
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from benchmarks.common.data.files import in_one_step
from benchmarks.llama import safetensors
from benchmarks.llama.pytorch.network import Attention, Network, linear
from benchmarks.llama.pytorch.parallel import SEED_STRIDE, local, share

PREFIX = "base_model.model.model"  # of peft's names


class Rule(NamedTuple):
    """Hyperparameters of the adapters."""

    rank: int
    alpha: float
    dropout: float
    seed: int  # seed of the down projections and of dropout

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def _hash(bits: torch.Tensor) -> torch.Tensor:
    """Return MurmurHash3's finalizer (fmix32) of int32 values; int32 products wrap around."""
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * -0x7A143595  # 0x85EBCA6B
    bits = (bits ^ (bits >> 13 & 0x7FFFF)) * -0x3D4D51CB  # 0xC2B2AE35
    return bits ^ (bits >> 16 & 0xFFFF)


def dropout_mask(
    samples: torch.Tensor,
    adapter: torch.Tensor,
    positions: torch.Tensor,
    features: torch.Tensor,
    seed: int,
    keep: float,
) -> torch.Tensor:
    """Return bool masks (B, L, F), True with probability ``keep``: a hash of seed, sample, adapter, position, feature.

    Unlike with a generator, a rank computes only its part, and torch.compile fuses the mask with the product.

    Args:
        samples: int64 (B,), numbers of the samples within the run.
        adapter: int64 (), a tensor because layers share a compiled graph, of which an integer would be a constant.
        positions: int64 (L,), positions in a sample.
        features: int64 (F,), features of the adapter's input.
        seed: of the run.
        keep: 0 to 1.
    """
    key = _hash(adapter.int() + 1)
    for word in (seed, seed >> 32):
        key = _hash(key ^ (word + (1 << 31)) % (1 << 32) - (1 << 31))
    rows = _hash(_hash(key ^ samples.int())[:, None] ^ positions.int())
    # The golden ratio spreads neighbouring features over all bits.
    bits = _hash(rows[..., None] ^ features.int() * -0x61C88647)
    return (bits & 0x7FFFFFFF) < round(keep * (1 << 31))


NO_SAMPLES = torch.empty(0, dtype=torch.int64)


class Dropout:
    """Dropout of the adapters' inputs for the current samples; disabled without samples."""

    def __init__(self, rule: Rule, tensor_rank: int) -> None:
        self.rule, self.tensor_rank = rule, tensor_rank
        self.samples = NO_SAMPLES  # numbers of the samples within the run, int64
        self.positions: Any = None  # this rank's positions within the sample, int64

    def of(self, hidden: torch.Tensor, adapter: torch.Tensor, width: int) -> torch.Tensor:
        """Apply dropout to ``hidden`` (B, L, part of ``width``)."""
        if not len(self.samples) or not self.rule.dropout:
            return hidden
        size, keep = hidden.shape[-1], 1 - self.rule.dropout
        first = self.tensor_rank * size if size < width else 0
        features = torch.arange(first, first + size, device=hidden.device)
        return hidden * dropout_mask(self.samples, adapter, self.positions, features, self.rule.seed, keep) / keep


class Lora(nn.Module):
    """Adapter of projections with the same input: (B, L, in_features) to a list of (B, L, out_features)."""

    def __init__(self, in_features: int, out_features: Sequence[int], number: int, dropout: Dropout) -> None:
        super().__init__()
        self.before, self.dropout = in_features, dropout
        self.number = torch.tensor(number, device="cpu")
        self.down = linear(in_features, dropout.rule.rank)
        self.up = nn.ModuleList(linear(dropout.rule.rank, width) for width in out_features)

    def forward(self, hidden: torch.Tensor) -> List[torch.Tensor]:
        # With tensor parallelism, the input is replicated, or a plain tensor with this rank's features.
        hidden = hidden.to_local() if isinstance(hidden, DTensor) else hidden
        reduced = self.down(self.dropout.of(hidden, self.number, self.before))
        # Flatten to (positions, features): DTensor shards the first dimension.
        rows = (reduced * self.dropout.rule.scale).flatten(0, 1)
        return [up(rows).unflatten(0, reduced.shape[:2]) for up in self.up]


class AdaptedAttention(Attention):
    """Attention with the projections of ``base`` and their adapters."""

    def __init__(self, base: Attention, qkv_lora: Lora, o_lora: Lora) -> None:
        nn.Module.__init__(self)
        self.size, self.attend, self.sinks = base.size, base.attend, base.sinks
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = base.q_proj, base.k_proj, base.v_proj, base.o_proj
        self.q_norm, self.k_norm = base.q_norm, base.k_norm
        self.qkv_lora, self.o_lora = qkv_lora, o_lora

    def qkv(self, hidden: torch.Tensor) -> List[torch.Tensor]:
        return [x + update for x, update in zip(super().qkv(hidden), self.qkv_lora(hidden))]

    def output(self, attn_out: torch.Tensor) -> torch.Tensor:
        return super().output(attn_out) + self.o_lora(attn_out)[0]


def add(network: Network, rule: Rule, tensor_rank: int) -> Dropout:
    """Freeze a network on the meta device and add fp32 adapters to its attention modules."""
    network.requires_grad_(False)
    shape, dropout = network.shape, Dropout(rule, tensor_rank)
    keys = shape.width // shape.heads * shape.key_value_heads
    with torch.device("meta"):
        for number, layer in enumerate(network.layers):
            qkv_lora = Lora(shape.width, (shape.width, keys, keys), 2 * number, dropout)
            o_lora = Lora(shape.width, (shape.width,), 2 * number + 1, dropout)
            layer.self_attn = AdaptedAttention(layer.self_attn, qkv_lora, o_lora)
    return dropout


def trained(network: Network) -> Dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def initialize(network: Network, seed: int) -> None:
    """Initialize the down projections as peft does, uniform in +-1 / in_features ** 0.5, and the up projections to 0.

    A full matrix is generated from a per-adapter seed; each rank copies its shard. The adapters' numbers move to the
    device of the weights.
    """
    for module in network.modules():
        if isinstance(module, Lora):
            module.number = module.number.to(local(module.down.weight).device)
    for number, (name, parameter) in enumerate(trained(network).items()):
        local_part = local(parameter)
        if ".up." in name:
            local_part.zero_()
            continue
        generator = torch.Generator(local_part.device).manual_seed(seed * SEED_STRIDE + number)
        bound = 1 / math.sqrt(parameter.shape[1])
        full = torch.empty(parameter.shape, device=local_part.device).uniform_(-bound, bound, generator=generator)
        local_part.copy_(full[share(parameter)])


# -- tensor parallelism --------------------------------------------------------------------------------


class Whole(ParallelStyle):
    """Linear with a replicated weight. Inputs are replicated (Replicate) or sharded by rows (Shard)."""

    def __init__(self, layout: Any) -> None:
        self.layout = layout

    def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
        def placed(_: Any, inputs: Any, mesh: Any) -> Any:
            return DTensor.from_local(inputs[0], mesh, [self.layout], run_check=False)

        return distribute_module(module, mesh, None, placed, lambda _, output, __: output.to_local())


def splits() -> Dict[str, ParallelStyle]:
    """Return the adapters' tensor-parallel plan: their sharded outputs are added to the projections' outputs."""
    return {
        "self_attn.qkv_lora.down": Whole(Replicate()),
        "self_attn.qkv_lora.up.*": ColwiseParallel(),
        "self_attn.o_lora.down": RowwiseParallel(output_layouts=Shard(1)),
        "self_attn.o_lora.up.0": Whole(Shard(0)),
    }


# -- peft files, and merged weights ----------------------------------------------------------------------


def by_layer(weights: Mapping[str, torch.Tensor]) -> Iterator[Tuple[int, str, torch.Tensor, List[torch.Tensor]]]:
    """Yield layer, adapter name, down projection and up projections from full ``weights``."""
    for name, down in weights.items():
        if name.endswith(".down.weight"):
            stem = name[: -len("down.weight")]
            ups = [weights[f"{stem}up.{number}.weight"] for number in range(3 if "qkv" in stem else 1)]
            yield int(stem.split(".")[1]), stem.split(".")[3], down, ups


def merged(base: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], scale: float) -> Dict[str, Any]:
    """Return the base weights with the adapters merged."""
    merged_weights = dict(base)
    for layer, kind, down, ups in by_layer(weights):
        for product, up in zip("qkv" if kind == "qkv_lora" else "o", ups):
            name = f"layers.{layer}.self_attn.{product}_proj.weight"
            merged_weights[name] = merged_weights[name] + scale * (up @ down)
    return merged_weights


def save(folder: Path, weights: Mapping[str, torch.Tensor], rule: Rule, fused: bool, base: str) -> None:
    """Write adapters in peft's format, for the fused QKV projection or for Hugging Face's Llama."""
    folder.mkdir(exist_ok=True)
    tensors: Dict[str, torch.Tensor] = {}
    for layer, kind, down, ups in by_layer(weights):
        products = "o" if kind == "o_lora" else "qkv"
        parts = [("qkv", torch.cat(ups))] if products == "qkv" and fused else list(zip(products, ups))
        for product, up in parts:
            stem = f"{PREFIX}.layers.{layer}.self_attn.{product}_proj"
            tensors.update({f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up})
    safetensors.write(folder / "adapter_model.safetensors", {name: tensor.numpy() for name, tensor in tensors.items()})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rule.rank,
        "lora_alpha": rule.alpha,
        "lora_dropout": rule.dropout,
        "bias": "none",
        "target_modules": sorted({name.split(".")[6] for name in tensors}),
        "inference_mode": True,
    }
    with in_one_step(folder / "adapter_config.json") as file:
        file.write(json.dumps(config, indent=2).encode())
