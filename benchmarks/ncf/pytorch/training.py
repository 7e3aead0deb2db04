"""What a training step works on: built, captured as one CUDA graph per epoch, carried through checkpoints."""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional

import torch

from benchmarks.common import torch_optimizers
from benchmarks.common.cuda_graphs import Captured
from benchmarks.common.frameworks import pytorch
from benchmarks.common.frameworks.pytorch import GradientBuffer
from benchmarks.common.ranks import Ranks
from benchmarks.ncf.pytorch import model, operators
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
    graph: Optional[Captured] = None
    """A whole epoch: drawing its samples and every step."""


Step = Callable[[Training, int], None]


def build(
    config: Config, users: int, items: int, sampler: Sampler, ranks: Ranks, saved: Mapping[str, Any], step: Step
) -> Training:
    """Build with what ``content`` saved, or with rank 0's fresh weights; capture an epoch of ``step`` on a GPU."""
    torch.manual_seed(config.seed)
    network = model.build(config, users, items).to(ranks.context)
    network.operators = operators.choose(config, users, items, ranks, saved.get("operators"))
    training = assemble(config, network, sampler, ranks, saved.get("kernel"))
    if saved:
        network.load_state_dict(saved["network"])
    else:
        pytorch.broadcast(network.parameters())
    if config.cuda_graph and config.device == "gpu":
        training = training._replace(graph=_capture_epoch(training, step))
    if saved:
        torch_optimizers.restore(training.optimizer, saved["optimizer"])
    return training


def assemble(config: Config, network: NeuMF, sampler: Sampler, ranks: Ranks, kernel: Optional[str] = None) -> Training:
    """Optimizer, gradients and losses for ``network``; ``kernel`` is what a checkpoint names, None if fresh."""
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


def _capture_epoch(training: Training, step: Step) -> Captured:
    """Capture a whole epoch as one CUDA graph: drawing the samples and every ``step`` of it, given by its number.

    The warm-up before the capture trains; weights and optimizer are put back to where they were. The graph
    takes its random numbers from the device's generator, so seeding that before a replay decides the epoch.
    """
    steps = training.sampler.steps_per_epoch

    def run(count: int = steps) -> None:
        training.sampler.draw()
        for step_in_epoch in range(count):
            step(training, step_in_epoch)

    @torch.no_grad()
    def warm_up() -> None:
        kept = [parameter.clone() for parameter in training.network.parameters()]
        with torch.enable_grad():
            run(min(WARMUP_STEPS, steps))
        for parameter, value in zip(training.network.parameters(), kept):
            parameter.copy_(value)
        torch_optimizers.reset(training.optimizer)
        training.gradients.zero()

    return Captured(run, (), warm_up)


def content(training: Training) -> Dict[str, Any]:
    """What all ranks have in common; the samples of an epoch are drawn again from its seed."""
    return {
        "network": training.network.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "kernel": training.kernel,
        "operators": training.network.operators.names,
    }
