"""What a step works on: the network and the updates of its weights; built, warmed up, and loaded with weights."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, Mapping, Optional

import torch

from benchmarks.bert.pytorch import model
from benchmarks.bert.pytorch.config import Config
from benchmarks.bert.pytorch.data import Batch, Part, noise
from benchmarks.bert.pytorch.model import Network
from benchmarks.common import kernels, stopping, torch_abilities, torch_lamb
from benchmarks.common.frameworks import pytorch
from benchmarks.common.ranks import Ranks
from benchmarks.common.torch_generators import drawn_from, seed_dropout, without_trace
from benchmarks.common.torch_updates import Rate, ScaleRule, Updates
from benchmarks.language.arrays import DataSet
from benchmarks.language.pytorch import attention, checkpoint, fp8, operators
from benchmarks.language.pytorch.encoder import shape_of
from benchmarks.language.pytorch.graphs import captured

LARGEST_SCALE = float(1 << 24)
"""Of the loss, as apex has it (amp/scaler.py, max_loss_scale)."""
PartStep = Callable[["Training", Part], torch.Tensor]
"""``train_part`` of train.py."""
Step = Callable[["Training", Batch, Rate], Optional[torch.Tensor]]
"""``train_step`` of train.py."""


class Done:
    """What is done of a step: how many parts of its batch, and their losses; their gradients are those of Updates."""

    def __init__(self, device: torch.device) -> None:
        self.parts, self.loss = 0, torch.zeros((), device=device)

    def add(self, loss: torch.Tensor) -> None:
        """Count a part."""
        self.parts += 1
        self.loss += loss

    def take(self) -> torch.Tensor:
        """Return the loss of all parts, and begin anew."""
        found = self.loss.clone()
        self.parts = 0
        self.loss.zero_()
        return found


class Training:
    """The network on this rank's device, and its optimizer."""

    def __init__(
        self,
        config: Config,
        vocabulary: int,
        ranks: Ranks,
        part_step: PartStep,
        saved: Mapping[str, Any] = MappingProxyType({}),
        weights: Optional[Path] = None,
    ) -> None:
        """Draw the weights, the same on all ranks, or read them from a file.

        Args:
            config: of the run.
            vocabulary: rows of the table of words, padding included.
            ranks: of the job.
            part_step: ``train_part`` of train.py.
            saved: a checkpoint, of which only the names of kernels are taken.
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
        self._choose_kernels(saved.get("kernels", {}))
        self.done = Done(ranks.context)
        self.run_part: Callable[[Part], torch.Tensor] = partial(part_step, self)
        """The step of a part: by a CUDA graph where there is one."""
        self._in_fp8 = fp8.use(network.encoder, fp8.find()) if config.fp8 else nullcontext
        self.updates = self.updates_of(saved.get("kernel", config.optimizer_kernel))

    def _choose_kernels(self, saved: Mapping[str, str]) -> None:
        """Choose how what is between the products is computed, on rows about as long as those of a step."""
        config = self.config
        rows = config.batch_size // config.accumulation * config.positions // 2
        dtype = pytorch.DTYPES[config.precision]
        # Rows of thousands of tokens keep a GPU busy longer than their launches take.
        time = kernels.seconds_on_device
        self.kernels, pieces = operators.choose(config, rows, self.ranks, dtype, saved, time)
        self.network.encoder.use(pieces)

    def updates_of(self, kernel: str) -> Updates:
        """Return the updates of the network's weights by LAMB."""
        config, ranks = self.config, self.ranks
        named = list(self.network.named_parameters())
        pieces = torch_lamb.pieces_of(named, lambda name: model.decay_of(name, config), model.parts_of)
        options = torch_lamb.Options((config.beta1, config.beta2), config.epsilon)
        split = config.split_optimizer and ranks.size > 1
        candidates = (
            torch_lamb.split_candidates(pieces, options, ranks)
            if split
            else torch_lamb.lamb_candidates(pieces, options, torch_lamb.find_apex())
        )
        scale = ScaleRule(config.loss_scale, config.loss_scale_window, LARGEST_SCALE)
        return Updates(
            [parameter for _, parameter in named],
            candidates,
            "fused" if split else kernel,
            ranks,
            clip=config.gradient_clip or None,
            scale=scale if config.precision == "fp16" else None,
            split=split,
        )

    def loss(self, part: Part) -> torch.Tensor:
        """This part's share of the loss: both means, so weighted that the ranks' and parts' shares sum to the loss."""
        with pytorch.autocast(self.ranks.context, self.config.precision), self._in_fp8():
            words, follows = self.network.losses(part)
        return words * part.weights[0] + follows * part.weights[1]

    def judge(self, part: Part) -> torch.Tensor:
        """What the network makes of a part of the evaluation set; see Network.judge."""
        with pytorch.autocast(self.ranks.context, self.config.precision), self._in_fp8():
            return self.network.judge(part)

    def content(self) -> Dict[str, Any]:
        """What all ranks have in common, for a checkpoint."""
        return {"network": self.network.state_dict(), "kernels": self.kernels, **self.updates.content()}

    def own_content(self) -> Dict[str, Any]:
        """What this rank alone has, for a checkpoint: also in the middle of a step."""
        found = self.updates.own_content()
        if self.done.parts:
            found["done"] = {"parts": self.done.parts, "loss": self.done.loss, "gradients": self.updates.gradients}
        return found

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from both contents together."""
        self.network.load_state_dict(saved["network"])
        self.updates.restore(saved)
        if "done" in saved:
            self.done.parts = saved["done"]["parts"]
            self.done.loss.copy_(saved["done"]["loss"])
            self.updates.gradients.copy_(saved["done"]["gradients"])


def weights_file(config: Config, data: Path) -> Optional[Path]:
    """Return the file of weights to begin with, None where there is none."""
    return data / config.checkpoint if config.checkpoint else None


def build(
    config: Config,
    data: DataSet,
    ranks: Ranks,
    saved: Mapping[str, Any],
    part_step: PartStep,
    step: Step,
    weights: Optional[Path] = None,
) -> Training:
    """Build with a checkpoint, given or fresh weights, ready: warmed up and captured on noise, before the clock.

    Raises Problem where a file of weights does not fit.
    """
    multiple = config.vocabulary_multiple
    vocabulary = -(-data.vocabulary.size // multiple) * multiple
    training = Training(config, vocabulary, ranks, part_step, saved, None if saved else weights)
    if not saved:
        # Behind the choice of kernels, which draws numbers too.
        seed_dropout(config.seed, ranks)
    pytorch.broadcast(training.network.parameters())
    warm_up(step, training)
    if saved:
        training.restore(saved)
    return training


def warm_up(step: Step, training: Training) -> None:
    """Connect the ranks, compile and capture, by noise at rate 0; weights, optimizer and generators are as before."""
    config = training.config
    with without_trace(training.updates, training.ranks):
        if config.compile and (config.cuda_graph or config.warm_up_steps):
            part = noise(config, training.vocabulary, training.ranks)[0]
            torch_abilities.compile_in_turns(lambda: training.run_part(part), training.ranks)
            training.updates.gradients.zero_()
        if config.cuda_graph:
            training.run_part = captured(
                training.run_part,
                lambda tokens: noise(config, training.vocabulary, training.ranks, tokens)[0],
                config.batch_size // config.accumulation * config.positions,
                config.token_bucket,
                config.warm_up_steps,
            )
            training.updates.gradients.zero_()
        if config.warm_up_steps:
            batch = noise(config, training.vocabulary, training.ranks)
            for _ in range(config.warm_up_steps):
                step(training, batch, 0.0)
                stopping.progress()
