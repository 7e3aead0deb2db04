"""Batches that threads build ahead and that travel to this rank's device while it computes."""

import dataclasses
from contextlib import closing
from typing import Any, Callable, Generator, Iterable, TypeVar

import torch

from benchmarks.common.data.read_ahead import read_ahead

S = TypeVar("S")
B = TypeVar("B")  # a tensor, a list, or a named tuple or dataclass of these and of other values


def ahead(
    make: Callable[[S], B], tasks: Iterable[S], count: int, threads: int, device: torch.device
) -> Generator[B, None, None]:
    """Yield ``make(task)`` for all ``tasks``, on ``device``, made by threads up to ``count`` tasks early.

    Threads start with the first batch; ``close`` stops them.
    """

    def pinned(task: S) -> B:
        batch = make(task)
        return _changed(batch, torch.Tensor.pin_memory) if device.type == "cuda" else batch

    with closing(read_ahead(pinned, tasks, count, threads)) as batches:
        yield from (to_device(batch, device) for batch in batches)


def to_device(batch: B, device: torch.device) -> B:
    """Copy to a device; asynchronous from pinned memory, which PyTorch keeps until the copy is done."""
    return _changed(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    if hasattr(value, "_fields"):
        return type(value)(*(_changed(item, change) for item in value))
    if dataclasses.is_dataclass(value):
        fields = {field.name: _changed(getattr(value, field.name), change) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)  # type: ignore[type-var]
    return value
