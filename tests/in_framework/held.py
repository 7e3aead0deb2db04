"""Stand-ins for CUDA graphs, and records of what a training sends and computes."""

from __future__ import annotations

import typing
from typing import Any

import torch
import torch.distributed as dist


class GraphStub:
    """Copies its inputs to fixed tensors, like Captured, and runs the function on those."""

    instances: typing.ClassVar[list[GraphStub]] = []

    def __init__(self, function: Any, example: Any, warm_up: Any, pool_of: GraphStub | None = None) -> None:
        self.tensors, self.function, self.replays = [tensor.clone() for tensor in example], function, 0
        warm_up(*self.tensors)
        self.pool_of = pool_of
        GraphStub.instances.append(self)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        for tensor, value in zip(self.tensors, inputs, strict=True):
            assert tensor.shape == value.shape
            tensor.copy_(value)
        self.replays += 1
        return self.function(*self.tensors)


def compute_gradients(training: Any, step: Any, batch: Any) -> list[torch.Tensor]:
    """Return the loss of a micro-batch and the flat gradients."""
    training.optimizer.gradients.zero_()
    loss = step(batch)
    return [loss.clone(), training.optimizer.gradients.clone()]


def record_collectives(monkeypatch: Any, names: tuple[str, ...], record: Any) -> None:
    """Call ``record`` with the name and the arguments of each collective before it starts."""

    def recorded(name: str, collective: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            record(name, *arguments, **options)
            return collective(*arguments, **options)

        return call

    for name in names:
        monkeypatch.setattr(dist, name, recorded(name, getattr(dist, name)))
