"""LAMB over one flat weight tensor, with a number of launches independent of the number of tensors (You et al. 2020).

arXiv 1904.00962, algorithm 2, in the variant of apex's FusedLAMB with the arguments of NVIDIA's v0.7 submission of
BERT (run_pretraining.py: bias correction, grad_averaging, use_nvlamb=False, max_grad_norm 1.0, which
benchmarks/common/torch/flat_optimizer.py applies). With the gradient g over the global batch, clipped by its norm over
all tensors, one tensor's weights w and decay d, learning rate r and step number t, from 1:

    m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon) + d w
    w <- w - r (|w| / |u|) u        the ratio is 1 where |w| or |u| is 0, and where d is 0 (use_nvlamb=False)

A :class:`ParameterGroup` counts as one tensor: queries, keys and values in one GEMM have separate ratios.
"""

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import optimizers
from benchmarks.common.torch.flat_optimizer import ALIGNMENT
from benchmarks.common.torch.optimizers import Build

CHUNK = 1 << 18  # elements: five such arrays are 5 MB, about one core's cache


class ParameterGroup(NamedTuple):
    """A tensor of the model in the flat one."""

    start: int  # first element; a multiple of ALIGNMENT
    size: int
    decay: float


class Options(NamedTuple):
    betas: Tuple[float, float]
    epsilon: float


