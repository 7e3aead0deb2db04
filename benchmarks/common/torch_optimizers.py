"""Which implementation of an optimizer to use: apex's fused one, PyTorch's fused one or the plain one.

All compute the same update. NGC's images carry apex, others do not: it is found by asking and never required,
and the fastest of what is there is found by a short measurement on tensors of the model's own shapes.
"""

from __future__ import annotations

import importlib
import statistics
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from benchmarks.common.frameworks import pytorch

Build = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
Measure = Callable[[Build, Sequence[torch.nn.Parameter]], float]
WARMUP, MEASURED = 2, 5
"""Steps of each candidate."""


def find_apex() -> Any:
    """Return the module apex.optimizers, or None where the image has no apex or one without its CUDA parts."""
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


def choose(
    candidates: Dict[str, Build],
    parameters: Sequence[torch.nn.Parameter],
    wanted: str = "auto",
    measure: Optional[Measure] = None,
) -> Tuple[str, torch.optim.Optimizer]:
    """Return the name of the implementation that is used for ``parameters``, and the optimizer.

    ``wanted`` names one, or "auto" takes the fastest by ``measure`` (seconds of a step; default: on copies of
    the parameters, so that these need twice their memory and four times for Adam for a moment). Rank 0's
    measurement decides for all ranks.
    """
    if wanted == "auto":
        wanted = _fastest(candidates, parameters, measure or seconds_of_step)
    if wanted not in candidates:
        raise ValueError(f"optimizer implementation {wanted!r} is not here: use auto or one of {sorted(candidates)}")
    return wanted, candidates[wanted](parameters)


def _fastest(candidates: Dict[str, Build], parameters: Sequence[torch.nn.Parameter], measure: Measure) -> str:
    names = sorted(candidates)
    seconds: List[float] = []
    for name in names:
        try:
            seconds.append(measure(candidates[name], parameters))
        except (RuntimeError, TypeError, ValueError):
            # An implementation that refuses this device, type or option is no candidate.
            seconds.append(float("inf"))
    best = torch.tensor([min(range(len(names)), key=seconds.__getitem__)], device=parameters[0].device)
    pytorch.broadcast([best])
    return names[int(best.item())]


def seconds_of_step(build: Build, parameters: Sequence[torch.nn.Parameter]) -> float:
    """Return the median time of a step on copies of ``parameters``."""
    copies = [torch.nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters]
    for copy in copies:
        copy.grad = torch.full_like(copy, 1e-3)
    optimizer = build(copies)
    times = []
    for _ in range(WARMUP + MEASURED):
        pytorch.synchronize()
        started = time.perf_counter()
        optimizer.step()
        pytorch.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARMUP:])
