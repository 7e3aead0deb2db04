"""Adam with decoupled weight decay and without the correction of the bias, as run_squad.py has it."""

from typing import Any, Dict, List, Sequence

import torch

from benchmarks.bert_squad.pytorch.config import Config
from benchmarks.common.torch.optimizers import Build

MANY_STEPS = 1e6  # steps after which 1 - beta ** steps is 1 in fp32, for any beta that is used


def adam_candidates(config: Config, decayed: int, apex: Any) -> Dict[str, Build]:
    """Return the available implementations of Adam without bias correction, by name.

    Same as apex's FusedAdam in run_squad.py with bias_correction=False: with the moments m and v, w <- w - rate (m /
    (sqrt(v) + epsilon) + decay w). PyTorch always corrects by 1 - beta ** steps: ``without_correction`` starts with
    a number of steps for which this is 1. Weight decay applies to the first ``decayed`` elements of the only
    parameter.
    """
    options: Dict[str, Any] = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.epsilon}

    def groups(parameters: Sequence[torch.nn.Parameter]) -> List[Dict[str, Any]]:
        (flat,) = parameters
        parameter_groups = []
        for part, decay in ((slice(decayed), config.weight_decay), (slice(decayed, None), 0.0)):
            parameter = torch.nn.Parameter(flat.detach()[part])
            parameter.grad = flat.grad[part] if flat.grad is not None else None
            parameter_groups.append({"params": [parameter], "weight_decay": decay})
        return parameter_groups

    builds: Dict[str, Build] = {
        "plain": lambda parameters: torch.optim.AdamW(groups(parameters), foreach=True, **options),
        "fused": lambda parameters: torch.optim.AdamW(groups(parameters), fused=True, **options),
    }
    if apex is not None:
        builds["apex"] = lambda parameters: apex.FusedAdam(groups(parameters), bias_correction=False, **options)
    return builds


def without_correction(optimizer: torch.optim.Optimizer) -> None:
    # Initialize the moments with 0 and PyTorch's step count so that its correction is 1; apex needs neither.
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state, on_device = optimizer.state[parameter], bool(group.get("fused"))
            if not state:
                device = parameter.device if on_device else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["step"].fill_(MANY_STEPS)
