"""What a training step works on, and a whole epoch of steps as one CUDA graph."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Optional

import torch

from benchmarks.common import torch_optimizers
from benchmarks.common.ranks import Ranks
from benchmarks.common.torch_ranks import GradientBuffer
from benchmarks.ncf.pytorch.config import Config
from benchmarks.ncf.pytorch.data import Sampler
from benchmarks.ncf.pytorch.model import NeuMF

WARMUP_STEPS = 3
"""Before a capture, as PyTorch's notes on CUDA graphs ask for."""


class Training(NamedTuple):
    """All that a step works on."""

    network: NeuMF
    optimizer: torch.optim.Optimizer
    kernel: str
    """Name of the optimizer's implementation."""
    gradients: GradientBuffer
    sampler: Sampler
    losses: torch.Tensor
    """(steps of an epoch,): this rank's part of each step's mean loss."""
    config: Config


def build(config: Config, network: NeuMF, sampler: Sampler, ranks: Ranks, kernel: Optional[str]) -> Training:
    """Optimizer, gradients and losses for ``network``; ``kernel`` is what a checkpoint says, None if fresh."""
    candidates = torch_optimizers.adam_candidates(
        config.learning_rate,
        (config.beta1, config.beta2),
        config.epsilon,
        torch_optimizers.find_apex(),
        capturable=config.device == "gpu",
    )
    parameters = list(network.parameters())
    name, optimizer = torch_optimizers.choose(candidates, parameters, kernel or config.optimizer_kernel)
    losses = torch.zeros(sampler.steps_per_epoch, device=ranks.context)
    return Training(network, optimizer, name, GradientBuffer(parameters), sampler, losses, config)


def capture_epoch(training: Training, step: Callable[[Training, int], None]) -> torch.cuda.CUDAGraph:
    """A whole epoch as one CUDA graph: drawing the samples and every ``step`` of it, given by its number.

    The warm-up before the capture trains; weights and optimizer are put back to where they were. The graph
    takes its random numbers from the device's generator, so seeding that before a replay decides the epoch.
    """
    kept = [parameter.detach().clone() for parameter in training.network.parameters()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        training.sampler.draw()
        for step_in_epoch in range(min(WARMUP_STEPS, training.sampler.steps_per_epoch)):
            step(training, step_in_epoch)
    torch.cuda.current_stream().wait_stream(side)
    with torch.no_grad():
        for parameter, value in zip(training.network.parameters(), kept):
            parameter.copy_(value)
        for state in training.optimizer.state.values():
            for value in state.values():
                # In place: the graph will hold these very tensors.
                value.zero_()
    training.gradients.zero()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.sampler.draw()
        for step_in_epoch in range(training.sampler.steps_per_epoch):
            step(training, step_in_epoch)
    return graph


def checkpoint_content(training: Training, best: float) -> Callable[[], Dict[str, Any]]:
    """What all ranks have in common; the samples of an epoch are drawn again from its seed."""
    return lambda: {
        "network": training.network.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "kernel": training.kernel,
        "best": best,
    }
