"""Update of all weights: gradient sum over ranks, loss scale, clipping by global norm, optimizer.

Weights and gradients are one flat tensor each, so that an update needs only a few kernels for any model. If the
optimizer can skip steps on the device (PyTorch's fused optimizers), no synchronization is needed.
"""

import math
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import optimizers
from benchmarks.common.torch.gradient_sums import GradientSlice, GradientSums
from benchmarks.common.torch.optimizers import Build

Rate = Union[float, torch.Tensor]  # learning rate per step; a tensor if only the device knows it
# elements: every weight starts at an aligned address (256 bytes in fp32) for wide loads and tensor cores
ALIGNMENT = 64


class ScaleRule(NamedTuple):
    """A dynamic loss scale: halved by an overflow, doubled after ``window`` steps without one.

    GNMT: 1024, 128, 8192 (v0.7 NVIDIA seq2seq/train/fp_optimizers.py, train.py). Transformer: 128, 2000, no limit
    (v0.7 NVIDIA fairseq/fp16_trainer.py).
    """

    initial: float
    window: int
    maximum: float = math.inf


class LossScale:
    """Dynamic loss scale on the device, updated without synchronization."""

    def __init__(self, rule: ScaleRule, device: torch.device) -> None:
        self._rule = rule
        self.value = torch.tensor(float(rule.initial), device=device)
        self._good = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)  # steps that overflowed, on the device
        self.seen = 0  # the same on the host, if it waits for each step

    def update(self, finite: torch.Tensor) -> None:
        """Update the scale after a step whose gradients were ``finite`` or not."""
        good = torch.where(finite, self._good + 1, 0)
        grows = good >= self._rule.window
        larger = (self.value * 2).clamp_max(max(self._rule.maximum, self._rule.initial))
        self.value.copy_(torch.where(finite, torch.where(grows, larger, self.value), self.value / 2))
        self._good.copy_(good.masked_fill(grows, 0))
        self.skipped += ~finite

    def state_dict(self) -> Dict[str, torch.Tensor]:
        return {"value": self.value, "good": self._good, "skipped": self.skipped}

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(saved[name])
        self.seen = int(self.skipped)


