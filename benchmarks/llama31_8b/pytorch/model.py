"""Llama 3.1 8B's sizes, and the network with its optimizer on this rank."""

from typing import Any, Dict, Iterable, List, Mapping, Sequence

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.llama.pytorch import fp8, parallel
from benchmarks.llama.pytorch.network import How, Network, Scaling, Shape
from benchmarks.llama31_8b.pytorch.config import Config

MOMENTS = ("exp_avg", "exp_avg_sq")


def shape_of(config: Config, vocabulary: int) -> Shape:
    scaling = Scaling(config.rope_factor, config.rope_low_frequency, config.rope_high_frequency, config.rope_context)
    return Shape(
        vocabulary,
        config.layers,
        config.width,
        config.heads,
        config.key_value_heads,
        config.inner_width,
        config.rope_base,
        scaling,
        config.norm_epsilon,
    )


class Training:
    """This rank's part of the network and of AdamW's state, with the initial weights of the seed."""

    def __init__(self, config: Config, vocabulary: int, ranks: Ranks) -> None:
        self.config, self.ranks, self.vocabulary = config, ranks, vocabulary
        self.place = parallel.place_of(ranks, config.tensor_parallelism, config.context_parallelism)
        with torch.device("meta"):
            self.network = Network(shape_of(config, vocabulary), How(config.recompute, config.loss_rows))
        if config.fp8 != "none":
            fp8.set_up(self.network, config.fp8, ranks.context)
        types = parallel.Types(pytorch.DTYPES[config.precision], pytorch.DTYPES[config.gradient_reduction])
        parallel.distribute(self.network, ranks, self.place, types, config.compile)
        parallel.initialize(self.network, config.initial_weights, config.seed, ranks.context)
        self.parameters = dict(self.network.named_parameters())
        self.optimizer = adamw(self.parameters, config)

    def state_dict(self) -> Dict[str, Any]:
        """Return this rank's part of the weights and of AdamW's state, each with its place in the whole."""
        found: Dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state[parameter]
            found[name] = {
                "begins": [part.start for part in parallel.share(parameter)],
                "shape": list(parameter.shape),
                "weights": parallel.local(parameter.detach()),
                "step": state["step"],
                **{key: parallel.local(state[key]) for key in MOMENTS},
            }
        return {"parts": found}

    @torch.no_grad()
    def restore(self, every_rank: Iterable[Mapping[str, Any]]) -> None:
        """Take this rank's part of what the ranks of a checkpoint wrote, however they were split."""
        for saved in every_rank:
            for name, parameter in self.parameters.items():
                state, part = self.optimizer.state[parameter], saved["parts"][name]
                state["step"].copy_(part["step"])
                for tensor, key in ((parameter, "weights"), *((state[key], key) for key in MOMENTS)):
                    parallel.fill(tensor, part["begins"], part[key])

    @torch.no_grad()
    def forget(self) -> None:
        """Set AdamW's state to that of no step, in place."""
        for state in self.optimizer.state.values():
            for values in state.values():
                parallel.local(values).zero_()


def joined(parts: Sequence[Mapping[str, Any]]) -> Dict[str, torch.Tensor]:
    """Return the whole weights by their names, from the parts of all ranks of a checkpoint."""
    found: Dict[str, torch.Tensor] = {}
    for part in parts:
        for name, each in part.items():
            whole = found.setdefault(name, torch.empty(each["shape"]))
            place = tuple(slice(begin, begin + size) for begin, size in zip(each["begins"], each["weights"].shape))
            whole[place] = each["weights"]
    return found


def adamw(parameters: Mapping[str, torch.nn.Parameter], config: Config) -> torch.optim.AdamW:
    """Return AdamW with its state there from the start, so that a checkpoint can be read into it.

    The norms do not decay, as no parameter of one dimension does in Megatron (_get_param_groups).
    """
    groups: List[Dict[str, Any]] = [
        {"params": [each for each in parameters.values() if (each.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    rule = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.epsilon}
    made = torch.optim.AdamW(groups, fused=True, **rule)
    for each in parameters.values():
        step = torch.zeros((), device=each.device)
        made.state[each] = {"step": step, **{key: torch.zeros_like(each.detach()) for key in MOMENTS}}
    return made
