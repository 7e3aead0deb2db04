"""What stands for a CUDA graph where there is no GPU."""

from __future__ import annotations

import typing
from typing import Any

import torch


class Held:
    """What Captured does with memory, on the CPU: the function sees its own tensors alone."""

    made: typing.ClassVar[list[Held]] = []

    def __init__(self, function: Any, example: Any, warm_up: Any, pool_of: Held | None = None) -> None:
        self.held, self.function, self.replays = [each.clone() for each in example], function, 0
        warm_up(*self.held)
        self.pool_of = pool_of
        Held.made.append(self)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        assert [each.shape for each in self.held] == [each.shape for each in tensors]
        for held, new in zip(self.held, tensors):
            held.copy_(new)
        self.replays += 1
        return self.function(*self.held)
