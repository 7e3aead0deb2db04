"""Recorded values, precisions, collectives and saved bytes of PyTorch code, and stand-ins for CUDA graphs.

Fixed weights and projections do not depend on a random generator: the same numbers can be set in any implementation of
a network, whose values are then recorded as one number per tensor.
"""

import typing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.run.ranks import Ranks

CPU = Ranks(0, 1, 0, 1, torch.device("cpu"))


def phases(count):
    return torch.arange(count, dtype=torch.float64).square() * 0.618


@torch.no_grad()
def set_fixed_weights(parameters, scale):
    """Set each tensor to scale * sin(0.618 i^2 + k): i is the index of the element, k that of the tensor."""
    for number, parameter in enumerate(parameters):
        parameter.copy_(scale * torch.sin(phases(parameter.numel()) + number).view(parameter.shape))


def projection(*tensors):
    """Return the sum of all elements, in order, times cos(0.618 i^2 + 1)."""
    values = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    return float(values @ torch.cos(phases(len(values)) + 1))


def gradient_projection(parameters):
    return projection(*(parameter.grad for parameter in parameters))


def saved_bytes(forward, weights):
    """Return the bytes that autograd saves in ``forward``, without the storage of ``weights``."""
    saved, excluded = {}, {weight.untyped_storage().data_ptr() for weight in weights}

    def save(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor  # referenced, so that no other tensor takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in excluded)


class GraphStub:
    """Copies its inputs to fixed tensors, like Captured, and runs the function on those."""

    instances: typing.ClassVar[list["GraphStub"]] = []

    def __init__(self, function, example, warm_up, pool_of=None):
        self.tensors, self.function, self.replays = [tensor.clone() for tensor in example], function, 0
        warm_up(*self.tensors)
        self.pool_of = pool_of
        GraphStub.instances.append(self)

    def __call__(self, *inputs):
        for tensor, value in zip(self.tensors, inputs, strict=True):
            assert tensor.shape == value.shape
            tensor.copy_(value)
        self.replays += 1
        return self.function(*self.tensors)


def compute_gradients(training: Any, step: Any, batch: Any) -> list[torch.Tensor]:
    """Return the loss of a micro-batch and the flat gradients."""
    training.optimizer.gradients.zero_()
    return [step(batch).clone(), training.optimizer.gradients.clone()]


def record_collectives(monkeypatch: Any, names: tuple[str, ...], record: Any) -> None:
    """Call ``record`` with the name and the arguments of each collective before it starts."""

    def recorded(name: str, collective: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            record(name, *arguments, **options)
            return collective(*arguments, **options)

        return call

    for name in names:
        monkeypatch.setattr(dist, name, recorded(name, getattr(dist, name)))


def assert_precisions_train(losses_of: Any, **tolerances: float) -> None:
    """Compare the losses of steps on one batch with those in fp32, which fall by a fifth."""
    expected = losses_of("fp32")
    assert expected[-1] < 0.8 * expected[0]
    for precision, tolerance in tolerances.items():
        assert expected != losses_of(precision) == pytest.approx(expected, rel=tolerance), precision


class FlashCalls(TorchDispatchMode):
    """Positional and keyword arguments of the calls of flash attention, forward and backward."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if "_flash_attention_" in str(operator):
            self.found.append((args, kwargs))
        return operator(*args, **(kwargs or {}))
