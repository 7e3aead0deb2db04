"""What a step works on: the network and the updates of its weights; built, warmed up; and the optimizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import torch

from benchmarks.bert_squad.arrays import DataSet
from benchmarks.bert_squad.pytorch.config import Config
from benchmarks.bert_squad.pytorch.data import Batch, noise
from benchmarks.bert_squad.pytorch.model import Network, loss_sum
from benchmarks.common import kernels, stopping, torch_optimizers
from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import pytorch
from benchmarks.common.ranks import Ranks
from benchmarks.common.torch_generators import drawn_from, seed_dropout, without_trace
from benchmarks.common.torch_optimizers import Build
from benchmarks.common.torch_updates import ALIGNMENT, ScaleRule, Updates
from benchmarks.language.pytorch import attention, operators
from benchmarks.language.pytorch.checkpoint import load_weights
from benchmarks.language.pytorch.graphs import captured

MANY_STEPS = 1e6
"""Steps after which 1 - beta ** steps is 1 in fp32, for any beta that is used."""
BatchStep = Callable[["Training", Batch], torch.Tensor]
"""``train_batch`` of train.py."""
Step = Callable[["Training", Batch, float], torch.Tensor]
"""``train_step`` of train.py."""


class Training:
    """The network on this rank's device, and its optimizer."""

    def __init__(
        self,
        config: Config,
        vocabulary: int,
        ranks: Ranks,
        kernel: str,
        weights: Optional[Path],
        saved_kernels: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Draw the weights, the same on all ranks, and load those of the encoder from ``weights`` if given.

        Args:
            config: of the run.
            vocabulary: entries of the table, padding included.
            ranks: of the job.
            kernel: implementation of the optimizer, or "auto".
            weights: pretrained ones.
            saved_kernels: what a checkpoint names, for what is between the products.
        """
        self.config, self.ranks, self.vocabulary = config, ranks, vocabulary
        dtype = pytorch.DTYPES[config.precision]
        chosen = attention.choose(config.attention, ranks.context, dtype, config.width // config.heads, ranks.rank)
        with drawn_from(config.seed):
            self.network = Network(config, vocabulary, chosen)
        if weights is not None:
            load_weights(self.network.encoder, weights)
        self.network.to(ranks.context)
        rows = config.batch_size * config.sequence_length // 2
        # Launches count without a graph: a step of some windows is shorter on an H200 than they are.
        time = kernels.clock(config.cuda_graph)
        self.kernels, pieces = operators.choose(config, rows, ranks, dtype, saved_kernels, time)
        self.network.encoder.use(pieces)
        # Decayed weights come first in the flat tensor of all.
        parameters = sorted(self.network.parameters(), key=lambda parameter: parameter.dim() < 2)
        decayed = sum(-(-each.numel() // ALIGNMENT) * ALIGNMENT for each in parameters if each.dim() >= 2)
        self.updates = Updates(
            parameters,
            adam_candidates(config, decayed, torch_optimizers.find_apex()),
            kernel,
            ranks,
            clip=config.gradient_clip or None,
            scale=ScaleRule(config.loss_scale, config.loss_scale_window) if config.precision == "fp16" else None,
        )
        without_correction(self.updates.optimizer)
        self.by_graph: Optional[Callable[[Batch], torch.Tensor]] = None
        """Forward and backward by CUDA graphs, where there are any."""

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """The loss of this rank's windows, summed."""
        with pytorch.autocast(self.ranks.context, self.config.precision):
            logits = self.network(batch.rows)
        return loss_sum(logits, batch)

    @torch.no_grad()
    def logits(self, batch: Batch) -> torch.Tensor:
        """Logits (T, 2) of windows to be answered."""
        self.network.eval()
        with pytorch.autocast(self.ranks.context, self.config.precision):
            found: torch.Tensor = self.network(batch.rows)
        self.network.train()
        return found

    def content(self) -> Dict[str, Any]:
        """What all ranks have in common, for a checkpoint."""
        return {"network": self.network.state_dict(), "kernels": self.kernels, **self.updates.content()}


# -- optimizer -----------------------------------------------------------------------------------------


def adam_candidates(config: Config, decayed: int, apex: Any) -> Dict[str, Build]:
    """Return Adam without the correction of the bias by the name of each implementation at hand.

    As apex's FusedAdam of run_squad.py, with bias_correction=False: with the moments m and v,
    w <- w - rate (m / (sqrt(v) + epsilon) + decay w). PyTorch's own always corrects, by 1 - beta ** steps:
    ``without_correction`` starts it at so many steps that this is 1. The first ``decayed`` elements of the only
    parameter have weight decay, the others none.
    """
    options: Dict[str, Any] = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.epsilon}

    def groups(parameters: Sequence[torch.nn.Parameter]) -> List[Dict[str, Any]]:
        (whole,) = parameters
        found = []
        for part, decay in ((slice(decayed), config.weight_decay), (slice(decayed, None), 0.0)):
            parameter = torch.nn.Parameter(whole.detach()[part])
            parameter.grad = whole.grad[part] if whole.grad is not None else None
            found.append({"params": [parameter], "weight_decay": decay})
        return found

    found: Dict[str, Build] = {
        "plain": lambda parameters: torch.optim.AdamW(groups(parameters), foreach=True, **options),
        "fused": lambda parameters: torch.optim.AdamW(groups(parameters), fused=True, **options),
    }
    if apex is not None:
        found["apex"] = lambda parameters: apex.FusedAdam(groups(parameters), bias_correction=False, **options)
    return found


