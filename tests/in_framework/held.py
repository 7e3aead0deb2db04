"""A stand-in for CUDA graphs on a CPU."""

from __future__ import annotations

import typing
from typing import Any

import torch


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
