"""Optimizer selection: apex (fused), PyTorch fused, or plain.

All compute the same update. NGC images contain apex, others do not: it is optional, and the fastest available
implementation is selected by a short measurement with the tensor shapes of the model.
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
        # apex imports without its CUDA extension, but fails in the first step.
        importlib.import_module("amp_C")
        return importlib.import_module("apex.optimizers")
    except ImportError:
        return None


def adam_candidates(
    learning_rate: float, betas: Tuple[float, float], epsilon: float, apex: Any, capturable: bool = False
) -> Dict[str, Build]:
    """Return the available implementations of Adam by name (Kingma and Ba 2015, algorithm 1, no weight decay).

    ``capturable``: keep the step count on the GPU, as CUDA graphs require.
    """
    options: Dict[str, Any] = {"lr": learning_rate, "betas": tuple(betas), "eps": epsilon}
    if capturable:
        options["capturable"] = True
    builders: Dict[str, Build] = {
        "plain": lambda parameters: torch.optim.Adam(parameters, foreach=True, **options),
        "fused": lambda parameters: torch.optim.Adam(parameters, fused=True, **options),
    }
    if apex is not None:
        builders["apex"] = lambda parameters: apex.FusedAdam(parameters, adam_w_mode=False, weight_decay=0.0, **options)
    return builders


def sgd_candidates(learning_rate: float, momentum: float, weight_decay: float, apex: Any) -> Dict[str, Build]:
    """Return the available implementations of SGD with momentum by name: b <- m b + g + d w, w <- w - r b.

    Only "fused" accepts a tensor learning rate, as CUDA graphs need.
    """
    options: Dict[str, Any] = {"lr": learning_rate, "momentum": momentum, "weight_decay": weight_decay}
    builders: Dict[str, Build] = {"plain": lambda parameters: torch.optim.SGD(parameters, foreach=True, **options)}
    if "fused" in inspect.signature(torch.optim.SGD.__init__).parameters:  # since PyTorch 2.3
        builders["fused"] = lambda parameters: torch.optim.SGD(parameters, fused=True, **options)
    if apex is not None:
        builders["apex"] = lambda parameters: apex.FusedSGD(parameters, **options)
    return builders


def choose(
    candidates: Dict[str, Build],
    parameters: Sequence[torch.nn.Parameter],
    setting: str = "auto",
    measure: Optional[Measure] = None,
) -> Tuple[str, torch.optim.Optimizer]:
    """Return the name of the selected implementation for ``parameters``, and the optimizer.

    ``setting``: a name, or "auto" for the fastest by ``measure`` (seconds per step; default: on copies of the
    parameters, which temporarily needs twice their memory, and four times for Adam). The measurement of rank 0
    decides, among the implementations that all ranks have.
    """
    candidates = {name: candidates[name] for name in pytorch.everywhere(candidates, IMPLEMENTATIONS)}
    if setting == "auto":
        timed = measure or seconds_of_step
        measures = {name: partial(timed, build, parameters) for name, build in candidates.items()}
        setting, _ = kernels.fastest(measures, parameters[0].device)
    if setting not in candidates:
        raise choices.UnavailableError(
            f"optimizer_kernel={setting} is not available: use auto or one of {sorted(candidates)}"
        )
    choices.record("optimizer_kernel", setting)
    return setting, candidates[setting](parameters)


def seconds_of_step(build: Build, parameters: Sequence[torch.nn.Parameter]) -> float:
    copies = [torch.nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters]
    for copy in copies:
        copy.grad = torch.full_like(copy, 1e-3)
    return kernels.seconds(build(copies).step)


# -- in-place state: CUDA graphs refer to these tensors -----------------------------------------------


@contextmanager
def unchanged(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore parameters and optimizer state on exit, in place; gradients are not restored. Missing state is reset."""
    present = (*network.state_dict().values(), *_tensors(optimizer.state_dict()).values())
    copies = [(tensor, tensor.clone()) for tensor in present]
    device = copies[0][0].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    reset(optimizer)
    with torch.no_grad():
        for tensor, value in copies:
            tensor.copy_(value)


@torch.no_grad()
def reset(optimizer: torch.optim.Optimizer) -> None:
    """Reset the state as in a new optimizer, in place."""
    for tensor in _tensors(optimizer.state_dict()).values():
        tensor.zero_()


@torch.no_grad()
def restore(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a checkpoint's ``state_dict``, in place if the optimizer already has state.

    ``load_state_dict`` would replace the tensors, unnoticed by an earlier CUDA graph.
    """
    current = _tensors(optimizer.state_dict())
    if not current:
        optimizer.load_state_dict(dict(saved))
        return
    new = _tensors(saved)
    if set(new) != set(current):
        raise ValueError(f"the checkpoint's optimizer has {sorted(new)[:4]} ..., this one {sorted(current)[:4]} ...")
    for key, tensor in current.items():
        tensor.copy_(new[key])


# Return the ``state_dict`` tensors that change in each step; they are not copied.
def _tensors(content: Mapping[str, Any]) -> Dict[Tuple[str, int, str], torch.Tensor]:
    state = [(index, name, value) for index, values in content["state"].items() for name, value in values.items()]
    tensors = {("state", index, name): value for index, name, value in state if torch.is_tensor(value)}
    # apex counts steps per group, not per parameter.
    for index, group in enumerate(content["param_groups"]):
        if torch.is_tensor(group.get("step")):
            tensors["group", index, "step"] = group["step"]
    return tensors
