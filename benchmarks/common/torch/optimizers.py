"""Which implementation of an optimizer to use: apex's fused one, PyTorch's fused one or the plain one.

All compute the same update. NGC's images carry apex, others do not: it is found by asking and never required,
and the fastest of what is there is found by a short measurement on tensors of the model's own shapes.
"""

import importlib
import inspect
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Sequence, Tuple

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import choices
from benchmarks.common.torch import kernels

IMPLEMENTATIONS = ("apex", "fused", "plain")
Build = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
Measure = Callable[[Build, Sequence[torch.nn.Parameter]], float]


def find_apex() -> Any:
    if not torch.cuda.is_available():
        return None
    try:
        # Its Python imports without the compiled part and fails at the first step.
        importlib.import_module("amp_C")
        return importlib.import_module("apex.optimizers")
    except ImportError:
        return None


def adam_candidates(
    learning_rate: float, betas: Tuple[float, float], epsilon: float, apex: Any, capturable: bool = False
) -> Dict[str, Build]:
    """Return Adam (Kingma and Ba 2015, algorithm 1, no weight decay) by the name of each implementation at hand.

    ``capturable`` keeps the step count on the GPU, as a CUDA graph needs it.
    """
    options: Dict[str, Any] = {"lr": learning_rate, "betas": tuple(betas), "eps": epsilon}
    if capturable:
        options["capturable"] = True
    found: Dict[str, Build] = {
        "plain": lambda parameters: torch.optim.Adam(parameters, foreach=True, **options),
        "fused": lambda parameters: torch.optim.Adam(parameters, fused=True, **options),
    }
    if apex is not None:
        found["apex"] = lambda parameters: apex.FusedAdam(parameters, adam_w_mode=False, weight_decay=0.0, **options)
    return found


def sgd_candidates(learning_rate: float, momentum: float, weight_decay: float, apex: Any) -> Dict[str, Build]:
    """Return SGD with momentum by the name of each implementation at hand: b <- m b + g + d w, w <- w - r b.

    A rate that is a tensor, as a CUDA graph reads it, is for the fused one alone.
    """
    options: Dict[str, Any] = {"lr": learning_rate, "momentum": momentum, "weight_decay": weight_decay}
    found: Dict[str, Build] = {"plain": lambda parameters: torch.optim.SGD(parameters, foreach=True, **options)}
    if "fused" in inspect.signature(torch.optim.SGD.__init__).parameters:  # since PyTorch 2.3
        found["fused"] = lambda parameters: torch.optim.SGD(parameters, fused=True, **options)
    if apex is not None:
        found["apex"] = lambda parameters: apex.FusedSGD(parameters, **options)
    return found


def choose(
    candidates: Dict[str, Build],
    parameters: Sequence[torch.nn.Parameter],
    wanted: str = "auto",
    measure: Optional[Measure] = None,
) -> Tuple[str, torch.optim.Optimizer]:
    """Return the name of the implementation that is used for ``parameters``, and the optimizer.

    ``wanted`` names one, or "auto" takes the fastest by ``measure`` (seconds of a step; default: on copies of
    the parameters, so that these need twice their memory and four times for Adam for a moment). Rank 0's
    measurement decides for all ranks, among what all of them have.
    """
    candidates = {name: candidates[name] for name in pytorch.everywhere(candidates, IMPLEMENTATIONS)}
    if wanted == "auto":
        timed = measure or seconds_of_step
        measures = {name: partial(timed, build, parameters) for name, build in candidates.items()}
        wanted, _ = kernels.fastest(measures, parameters[0].device)
    if wanted not in candidates:
        raise choices.UnavailableError(
            f"optimizer_kernel={wanted} is not here: use auto or one of {sorted(candidates)}"
        )
    choices.record("optimizer_kernel", wanted)
    return wanted, candidates[wanted](parameters)


def seconds_of_step(build: Build, parameters: Sequence[torch.nn.Parameter]) -> float:
    copies = [torch.nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters]
    for copy in copies:
        copy.grad = torch.full_like(copy, 1e-3)
    return kernels.seconds(build(copies).step)


# -- state in place: a captured graph holds these very tensors ----------------------------------------


@contextmanager
def unchanged(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put back what steps inside change but gradients, in place; where there was no state, it is a fresh one's."""
    present = (*network.state_dict().values(), *_tensors(optimizer.state_dict()).values())
    kept = [(tensor, tensor.clone()) for tensor in present]
    device = kept[0][0].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    reset(optimizer)
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)


@torch.no_grad()
def reset(optimizer: torch.optim.Optimizer) -> None:
    """Set the state to that of a fresh optimizer, in the same tensors."""
    for tensor in _tensors(optimizer.state_dict()).values():
        tensor.zero_()


@torch.no_grad()
def restore(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Give the optimizer a checkpoint's ``state_dict``, in the same tensors where it has a state already.

    ``load_state_dict`` puts new tensors in their place, which a graph captured before would never see.
    """
    held = _tensors(optimizer.state_dict())
    if not held:
        optimizer.load_state_dict(dict(saved))
        return
    new = _tensors(saved)
    if set(new) != set(held):
        raise ValueError(f"the checkpoint's optimizer has {sorted(new)[:4]} ..., this one {sorted(held)[:4]} ...")
    for key, tensor in held.items():
        tensor.copy_(new[key])


# Return the tensors that change from step to step in a ``state_dict``, which holds the tensors themselves.
def _tensors(content: Mapping[str, Any]) -> Dict[Tuple[str, int, str], torch.Tensor]:
    state = [(at, name, value) for at, each in content["state"].items() for name, value in each.items()]
    found = {("state", at, name): value for at, name, value in state if torch.is_tensor(value)}
    # apex counts the steps of a group, not of a parameter.
    for at, group in enumerate(content["param_groups"]):
        if torch.is_tensor(group.get("step")):
            found["group", at, "step"] = group["step"]
    return found
