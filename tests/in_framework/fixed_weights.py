"""Fixed weights, and one number per tensor, for comparisons with values that were recorded from other code.

Neither depends on a random generator: the same numbers can be set in any implementation of a network.
"""

import torch


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
