"""Bucketed gradient reduction that overlaps with the backward pass, last weights first.

A backward pass produces the gradients of the last layers first, so that most of the reduction is finished when it
ends (Li et al. 2020, arXiv 2006.15704, section 3.2.3). Buckets are slices of the flat gradient, without copies if
gradients and communication have the same type. A slice that only one rank needs, to update those weights, is
reduced to that rank.
"""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks


class GradientSlice(NamedTuple):
    """A parameter's slice in the flat gradient, including padding."""

    start: int
    end: int


class Bucket(NamedTuple):
    start: int
    end: int
    owner: Optional[int]  # The rank that needs the sum; None: all do
    waits_for: Tuple[int, ...]  # Numbers of the parameters that have a gradient in it


def buckets_of(slices: Sequence[GradientSlice], total: int, elements: int, shares: int) -> List[Bucket]:
    """Split a flat gradient, from its end, into buckets of complete parameters with at least ``elements`` elements.

    The ``total`` elements are divided equally among ``shares``; a bucket never spans two shares.
    """
    size = total // shares
    edges = {share * size for share in range(shares + 1)}
    end = total
    for part in reversed(slices):
        if end - part.start >= elements:
            edges.add(part.start)
            end = part.start
    buckets, end = [], total
    for start in sorted(edges - {total}, reverse=True):
        numbers = tuple(number for number, part in enumerate(slices) if part.start < end and start < part.end)
        buckets.append(Bucket(start, end, start // size if shares > 1 else None, numbers))
        end = start
    return buckets


class GradientSums:
    """Flat gradient reduction over the ranks, from a step's last backward pass to its update.

    All ranks start the collectives in the same order, independent of their gradients' order.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        slices: Sequence[GradientSlice],
        gradients: torch.Tensor,
        ranks: Ranks,
        *,
        bucket_bytes: int = 0,
        compression: str = "none",
        shares: int = 1,
    ) -> None:
        """Register hooks for ``parameters``, whose gradients are ``slices`` of the flat ``gradients``.

        With several ``shares``, each rank gets only the sum for its share. ``compression``: communication type, fp16,
        bf16 or none. A single collective follows the backward pass if ``bucket_bytes`` is 0 or larger than a
        share, or in older PyTorch.
        """
        self._gradients, self._ranks, self._shares = gradients, ranks, shares
        self._type = None if compression == "none" else pytorch.DTYPES[compression]
        elements, share = bucket_bytes // gradients.element_size(), len(gradients) // shares
        # Hooks on autograd nodes would work in older releases, but remember the stream of their creation.
        has_hooks = hasattr(torch.Tensor, "register_post_accumulate_grad_hook")  # since PyTorch 2.1
        overlaps = has_hooks and elements > 0 and (shares == 1 or elements <= share)
        self._buckets = buckets_of(slices, len(gradients), elements, shares) if overlaps else []
        self._of_parameter: List[List[int]] = [[] for _ in slices]
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket.waits_for:
                self._of_parameter[parameter].append(number)
        self._missing: List[int] = []  # Number of missing gradients per bucket; empty if no reduction is active
        self._in_flight: List[Tuple[Bucket, torch.Tensor, Any]] = []
        for number, parameter in enumerate(parameters if overlaps else ()):
            parameter.register_post_accumulate_grad_hook(self._make_hook(number))

    def start(self) -> None:
        """Start collectives as gradients of the next backward pass arrive; it is the last one before ``end``."""
        self._missing = [len(bucket.waits_for) for bucket in self._buckets]

    def end(self) -> None:
        """Wait for all collectives, starting the missing ones; on a GPU only the stream waits."""
        self._missing = []
        if not self._buckets:
            self._sum_at_once()
        for bucket in self._buckets[len(self._in_flight) :]:
            self._sum(bucket)
        for bucket, sent, work in self._in_flight:
            work.wait()
            self._store(sent, slice(bucket.start, bucket.end))
        self._in_flight = []

    def _make_hook(self, parameter: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if not self._missing:
                return
            for number in self._of_parameter[parameter]:
                self._missing[number] -= 1
            while len(self._in_flight) < len(self._buckets) and not self._missing[len(self._in_flight)]:
                self._sum(self._buckets[len(self._in_flight)])

        return hook

    def _sum(self, bucket: Bucket) -> None:
        sent = self._payload(slice(bucket.start, bucket.end))
        if bucket.owner is None:
            work = dist.all_reduce(sent, async_op=True)
        else:
            work = dist.reduce(sent, bucket.owner, async_op=True)
        self._in_flight.append((bucket, sent, work))

    def _sum_at_once(self) -> None:
        sent, share = self._payload(slice(None)), len(self._gradients) // self._shares
        # Gloo does not implement reduce-scatter.
        if self._shares > 1 and dist.get_backend() == "nccl":
            dist.reduce_scatter_tensor(sent[self._ranks.rank * share :][:share], sent)
        else:
            dist.all_reduce(sent)
        self._store(sent, slice(None))

    # Divide first, as in the submissions: the sum of many ranks could overflow.
    def _payload(self, part: slice) -> torch.Tensor:
        gradients = self._gradients[part]
        return gradients if self._type is None else (gradients / self._ranks.size).to(self._type)

    def _store(self, sent: torch.Tensor, part: slice) -> None:
        if self._type is not None:
            # In two steps: a product would be computed in the factors' type.
            self._gradients[part].copy_(sent).mul_(self._ranks.size)