class FlatOptimizer:
    """Optimizer for ``parameters``, whose weights and gradients become views of flat tensors.

    With ``split``, each rank updates a different part of the weights and has only this part's optimizer state.
    Gradients are reduce-scattered instead of all-reduced, and the weights gathered: the same communication volume,
    with optimizer time and memory divided by the number of ranks (distributed weight update of the submissions).
    Results are the same up to the order of sums.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        candidates: Dict[str, Build],
        kernel: str,
        ranks: Ranks,
        *,
        clip: Optional[float] = None,
        scale: Optional[ScaleRule] = None,
        split: bool = False,
        bucket_mb: int = 0,
        compression: str = "none",
    ) -> None:
        """Take ``parameters``, the same on all ranks; clip to the global norm ``clip``; see optimizers.choose.

        Gradients are summed in buckets of ``bucket_mb`` megabytes, and travel by ``compression``: GradientSums.
        """
        self._ranks, self._clip, self.split = ranks, clip, split and ranks.size > 1
        listed = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
        shares = ranks.size if self.split else 1
        self._flat, self.gradients, slices = _flatten(listed, shares)
        self._sums: Optional[GradientSums] = None
        if ranks.size > 1:
            options: Dict[str, Any] = {"bucket_bytes": bucket_mb << 20, "compression": compression, "shares": shares}
            self._sums = GradientSums(listed, slices, self.gradients, ranks, **options)
        share = slice(None)
        if self.split:
            size = len(self._flat) // shares
            share = slice(ranks.rank * size, (ranks.rank + 1) * size)
        self._mine = torch.nn.Parameter(self._flat[share])
        self._mine.grad = self.gradients[share]
        self.kernel, self.inner = optimizers.choose(candidates, [self._mine], kernel)
        self.scale = None if scale is None else LossScale(scale, self._flat.device)
        self.uncounted = 0  # skipped steps that the caller does not count as steps

    def skipped_since(self) -> int:
        """Return the number of uncounted skipped steps since the last call; synchronizes with the device."""
        new = 0 if self.scale is None else int(self.scale.skipped) - self.uncounted
        self.uncounted += new
        return new

    def backward(self, loss: torch.Tensor, last: bool = True) -> None:
        """Add the gradients of ``loss``, times the loss scale; the ``last`` pass before an update starts the reduction.

        Other backward passes also add to the gradients; these are then reduced by ``step``.
        """
        if last and self._sums is not None:
            self._sums.start()
        (loss if self.scale is None else loss * self.scale.value).backward()

    def step(self, learning_rate: Union[Rate, Sequence[Rate]], divisor: float) -> None:
        """Update the weights and clear the gradients; with a loss scale, skip steps with infinite or NaN gradients.

        Args:
            learning_rate: one, or one per parameter group; a tensor if read by a CUDA graph, for the fused optimizer.
            divisor: of the sum of the gradients over all ranks, such as the tokens of all ranks.
        """
        groups = self.inner.param_groups
        rates = learning_rate if isinstance(learning_rate, (list, tuple)) else [learning_rate] * len(groups)
        for group, rate in zip(groups, rates):
            group["lr"] = rate
        if self._sums is not None:
            self._sums.end()
        factor, finite = self._factor(divisor)
        self._apply(factor, finite)
        if self.scale is not None:
            self.scale.update(finite)
        if self.split and dist.get_backend() == "nccl":
            dist.all_gather_into_tensor(self._flat, self._mine.detach())
        elif self.split:
            dist.all_gather(list(self._flat.chunk(self._ranks.size)), self._mine.detach().clone())
        self.gradients.zero_()

    # Return the factor for the gradients, and whether all are finite.
    def _factor(self, divisor: float) -> Tuple[torch.Tensor, torch.Tensor]:
        value = self._flat.new_ones(()) if self.scale is None else self.scale.value
        factor = 1 / (value * divisor)
        if self._clip is None and self.scale is None:
            return factor, torch.ones_like(factor, dtype=torch.bool)
        norm = self._mine.grad.norm()
        if self.split:
            squares = norm.square()
            dist.all_reduce(squares)
            norm = squares.sqrt()
        if self._clip is not None:
            # As torch.nn.utils.clip_grad_norm_, which the submissions call or repeat.
            factor = factor * (self._clip / (norm * factor + 1e-6)).clamp_max(1)
        # Without a loss scale the step is not skipped, so that divergence becomes visible.
        return factor, torch.isfinite(norm) if self.scale is not None else torch.ones_like(norm, dtype=torch.bool)

    def _apply(self, factor: torch.Tensor, finite: torch.Tensor) -> None:
        if self.kernel == "fused":
            # Set by torch.amp.GradScaler for the fused kernel, which unscales and skips on the device.
            self.inner.grad_scale = 1 / factor
            self.inner.found_inf = (~finite).float()
            self.inner.step()
        elif self.scale is None or bool(finite):
            self._mine.grad.mul_(factor)
            self.inner.step()
        else:
            self.scale.seen += 1

    # -- checkpoints -------------------------------------------------------------------------------------

    def state_dict(self) -> Dict[str, Any]:
        """Return the state shared by all ranks, without the weights."""
        state: Dict[str, Any] = {"kernel": self.kernel}
        if self.scale is not None:
            state.update(loss_scale=self.scale.state_dict(), uncounted=self.uncounted)
        return state if self.split else {**state, "optimizer": self.inner.state_dict()}

    def rank_state_dict(self) -> Dict[str, Any]:
        """Return the state of this rank."""
        return {"optimizer": self.inner.state_dict()} if self.split else {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        optimizers.restore(self.inner, saved["optimizer"])
        if self.scale is not None:
            self.scale.restore(saved["loss_scale"])
            self.uncounted = saved.get("uncounted", 0)


class Rates:
    """Learning rate by the number of weight updates so far, excluding steps that overflowed.

    As in the v0.5 to v0.7 submissions: BERT's schedulers.py reads the optimizer's step count, GNMT's
    fp_optimizers.py calls the scheduler with the optimizer, the Transformer's fp16_trainer.py counts updates. SSD,
    NCF and DLRM have a constant scale and skip nothing; Mask R-CNN's scheduler counts every step
    (maskrcnn_benchmark/engine/trainer.py).
    """

    def __init__(self, optimizer: FlatOptimizer, rate_of: Callable[[int], float], steps: int) -> None:
        """``rate_of``: learning rate by step, from 0; ``steps``: length of the run."""
        self._optimizer, self._rate_of = optimizer, rate_of
        on_device = optimizer.scale is not None and optimizer.kernel == "fused"
        rates = [rate_of(step) for step in range(steps if on_device else 0)]
        self._table = torch.tensor(rates, device=optimizer.gradients.device)

    def of(self, step: int) -> Rate:
        """Return a step's rate; a tensor if only the device knows the number of skipped steps."""
        scale, number = self._optimizer.scale, step + self._optimizer.uncounted
        if scale is None:
            return self._rate_of(step)
        if not len(self._table):
            return self._rate_of(number - scale.seen)
        # Not indexing, which would read the tensor on the host.
        return self._table.take(number - scale.skipped)


@contextmanager
def unchanged(network: torch.nn.Module, optimizer: FlatOptimizer) -> Iterator[None]:
    """Restore parameters and optimizer state on exit, in place, since CUDA graphs refer to these tensors."""
    with preserve_scale(optimizer), optimizers.unchanged(network, optimizer.inner):
        yield


@contextmanager
def preserve_scale(optimizer: FlatOptimizer) -> Iterator[None]:
    scale = optimizer.scale
    state = {name: tensor.clone() for name, tensor in scale.state_dict().items()} if scale else {}
    yield
    if scale:
        scale.restore(state)


# Return flat weights, flat gradients and their slices; ``parameters`` become views. All shares have equal size.
def _flatten(
    parameters: Sequence[torch.nn.Parameter], shares: int
) -> Tuple[torch.Tensor, torch.Tensor, List[GradientSlice]]:
    sizes = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters]
    block = ALIGNMENT * shares
    flat = parameters[0].new_zeros(-(-sum(sizes) // block) * block).detach()
    gradients = torch.zeros_like(flat)
    slices, start = [], 0
    for parameter, size in zip(parameters, sizes):
        # Keep the memory order: channels_last weights need no copy before a convolution.
        view = (parameter.shape, parameter.stride(), start)
        weights = flat.as_strided(*view)
        weights.copy_(parameter.detach())
        parameter.data, parameter.grad = weights, gradients.as_strided(*view)
        slices.append(GradientSlice(start, start + size))
        start += size
    return flat, gradients, slices
