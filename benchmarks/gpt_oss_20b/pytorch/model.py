"""The network of gpt-oss-20b with its optimizer on this rank."""

from typing import Any, Dict, Iterable, Mapping

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.gpt_oss_20b.pytorch.config import Config
from benchmarks.llama.pytorch import parallel, state
from benchmarks.llama.pytorch.network import How, Network


class Training:
    """This rank's part of the network and of AdamW's state, with the initial weights of the seed."""

    def __init__(self, config: Config, vocabulary: int, ranks: Ranks) -> None:
        self.config, self.ranks, self.vocabulary = config, ranks, vocabulary
        with torch.device("meta"):
            self.network = Network(config.shape(vocabulary), How(config.recompute, config.loss_rows))
        types = parallel.Types(pytorch.DTYPES[config.precision], pytorch.DTYPES[config.gradient_reduction])
        place = parallel.place_of(ranks, 1, 1)
        parallel.distribute(self.network, ranks, place, types, expert_parallelism=config.expert_parallelism)
        parallel.initialize(self.network, config.initial_weights, config.seed, ranks.context)
        self.parameters = dict(self.network.named_parameters())
        self.optimizer = state.adamw(self.parameters, config)

    def state_dict(self) -> Dict[str, Any]:
        return state.parts_of(self.parameters, self.optimizer)

    def restore(self, every_rank: Iterable[Mapping[str, Any]]) -> None:
        state.restore(self.parameters, self.optimizer, every_rank)

    def forget(self) -> None:
        state.forget(self.optimizer)
