"""Batches that threads build ahead and that travel to this rank's device while it computes."""

from contextlib import closing
from typing import Any, Callable, Generator, Iterable, List, TypeVar

import torch

from benchmarks.common.data.read_ahead import read_ahead

THREADS = 2  # that build batches
Part = TypeVar("Part")  # a NamedTuple of tensors and other values


def ahead(
    make: Callable[[int], List[Part]], steps: Iterable[int], prefetch: int, device: torch.device
) -> Generator[List[Part], None, None]:
    """Yield ``make(step)`` for all ``steps``, on ``device``.

    Threads start with the first batch; ``close`` stops them.
    """

    def pinned(step: int) -> List[Part]:
        micro_batches = make(step)
        if device.type != "cuda":
            return micro_batches
        return [_map_tensors(part, torch.Tensor.pin_memory) for part in micro_batches]

    with closing(read_ahead(pinned, steps, prefetch, THREADS)) as batches:
        for batch in batches:
            yield [to_device(part, device) for part in batch]


def to_device(part: Part, device: torch.device) -> Part:
    return _map_tensors(part, lambda tensor: tensor.to(device, non_blocking=True))


def _map_tensors(part: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return type(part)(*(change(field) if isinstance(field, torch.Tensor) else field for field in part))
