"""What is trained on this rank: the optimizer, and a checkpoint's parts, which any number of ranks reads again."""

from typing import Any, Dict, Iterable, List, Mapping, Sequence

import torch

from benchmarks.llama.pytorch import parallel

MOMENTS = ("exp_avg", "exp_avg_sq")
Parameters = Mapping[str, torch.nn.Parameter]  # those that are trained, by name


def adamw(parameters: Parameters, config: Any) -> torch.optim.AdamW:
    """Return AdamW with its state there from the start, so that a checkpoint can be read into it.

    The norms do not decay, as no parameter of one dimension does in Megatron (_get_param_groups).
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


def parts_of(parameters: Parameters, optimizer: torch.optim.Optimizer) -> Dict[str, Any]:
    """Return this rank's part of the weights and of AdamW's state, each with its place in the whole."""
    parts: Dict[str, Any] = {}
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        parts[name] = {
            "begins": [part.start for part in parallel.share(parameter)],
            "shape": list(parameter.shape),
            "weights": parallel.local(parameter.detach()),
            "step": state["step"],
            **{key: parallel.local(state[key]) for key in MOMENTS},
        }
    return {"parts": parts}


@torch.no_grad()
def restore(parameters: Parameters, optimizer: torch.optim.Optimizer, every_rank: Iterable[Mapping[str, Any]]) -> None:
    """Take this rank's part of what the ranks of a checkpoint wrote, however they were split."""
    for saved in every_rank:
        for name, parameter in parameters.items():
            state, part = optimizer.state[parameter], saved["parts"][name]
            state["step"].copy_(part["step"])
            for tensor, key in ((parameter, "weights"), *((state[key], key) for key in MOMENTS)):
                parallel.fill(tensor, part["begins"], part[key])


@torch.no_grad()
def forget(optimizer: torch.optim.Optimizer) -> None:
    """Set AdamW's state to that of no step, in place."""
    for state in optimizer.state.values():
        for values in state.values():
            parallel.local(values).zero_()


def joined(parts: Sequence[Mapping[str, Any]]) -> Dict[str, torch.Tensor]:
    """Return the whole weights by their names, from the parts of all ranks of a checkpoint."""
    tensors: Dict[str, torch.Tensor] = {}
    for part in parts:
        for name, saved in part.items():
            full = tensors.setdefault(name, torch.empty(saved["shape"]))
            index = tuple(slice(start, start + size) for start, size in zip(saved["begins"], saved["weights"].shape))
            full[index] = saved["weights"]
    return tensors
