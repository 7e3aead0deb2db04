"""LoRA on a frozen network (Hu et al. 2021, arXiv 2106.09685): of the attentions' first products and their last one.

The three products of an attention's input share one first matrix, as an adapter of a fused product has it. What an
adapter's input loses to dropout follows from the seed, the sample and the adapter alone: so it is the same whatever
ranks share the sample, after a resume, and where a layer is computed again in the backward pass.
"""

import json
import math
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from benchmarks.common.data.files import in_one_step
from benchmarks.llama import safetensors
from benchmarks.llama.pytorch.network import Network, linear
from benchmarks.llama.pytorch.parallel import SEED_STRIDE, local, share

ADAPTED = ("qkv_lora", "o_lora")
PREFIX = "base_model.model.model"  # of peft's names


class Rule(NamedTuple):
    """Of all adapters of a network."""

    rank: int
    alpha: float
    dropout: float
    seed: int  # of the first matrices and of what is dropped

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Dropout:
    """What the adapters' inputs lose of the samples that are computed at present; nothing of none."""

    def __init__(self, rule: Rule, tensor_rank: int) -> None:
        self.rule, self.tensor_rank = rule, tensor_rank
        self.samples: Sequence[int] = ()  # numbers of the samples within the run
        self.length = 0  # positions of a whole sample
        self.positions: Optional[torch.Tensor] = None  # of this rank, within the sample

    def of(self, hidden: torch.Tensor, adapter: int, width: int) -> torch.Tensor:
        """Return ``hidden`` (B, L, part of ``width``) with dropout; whole masks are drawn, of which a rank has a part.

        A rank whose inputs are split has as many neighbouring values of the ``width`` as the others.
        """
        if not self.samples or not self.rule.dropout:
            return hidden
        generator, size, masks = torch.Generator(hidden.device), hidden.shape[-1], []
        first = self.tensor_rank * size if size < width else 0
        for sample in self.samples:
            number = (self.rule.seed * SEED_STRIDE + sample) * SEED_STRIDE + adapter
            generator.manual_seed(number % (1 << 63))
            mask = torch.empty(self.length, width, dtype=torch.bool, device=hidden.device)
            mask.bernoulli_(1 - self.rule.dropout, generator=generator)
            masks.append(mask[self.positions, first : first + size])
        return hidden * torch.stack(masks) / (1 - self.rule.dropout)


class Lora(nn.Module):
    """An adapter of products with the same input: takes (B, L, before), returns (B, L, after) of each."""

    def __init__(self, in_features: int, after: Sequence[int], number: int, dropout: Dropout) -> None:
        super().__init__()
        self.before, self.number, self.dropout = in_features, number, dropout
        self.down = linear(in_features, dropout.rule.rank)
        self.up = nn.ModuleList(linear(dropout.rule.rank, width) for width in after)

    def forward(self, hidden: torch.Tensor) -> List[torch.Tensor]:
        # With tensor parallelism all ranks have the whole of it, or neighbouring values as a plain tensor.
        hidden = hidden.to_local() if isinstance(hidden, DTensor) else hidden
        reduced = self.down(self.dropout.of(hidden, self.number, self.before))
        # In rows of positions: DTensor splits the first axis of what it multiplies.
        rows = (reduced * self.dropout.rule.scale).flatten(0, 1)
        return [up(rows).unflatten(0, reduced.shape[:2]) for up in self.up]


def add(network: Network, rule: Rule, tensor_rank: int) -> Dropout:
    """Freeze a network, which is on no device yet, and give its attentions adapters in fp32."""
    network.requires_grad_(False)
    shape, dropout = network.shape, Dropout(rule, tensor_rank)
    keys = shape.width // shape.heads * shape.key_value_heads
    with torch.device("meta"):
        for number, layer in enumerate(network.layers):
            layer.self_attn.qkv_lora = Lora(shape.width, (shape.width, keys, keys), 2 * number, dropout)
            layer.self_attn.o_lora = Lora(shape.width, (shape.width,), 2 * number + 1, dropout)
    return dropout


def trained(network: Network) -> Dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def initialize(network: Network, seed: int) -> None:
    """Draw the first matrices as peft does, uniformly up to 1 / before ** 0.5; the second ones are 0.

    Each is drawn whole from a seed of its own, and the rank keeps its part.
    """
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
    """A Linear whose weight all ranks have, of inputs that all have (Replicate) or that are rows of theirs (Shard)."""

    def __init__(self, layout: Any) -> None:
        self.layout = layout

    def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
        def placed(_: Any, inputs: Any, mesh: Any) -> Any:
            return DTensor.from_local(inputs[0], mesh, [self.layout], run_check=False)

        return distribute_module(module, mesh, None, placed, lambda _, output, __: output.to_local())


def splits() -> Dict[str, ParallelStyle]:
    """Return how the adapters of a layer are split with its products: a rank's part adds to what it computes."""
    return {
        "self_attn.qkv_lora.down": Whole(Replicate()),
        "self_attn.qkv_lora.up.*": ColwiseParallel(),
        "self_attn.o_lora.down": RowwiseParallel(output_layouts=Shard(1)),
        "self_attn.o_lora.up.0": Whole(Shard(0)),
    }


# -- peft's files, and the weights with the adapters in them ---------------------------------------------


def by_layer(weights: Mapping[str, torch.Tensor]) -> Iterator[Tuple[int, str, torch.Tensor, List[torch.Tensor]]]:
    """Yield each adapter of whole ``weights`` by name: its layer, its name in there, and its matrices."""
    for name, down in weights.items():
        if name.endswith(".down.weight"):
            stem = name[: -len("down.weight")]
            ups = [weights[f"{stem}up.{number}.weight"] for number in range(3 if "qkv" in stem else 1)]
            yield int(stem.split(".")[1]), stem.split(".")[3], down, ups


def merged(base: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], scale: float) -> Dict[str, Any]:
    """Return the weights of a network whose products have the adapters' in them."""
    merged_weights = dict(base)
    for layer, kind, down, ups in by_layer(weights):
        for product, up in zip("qkv" if kind == "qkv_lora" else "o", ups):
            name = f"layers.{layer}.self_attn.{product}_proj.weight"
            merged_weights[name] = merged_weights[name] + scale * (up @ down)
    return merged_weights


def save(folder: Path, weights: Mapping[str, torch.Tensor], rule: Rule, fused: bool, base: str) -> None:
    """Write adapters as peft reads them: of the fused product, or of the three of Hugging Face's Llama."""
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
