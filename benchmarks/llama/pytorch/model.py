"""Network and optimizer of Llama 3.1 8B and gpt-oss-20b on this rank."""

from typing import Any

import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.llama.pytorch import fp8, parallel, state
from benchmarks.llama.pytorch.network import Network


class Training(state.Sharded):
    """This rank's part of the network and of AdamW's state, with the initial weights of the seed."""

    def __init__(self, config: Any, vocabulary: int, ranks: Ranks) -> None:
        self.config, self.ranks, self.vocabulary = config, ranks, vocabulary
        self.position = parallel.mesh_position(config, ranks)
        attend = parallel.select_attention(config, ranks, self.position)
        with torch.device("meta"):
            self.network = Network(config.shape(vocabulary), config.recomputed_layers, config.loss_rows, attend)
        if config.fp8 != "none":
            fp8.set_up(self.network, config.fp8, ranks)
        policy, experts = parallel.policy_of(config), config.expert_parallelism
        parallel.distribute(self.network, ranks, self.position, policy, config.compile, expert_parallelism=experts)
        parallel.initialize(self.network, config.initial_weights, config.seed, ranks.context)
        self.parameters = dict(self.network.named_parameters())
        self.optimizer = state.adamw(self.parameters, config)
