"""The sum of gradients over the ranks during the backward pass: bucket after bucket, the last weights first.

A backward pass makes the gradients of the last layers first, so that most of the sum is done when it ends (Li et al.
2020, arXiv 2006.15704, section 3.2.3). Buckets are parts of the flat gradient: nothing is copied where the type on the
wire is that of the gradients. A part that one rank alone needs, because it updates those weights, is reduced to it.
"""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks


class GradientSlice(NamedTuple):
    """Where the gradient of a parameter is in the flat one, what fills it up included."""

    start: int
    end: int


class Bucket(NamedTuple):
    start: int
    end: int
    owner: Optional[int]  # The rank that needs the sum; None: all do
    waits_for: Tuple[int, ...]  # Numbers of the parameters that have a gradient in it


def buckets_of(slices: Sequence[GradientSlice], total: int, elements: int, shares: int) -> List[Bucket]:
    """Cut a flat gradient, from its end on, into parts of whole parameters and of ``elements`` at least.

    Of its ``total`` elements each of the ``shares`` has as many, and a bucket is of one share.
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
    """Sums a flat gradient over the ranks: begun by the last backward pass of a step, ended by its update.

    All ranks begin the sums in one order, whatever order their gradients come in.
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
        """Watch the gradients of ``parameters``, which are at ``slices`` of the flat ``gradients``.

        With several ``shares`` each rank gets the sum of its own. ``compression``: the type sent, fp16, bf16 or none.
        With 0 ``bucket_bytes``, shares that are less, or an older PyTorch there is one sum, after the backward pass.
        """
        self._gradients, self._ranks, self._shares = gradients, ranks, shares
        self._type = None if compression == "none" else pytorch.DTYPES[compression]
        elements, share = bucket_bytes // gradients.element_size(), len(gradients) // shares
        # A node of autograd would tell older ones too, but remembers the stream on which it was made.
        has_hooks = hasattr(torch.Tensor, "register_post_accumulate_grad_hook")  # since PyTorch 2.1
        overlaps = has_hooks and elements > 0 and (shares == 1 or elements <= share)
        self._buckets = buckets_of(slices, len(gradients), elements, shares) if overlaps else []
        self._of_parameter: List[List[int]] = [[] for _ in slices]
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket.waits_for:
                self._of_parameter[parameter].append(number)
        self._missing: List[int] = []  # Gradients that each bucket waits for; empty while nothing is to be summed
        self._in_flight: List[Tuple[Bucket, torch.Tensor, Any]] = []
        for number, parameter in enumerate(parameters if overlaps else ()):
            parameter.register_post_accumulate_grad_hook(self._make_hook(number))

    def start(self) -> None:
        """Begin sums as the gradients of the backward pass that follows come; it is the last one before ``end``."""
        self._missing = [len(bucket.waits_for) for bucket in self._buckets]

    def end(self) -> None:
        """Wait for the sums, those included that no backward pass has begun: on a GPU the stream waits, not Python."""
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
        # Gloo has no reduce-scatter.
        if self._shares > 1 and dist.get_backend() == "nccl":
            dist.reduce_scatter_tensor(sent[self._ranks.rank * share :][:share], sent)
        else:
            dist.all_reduce(sent)
        self._store(sent, slice(None))

    # Divided before, as the submissions do: the sum of many ranks would overflow where no gradient does.
    def _payload(self, part: slice) -> torch.Tensor:
        gradients = self._gradients[part]
        return gradients if self._type is None else (gradients / self._ranks.size).to(self._type)

    def _store(self, sent: torch.Tensor, part: slice) -> None:
        if self._type is not None:
            # Not at once: a product is computed in the type of its factors.
            self._gradients[part].copy_(sent).mul_(self._ranks.size)
