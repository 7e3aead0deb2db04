"""Network, adapters and optimizer of Llama 2 70B LoRA on this rank."""

from pathlib import Path
from typing import Any, Dict, Iterable, Mapping, Optional

import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.llama.pytorch import adapters, fp8, parallel, state, weights
from benchmarks.llama.pytorch.network import ComputeOptions, Network
from benchmarks.llama.safetensors import tensors_of
from benchmarks.llama2_70b_lora.pytorch.config import Config


def rule_of(config: Config) -> adapters.Rule:
    return adapters.Rule(config.lora_rank, config.lora_alpha, config.lora_dropout, config.seed)


class Training:
    """This rank's shards of the frozen network, the adapters and AdamW's state."""

    def __init__(self, config: Config, vocabulary: int, ranks: Ranks, base: Optional[Path]) -> None:
        """Load this rank's shards of the base, or initialize them from the seed if ``base`` is None.

        Raises:
            Problem: the weights do not match the network.
        """
        self.config, self.ranks, self.vocabulary, self.base = config, ranks, vocabulary, base
        self.position = parallel.mesh_position_of(ranks, config.tensor_parallelism, config.context_parallelism)
        policy = parallel.policy_of(config)
        stored = tensors_of(base) if base else {}
        attend = parallel.select_attention(config, ranks, self.position)
        with torch.device("meta"):
            self.network = Network(config.shape(vocabulary), ComputeOptions.of(config), attend)
        self.network.to(policy.param_dtype)
        if config.fp8 != "none":
            fp8.set_up(self.network, config.fp8, ranks, frozen=True)
        self.dropout = adapters.add(self.network, rule_of(config), ranks.rank % self.position.tensor)
        parallel.distribute(self.network, ranks, self.position, policy, config.compile, adapters.splits())
        if base:
            self.network.to_empty(device=ranks.context)
            weights.fill(self.network, stored)
        else:
            parallel.initialize(self.network, config.initial_weights, config.seed, ranks.context)
        adapters.initialize(self.network, config.seed)
        self.fused = not base or any(name.endswith(weights.FUSED) for name in stored)
        self.adapters = adapters.trained(self.network)
        self.optimizer = state.adamw(self.adapters, config)

    def state_dict(self) -> Dict[str, Any]:
        return state.parts_of(self.adapters, self.optimizer)

    def restore(self, every_rank: Iterable[Mapping[str, Any]]) -> None:
        state.restore(self.adapters, self.optimizer, every_rank)

    def forget(self) -> None:
        state.forget(self.optimizer)

    def save_adapters(self, folder: Path) -> None:
        """Write the adapters by peft's names; all ranks call this together."""
        full = {name: parallel.full_tensor(parameter.detach()).cpu() for name, parameter in self.adapters.items()}
        if self.ranks.rank == 0:
            adapters.save(folder, full, rule_of(self.config), self.fused, str(self.base or ""))
