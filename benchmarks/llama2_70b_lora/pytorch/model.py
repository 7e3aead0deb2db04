"""Network, adapters and optimizer of Llama 2 70B LoRA on this rank."""

from pathlib import Path
from typing import Mapping, Optional, Tuple

import numpy as np
import torch

from benchmarks.common.data.problem import Problem
from benchmarks.common.run.ranks import Ranks
from benchmarks.llama.pytorch import adapters, fp8, parallel, state
from benchmarks.llama.pytorch.network import Network, hf_name
from benchmarks.llama.safetensors import Stored, tensors_of
from benchmarks.llama2_70b_lora.pytorch.config import Config


def rule_of(config: Config) -> adapters.Rule:
    return adapters.Rule(config.lora_rank, config.lora_alpha, config.lora_dropout, config.seed)


FUSED = "qkv_proj.weight"  # MLPerf's Llama 2 70B has the rows of queries, keys and values in one


@torch.no_grad()
def set_base(network: Network, config: Config, base: Optional[Path], device: torch.device) -> bool:
    """Load a network's frozen weights, of which each rank reads its shards, or initialize them if ``base`` is None.

    Returns whether the rows of queries, keys and values are in one tensor.

    Raises:
        Problem: a tensor is missing or has a different shape; raised on all ranks.
    """
    if base is None:
        parallel.initialize(network, config.initial_weights, config.seed, device)
        return True
    network.to_empty(device=device)
    stored = tensors_of(base)
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            continue
        tensor_name, first, shape = locate_tensor(name, network, stored)
        tensor = stored.get(tensor_name)
        if tensor is None or tensor.shape != shape:
            there = f"{tensor_name} of {tensor.shape} in {tensor.path.name}" if tensor else f"no {tensor_name}"
            hint = "use the weights of the configured network, or set its sizes"
            raise Problem(f"{base}: {there}", f"{tensor_name} of {shape}", hint)
        rows, *other_dims = parallel.share(parameter)
        part = tensor.values[(slice(first + rows.start, first + rows.stop), *other_dims)]
        bits = tensor.kind == "BF16"
        values = torch.from_numpy(part.astype("<i2") if bits else np.array(part))
        parallel.keep(network, name, values.view(torch.bfloat16) if bits else values)
    return any(name.endswith(FUSED) for name in stored)


def locate_tensor(name: str, network: Network, stored: Mapping[str, Stored]) -> Tuple[str, int, Tuple[int, ...]]:
    """Return a parameter's tensor name, first row and expected shape in the files."""
    published, full_shape = hf_name(name), network.get_parameter(name).shape
    product = next((letter for letter in "qkv" if published.endswith(f"self_attn.{letter}_proj.weight")), "")
    fused = f"{published[: -len('q_proj.weight')]}{FUSED}" if product else ""
    if fused not in stored:
        return published, 0, tuple(full_shape)
    shape = network.shape
    first = {"q": 0, "k": shape.queries, "v": shape.queries + shape.keys}[product]
    return fused, first, (shape.queries + 2 * shape.keys, shape.width)


class Training(state.Sharded):
    """This rank's shards of the frozen network, the adapters and AdamW's state."""

    def __init__(self, config: Config, vocabulary: int, ranks: Ranks, base: Optional[Path]) -> None:
        """Load this rank's shards of the base, or initialize them from the seed if ``base`` is None.

        Raises:
            Problem: the weights do not match the network.
        """
        self.config, self.ranks, self.vocabulary, self.base = config, ranks, vocabulary, base
        self.position = parallel.mesh_position(config, ranks)
        policy = parallel.policy_of(config)
        attend = parallel.select_attention(config, ranks, self.position)
        with torch.device("meta"):
            self.network = Network(config.shape(vocabulary), config.recomputed_layers, config.loss_rows, attend)
        self.network.to(policy.param_dtype)
        if config.fp8 != "none":
            fp8.set_up(self.network, config.fp8, ranks, frozen=True)
        self.dropout = adapters.add(self.network, rule_of(config), ranks.rank % self.position.tensor)
        parallel.distribute(self.network, ranks, self.position, policy, config.compile, adapters.splits())
        self.fused = set_base(self.network, config, base, ranks.context)
        adapters.initialize(self.network, config.seed)
        self.parameters = adapters.trained(self.network)
        self.optimizer = state.adamw(self.parameters, config)

    def save_adapters(self, folder: Path) -> None:
        """Write the adapters by peft's names; all ranks call this together."""
        full = {name: parallel.full_tensor(parameter.detach()).cpu() for name, parameter in self.parameters.items()}
        if self.ranks.rank == 0:
            adapters.save(folder, full, rule_of(self.config), self.fused, str(self.base or ""))
