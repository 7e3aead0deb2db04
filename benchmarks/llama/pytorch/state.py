"""Optimizer and sharded checkpoints. A checkpoint can be loaded on any number of ranks."""

from typing import Any, Dict, Iterable, List, Mapping

import torch

from benchmarks.llama.pytorch import parallel

MOMENTS = ("exp_avg", "exp_avg_sq")
Parameters = Mapping[str, torch.nn.Parameter]  # trainable parameters by name


def adamw(parameters: Parameters, config: Any) -> torch.optim.AdamW:
    """Return AdamW with initialized state, so that a checkpoint can be loaded into it.

    No weight decay for norms, as for all one-dimensional parameters in Megatron (_get_param_groups).
    """
    groups: List[Dict[str, Any]] = [
        {"params": group, "weight_decay": decay}
        for decays, decay in ((True, config.weight_decay), (False, 0.0))
        for group in parallel.by_mesh(parameter for parameter in parameters.values() if (parameter.ndim > 1) == decays)
    ]
    rule = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.epsilon}
    optimizer = torch.optim.AdamW(groups, fused=True, **rule)
    for parameter in parameters.values():
        step = torch.zeros((), device=parameter.device)
        optimizer.state[parameter] = {"step": step, **{key: torch.zeros_like(parameter.detach()) for key in MOMENTS}}
    return optimizer


class Sharded:
    """Trained weights of a network and AdamW, sharded over ranks."""

    parameters: Parameters
    optimizer: torch.optim.AdamW

    def state_dict(self) -> Dict[str, Any]:
        """Return this rank's shards of weights and AdamW state, with their offsets in the full tensors."""
        parts: Dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state[parameter]
            parts[name] = {
                "begins": [part.start for part in parallel.share(parameter)],
                "shape": list(parameter.shape),
                "weights": parallel.local(parameter.detach()),
                "step": state["step"],
                **{key: parallel.local(state[key]) for key in MOMENTS},
            }
        return {"parts": parts}

    @torch.no_grad()
    def restore(self, every_rank: Iterable[Mapping[str, Any]]) -> None:
        """Load this rank's shards from the shards of all ranks in a checkpoint; the sharding may differ."""
        for saved in every_rank:
            for name, parameter in self.parameters.items():
                state, part = self.optimizer.state[parameter], saved["parts"][name]
                state["step"].copy_(part["step"])
                for tensor, key in ((parameter, "weights"), *((state[key], key) for key in MOMENTS)):
                    parallel.fill(tensor, part["begins"], part[key])

    @torch.no_grad()
    def forget(self) -> None:
        # Reset AdamW's state in place.
        for state in self.optimizer.state.values():
            for values in state.values():
                parallel.local(values).zero_()


def joined(saved: Mapping[str, Any]) -> Dict[str, torch.Tensor]:
    """Return the full weights by name from the shards of all ranks in a checkpoint."""
    tensors: Dict[str, torch.Tensor] = {}
    for shards in (saved[rank]["parts"] for rank in saved if rank.startswith("rank_")):
        for name, part in shards.items():
            full = tensors.setdefault(name, torch.empty(part["shape"]))
            index = tuple(slice(start, start + size) for start, size in zip(part["begins"], part["weights"].shape))
            full[index] = part["weights"]
    return tensors
