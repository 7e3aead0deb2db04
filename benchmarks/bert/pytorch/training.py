"""What a step works on: the network and the updates of its weights; built, warmed up, and loaded with weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional

import torch

from benchmarks.bert.pytorch import model
from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import Batch, Part, noise
from benchmarks.bert.pytorch.model import Network
from benchmarks.common import torch_lamb
from benchmarks.common.frameworks import pytorch
from benchmarks.common.ranks import Ranks
from benchmarks.common.torch_generators import drawn_from, seed_dropout, without_trace
from benchmarks.common.torch_updates import ScaleRule, Updates
from benchmarks.language.arrays import DataSet
from benchmarks.language.pytorch import attention, checkpoint
from benchmarks.language.pytorch.encoder import shape_of

LARGEST_SCALE = float(1 << 24)
"""Of the loss, as apex has it (amp/scaler.py, max_loss_scale)."""
EagerStep = Callable[["Training", Batch, float], torch.Tensor]
"""``train_step`` of train.py."""


class Training:
    """The network on this rank's device, and its optimizer."""

    def __init__(self, config: Config, vocabulary: int, ranks: Ranks, kernel: str, weights: Optional[Path]) -> None:
        """Draw the weights, the same on all ranks, or read them from a file.

        Args:
            config: of the run.
            vocabulary: rows of the table of words, padding included.
            ranks: of the job.
            kernel: implementation of the optimizer, or "auto".
            weights: file to begin with.
        """
        self.config, self.ranks, self.vocabulary = config, ranks, vocabulary
        dtype, size = pytorch.DTYPES[config.precision], config.width // config.heads
        chosen = attention.choose(config.attention, ranks.context, dtype, size, ranks.rank)
        with drawn_from(config.seed):
            network = Network(shape_of(config, vocabulary), chosen, config.compile)
        if weights is not None:
            checkpoint.fill(checkpoint.places_of(network.state_dict()), checkpoint.read(weights), weights)
        self.network = network.to(ranks.context)
        named = list(self.network.named_parameters())
        pieces = torch_lamb.pieces_of(named, lambda name: model.decay_of(name, config.weight_decay), model.parts_of)
        options = torch_lamb.Options((config.beta1, config.beta2), config.epsilon)
        scale = ScaleRule(config.loss_scale, config.loss_scale_window, LARGEST_SCALE)
        self.updates = Updates(
            [parameter for _, parameter in named],
            torch_lamb.lamb_candidates(pieces, options, torch_lamb.find_apex()),
            kernel,
            ranks,
            clip=config.gradient_clip or None,
            scale=scale if config.precision == "fp16" else None,
        )

    def loss(self, part: Part) -> torch.Tensor:
        """This part's share of the loss: both means, so weighted that the ranks' and parts' shares sum to the loss."""
        with pytorch.autocast(self.ranks.context, self.config.precision):
            words, follows = self.network.losses(part)
        return words * part.masked_weight + follows * part.next_weight

    def judge(self, part: Part) -> torch.Tensor:
        """What the network makes of a part of the evaluation set; see Network.judge."""
        with pytorch.autocast(self.ranks.context, self.config.precision):
            return self.network.judge(part)

    def content(self) -> Dict[str, Any]:
        """What all ranks have in common, for a checkpoint."""
        return {"network": self.network.state_dict(), **self.updates.content()}


def weights_file(config: Config, data: Path) -> Optional[Path]:
    """Return the file of weights to begin with, None where there is none."""
    return data / config.checkpoint if config.checkpoint else None


def build(
    config: Config,
    data: DataSet,
    ranks: Ranks,
    saved: Mapping[str, Any],
    step: EagerStep,
    weights: Optional[Path] = None,
) -> Training:
    """Build with a checkpoint, given or fresh weights, ready: warmed up by ``step`` on noise, before the clock.

    Raises Problem where a file of weights does not fit.
    """
    if not saved:
        seed_dropout(config.seed, ranks)
    multiple = config.vocabulary_multiple
    vocabulary = -(-data.vocabulary.size // multiple) * multiple
    kernel = saved.get("kernel", config.optimizer_kernel)
    training = Training(config, vocabulary, ranks, kernel, None if saved else weights)
    pytorch.broadcast(training.network.parameters())
    warm_up(step, training)
    if saved:
        training.network.load_state_dict(saved["network"])
        training.updates.restore(saved)
    return training


def warm_up(step: EagerStep, training: Training) -> None:
    """Connect the ranks and compile, by steps on noise at rate 0; weights, optimizer and generators are as before."""
    if not training.config.warm_up_steps:
        return
    batch = noise(training.config, training.vocabulary, training.ranks)
    with without_trace(training.updates, training.ranks):
        for _ in range(training.config.warm_up_steps):
            step(training, batch, 0.0)