def parameter_groups(
    parameters: Sequence[Tuple[str, torch.nn.Parameter]],
    decay_of: Callable[[str], float],
    parts_of: Callable[[str], int] = lambda name: 1,
) -> List[ParameterGroup]:
    """Return the slices of the parameters in FlatOptimizer's order, each divided into ``parts_of`` equal groups.

    Raises ValueError if any group would not start at a multiple of ALIGNMENT.
    """
    groups, start = [], 0
    for name, parameter in parameters:
        parts, size = parts_of(name), parameter.numel()
        share = size // parts
        if parts > 1 and (size % parts or share % ALIGNMENT):
            raise ValueError(f"{name} of {size} elements has no {parts} parts of a multiple of {ALIGNMENT}")
        groups += [ParameterGroup(start + part * share, share, decay_of(name)) for part in range(parts)]
        start += -(-size // ALIGNMENT) * ALIGNMENT
    return groups


Step = Callable[["Lamb", float], None]


class Lamb:
    """Optimizer for one flat parameter, with the interface that FlatOptimizer expects.

    The fused step views the flat tensor as rows of ALIGNMENT elements, each in a single group.
    """

    def __init__(
        self,
        flat: torch.nn.Parameter,
        groups: Sequence[ParameterGroup],
        options: Options,
        step: Step,
        ranks: Optional[Ranks] = None,
    ) -> None:
        """``flat``: weights, with a flat gradient; ``groups``: their tensors.

        With ``ranks``, ``flat`` is this rank's share, as divided by FlatOptimizer, and norms are summed over ranks.
        """
        self.flat, self.groups, self.options, self._step = flat, list(groups), options, step
        self.param_groups: List[Dict[str, Any]] = [{"lr": 0.0}]
        # Divisor of the gradients, which FlatOptimizer sets for the fused implementation.
        self.grad_scale: Optional[torch.Tensor] = None
        self.found_inf: Optional[torch.Tensor] = None  # 1.0 where the step is to be skipped
        self.first, self.second, self.update = (torch.zeros_like(flat.detach()) for _ in range(3))
        self.steps = flat.detach().new_zeros(())
        rows = len(flat) // ALIGNMENT
        group_of, decay = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, 1)
        self._shared = ranks is not None and ranks.size > 1
        offset = ranks.rank * len(flat) if ranks is not None else 0
        self._parts = {}  # slices of the groups on this rank, by group number
        for number, group in enumerate(groups):
            start, end = (
                min(max(position - offset, 0), len(flat)) for position in (group.start, group.start + group.size)
            )
            if end > start:
                self._parts[number] = slice(start, end)
                part = slice(start // ALIGNMENT, -(-end // ALIGNMENT))
                group_of[part], decay[part] = number, group.decay
        self.group_of, self.decay = group_of.to(flat.device), decay.to(flat.device)  # by rows
        self.scaled = torch.tensor([group.decay != 0 for group in groups], device=flat.device)
        self._present = torch.tensor(list(self._parts), dtype=torch.int64, device=flat.device)
        # Chunks stay in the CPU cache between operations; a GPU processes everything at once.
        size = CHUNK if flat.device.type == "cpu" else max(len(flat), 1)
        self.chunks = [slice(start, min(start + size, len(flat))) for start in range(0, len(flat), size)]

    @torch.no_grad()
    def step(self) -> None:
        self._step(self, self.param_groups[0]["lr"])

    def state_dict(self) -> Dict[str, Any]:
        """Return the state as PyTorch's optimizers have it."""
        state = {"first": self.first, "second": self.second, "steps": self.steps}
        return {"state": {0: state}, "param_groups": [{"lr": float(self.param_groups[0]["lr"])}]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for name, tensor in self.state_dict()["state"][0].items():
            tensor.copy_(saved["state"][0][name])

    def tensors(self) -> List[Tuple[ParameterGroup, List[torch.Tensor]]]:
        flats = (self.flat.grad, self.flat.detach(), self.first, self.second)
        return [(group, [flat[group.start : group.start + group.size] for flat in flats]) for group in self.groups]

    def norms(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the norms of the groups of flat tensors, (tensors, groups), summed over ranks."""
        parts = [tensor[part] for tensor in tensors for part in self._parts.values()]
        # _foreach_norm: since PyTorch 1.12.
        part_norms = torch._foreach_norm(parts) if hasattr(torch, "_foreach_norm") else [part.norm() for part in parts]
        norms = torch.stack(part_norms).view(len(tensors), -1) if parts else tensors[0].new_zeros(len(tensors), 0)
        if not self._shared:
            return norms
        squares = norms.new_zeros(len(tensors), len(self.groups)).index_copy_(1, self._present, norms.square())
        dist.all_reduce(squares)
        return squares.sqrt()


def fused_step(lamb: Lamb, rate: Any) -> None:
    """Update all tensors together on the device, without synchronization; a skipped step changes nothing."""
    (beta1, beta2), epsilon = lamb.options
    goes = torch.ones_like(lamb.steps) if lamb.found_inf is None else 1 - lamb.found_inf
    factor = goes if lamb.grad_scale is None else goes / lamb.grad_scale
    lamb.steps += goes
    steps = lamb.steps.clamp_min(1)  # the very first may be skipped
    root, corrected = (1 - beta2**steps).sqrt(), 1 - beta1**steps
    weights, update = lamb.flat.detach(), lamb.update
    flats = (lamb.flat.grad, weights, lamb.first, lamb.second, update)
    for part in lamb.chunks:
        g, w, m, v, u = (flat[part] for flat in flats)
        # The factors are 0 in a skipped step; do not multiply infinite or NaN values.
        torch.mul(g, factor, out=u)
        if lamb.found_inf is not None:
            u.masked_fill_(goes == 0, 0.0)
        m.lerp_(u, (1 - beta1) * goes)
        v.mul_(1 - (1 - beta2) * goes).addcmul_(u, u, value=1 - beta2)
        torch.sqrt(v, out=u).add_(epsilon * root)
        torch.div(m, u, out=u).mul_(root / corrected)
        by_rows = slice(part.start // ALIGNMENT, part.stop // ALIGNMENT)
        u.view(-1, ALIGNMENT).addcmul_(w.view(-1, ALIGNMENT), lamb.decay[by_rows])
    sizes, updates = lamb.norms(weights, update)
    ratio = torch.where(lamb.scaled & (sizes > 0) & (updates > 0), sizes / updates, torch.ones_like(sizes))
    factors = (ratio * (-rate * goes))[lamb.group_of][:, None]
    weights.view(-1, ALIGNMENT).addcmul_(update.view(-1, ALIGNMENT), factors)


def plain_step(lamb: Lamb, rate: Any) -> None:
    """Update the tensors one by one, following the equations."""
    (beta1, beta2), epsilon = lamb.options
    lamb.steps += 1
    steps = float(lamb.steps)
    for group, (gradient, weights, first, second) in lamb.tensors():
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).add_(gradient.square() * (1 - beta2))
        update = (first / (1 - beta1**steps)) / ((second / (1 - beta2**steps)).sqrt() + epsilon)
        ratio = torch.ones_like(lamb.steps)
        if group.decay:
            update = update + group.decay * weights
            size, norm = weights.norm(), update.norm()
            ratio = torch.where((size > 0) & (norm > 0), size / norm, ratio)
        weights -= rate * ratio * update


def apex_step(apex: Any, lamb: Lamb, rate: Any) -> None:
    """Update by apex's kernel (amp_C.multi_tensor_lamb, which FusedLAMB.step calls): a call per decay."""
    (beta1, beta2), epsilon = lamb.options
    lamb.steps += 1
    device = lamb.flat.device
    # The gradient is clipped: a norm of 0 lets the kernel leave it.
    norm, skip = torch.zeros(1, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    for decay in sorted({group.decay for group in lamb.groups}):
        parts = zip(*(tensors for group, tensors in lamb.tensors() if group.decay == decay))
        apex.multi_tensor_applier(
            apex.multi_tensor_lamb,
            skip,
            [list(part) for part in parts],
            float(rate),
            beta1,
            beta2,
            epsilon,
            int(lamb.steps),
            True,  # bias correction
            decay,
            True,  # grad_averaging
            1,  # the decay is in the update, not in the gradient (adam_w_mode)
            norm,
            1.0,  # max_grad_norm
            False,  # use_nvlamb
        )


def find_apex() -> Any:
    """Return the functions for apex_step, or None without apex or its CUDA extension."""
    if optimizers.find_apex() is None or not hasattr(importlib.import_module("amp_C"), "multi_tensor_lamb"):
        return None
    applier = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
    return SimpleNamespace(
        multi_tensor_applier=applier, multi_tensor_lamb=importlib.import_module("amp_C").multi_tensor_lamb
    )


def lamb_candidates(
    groups: Sequence[ParameterGroup], options: Options, apex: Any, ranks: Optional[Ranks] = None
) -> Dict[str, Build]:
    """Return the available implementations of LAMB by name; each takes one flat parameter.

    With ``ranks``, it is this rank's part of the weights, and only "fused" is available: the others need complete
    tensors for their norms.
    """
    steps: Dict[str, Step] = {"fused": fused_step}
    if ranks is None:
        steps["plain"] = plain_step
        if apex is not None:
            steps["apex"] = partial(apex_step, apex)

    def build(step: Step, parameters: Sequence[torch.nn.Parameter]) -> Any:
        (flat,) = parameters
        return Lamb(flat, groups, options, step, ranks)

    return {name: partial(build, step) for name, step in steps.items()}