def without_correction(optimizer: torch.optim.Optimizer) -> None:
    """Start the moments at 0 and PyTorch's count of steps where its correction is 1; apex's needs neither."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state, on_device = optimizer.state[parameter], bool(group.get("fused"))
            if not state:
                device = parameter.device if on_device else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["step"].fill_(MANY_STEPS)


# -- building ------------------------------------------------------------------------------------------


def weights_file(config: Config, folder: Path) -> Optional[Path]:
    """Return the file of the pretrained weights, which may be in the data folder; None without one.

    Raises:
        Problem: it is not there.
    """
    if not config.checkpoint:
        return None
    path = folder / config.checkpoint
    # TensorFlow's checkpoints are several files with one beginning.
    if not path.exists() and not list(path.parent.glob(f"{path.name}.*")):
        remedy = "name the file with --set checkpoint=FILE, or set checkpoint= to begin with random weights"
        raise Problem(f"{path} is not there", "pretrained weights of BERT", remedy)
    return path


def build(
    config: Config, data: DataSet, ranks: Ranks, saved: Mapping[str, Any], batch_step: BatchStep, step: Step
) -> Training:
    """Build with a checkpoint, pretrained or fresh weights, ready: warmed up and captured on noise, before the clock.

    Raises:
        Problem: the pretrained weights do not fit.
    """
    weights = None if saved else weights_file(config, data.folder)
    multiple = config.vocabulary_multiple
    vocabulary = -(-data.vocabulary.size // multiple) * multiple
    kernel = saved.get("kernel", config.optimizer_kernel)
    training = Training(config, vocabulary, ranks, kernel, weights, saved.get("kernels", {}))
    if not saved:
        # Behind the choice of kernels, which draws numbers too.
        seed_dropout(config.seed, ranks)
    pytorch.broadcast(training.network.parameters())
    warm_up(batch_step, step, training)
    if saved:
        training.network.load_state_dict(saved["network"])
        training.updates.restore(saved)
    return training


def warm_up(batch_step: BatchStep, step: Step, training: Training) -> None:
    """Connect the ranks, compile and capture, by noise at rate 0; weights, optimizer and generators are as before."""
    config, vocabulary, ranks = training.config, training.vocabulary, training.ranks
    with without_trace(training.updates, ranks):
        if config.cuda_graph:
            training.by_graph = captured(
                partial(batch_step, training),
                lambda tokens: noise(config, vocabulary, ranks, tokens),
                config.batch_size * config.sequence_length,
                config.token_bucket,
                config.warm_up_steps,
            )
            training.updates.gradients.zero_()
        batch = noise(config, vocabulary, ranks)
        for _ in range(config.warm_up_steps):
            step(training, batch, 0.0)
            stopping.progress()
    if config.warm_up_steps:
        without_correction(training.updates.optimizer)
