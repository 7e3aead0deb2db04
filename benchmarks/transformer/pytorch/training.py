"""What a step works on: the network and the updates of its weights; built, warmed up; and how it translates."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping

import torch

from benchmarks.common import stopping, torch_abilities, torch_optimizers
from benchmarks.common.frameworks import pytorch
from benchmarks.common.ranks import Ranks
from benchmarks.common.torch_generators import drawn_from, seed_dropout, without_trace
from benchmarks.common.torch_updates import Rate, ScaleRule, Updates
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.data import limit, noise
from benchmarks.transformer.pytorch.model import Network, Norm, State
from benchmarks.translation.arrays import DataSet
from benchmarks.translation.bleu import fairseq_score, plain_score, tokenized_score
from benchmarks.translation.pytorch import operators
from benchmarks.translation.pytorch.batches import Batch, SourceBatch
from benchmarks.translation.pytorch.beam import Rules, Step, length_penalty, search
from benchmarks.translation.pytorch.evaluation import Score, of_text, of_tokens
from benchmarks.translation.pytorch.loss import smoothed_loss

EagerStep = Callable[["Training", Batch, Rate], torch.Tensor]
"""``train_step`` of train.py."""


class Training:
    """The network on this rank's device, and its optimizer."""

    def __init__(self, config: Config, vocabulary: int, words: int, ranks: Ranks, saved: Mapping[str, Any]) -> None:
        """Draw the weights, the same on all ranks.

        Args:
            config: of the run.
            vocabulary: entries of the table, padding included.
            words: those of them that a translation may have.
            ranks: of the job.
            saved: a checkpoint's content, which names the implementations; empty: they are chosen.
        """
        self.config, self.ranks, self.words, self.vocabulary = config, ranks, words, vocabulary
        with drawn_from(config.seed):
            self.network = Network(config, vocabulary).to(ranks.context)
        self._choose_kernels(saved.get("kernels", {}))
        self._hidden: Any = torch.compile(self.network, dynamic=True) if config.compile else self.network
        candidates = torch_optimizers.adam_candidates(
            config.learning_rate, (config.beta1, config.beta2), config.epsilon, torch_optimizers.find_apex()
        )
        self.updates = Updates(
            list(self.network.parameters()),
            candidates,
            saved.get("kernel", config.optimizer_kernel),
            ranks,
            clip=config.gradient_clip or None,
            scale=ScaleRule(config.loss_scale, config.loss_scale_window) if config.precision == "fp16" else None,
            split=config.split_optimizer,
        )

    def _choose_kernels(self, saved: Mapping[str, str]) -> None:
        """Choose how loss and norms are computed, by measuring on the sizes of a step; a compiled norm is PyTorch's."""
        config = self.config
        sizes: Dict[str, Mapping[str, Any]] = {"loss": {"rows": operators.LOSS_ROWS, "vocabulary": self.vocabulary}}
        if not config.compile:
            sizes["norm"] = {"rows": config.batch_size, "width": config.width}
        dtype = pytorch.DTYPES[config.precision]
        self.kernels, chosen = operators.choose(config.kernels, sizes, self.ranks, dtype, saved)
        self._of_rows = chosen["loss"]
        for module in self.network.modules():
            if isinstance(module, Norm) and "norm" in chosen:
                module.compute = chosen["norm"]

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """The smoothed loss of this rank's tokens, summed."""
        config, network = self.config, self.network
        with pytorch.autocast(self.ranks.context, config.precision):
            hidden = self._hidden(batch.source, batch.target_in).flatten(0, 1)
            return smoothed_loss(
                hidden,
                network.table.weight,
                None,
                batch.target_out.flatten(),
                config.label_smoothing,
                config.loss_chunk or None,
                batch.rows,
                self._of_rows,
            )

    def decode(self, batch: SourceBatch) -> List[List[int]]:
        """Translate a batch of the test part."""
        return translate_batch(self.network, batch.source, batch.source_lengths, self.words)

    def content(self) -> Dict[str, Any]:
        """What all ranks have in common, for a checkpoint."""
        return {"network": self.network.state_dict(), "kernels": self.kernels, **self.updates.content()}


def build(config: Config, data: DataSet, ranks: Ranks, saved: Mapping[str, Any], step: EagerStep) -> Training:
    """Build with a checkpoint or fresh weights, ready: warmed up by ``step`` on noise, before the clock."""
    if not saved:
        seed_dropout(config.seed, ranks)
    vocabulary = data.vocabulary.padded(config.vocabulary_multiple)
    training = Training(config, vocabulary, data.vocabulary.size, ranks, saved)
    pytorch.broadcast(training.network.parameters())
    warm_up(step, training)
    if saved:
        training.network.load_state_dict(saved["network"])
        training.updates.restore(saved)
    return training


@torch.no_grad()
def translate_batch(network: Network, source: torch.Tensor, lengths: torch.Tensor, words: int) -> List[List[int]]:
    """Translate sentences, int64 (sentences, S) with ``lengths``, EOS included; ``words``: entries to choose from."""
    config = network.config
    trains = network.training
    network.eval()
    with pytorch.autocast(source.device, config.precision):
        state = State.of(network, source, config.beam)
        found = search_best(
            config, words, lengths, state, lambda tokens, position, state: (network.next(tokens, position, state), None)
        )
    network.train(trains)
    return found


def search_best(config: Config, words: int, lengths: torch.Tensor, state: Any, step: Step) -> List[List[int]]:
    """Translate sentences of ``lengths`` by the submissions' search, whatever makes a ``step`` from a ``state``."""
    return search(
        step,
        state,
        len(lengths),
        beam=config.beam,
        longest=[limit(config, int(length)) for length in lengths.tolist()],
        rules=Rules(length_penalty(config.length_penalty, config.length_constant), shortest=1, vocabulary=words),
        device=lengths.device,
    )


def score_of(config: Config) -> Score:
    """Return the BLEU that a configuration is judged by: of its round's submission, or plain."""
    if config.bleu == "plain":
        return of_text(plain_score)
    return of_tokens(fairseq_score if config.round == "v0.5" else tokenized_score)


def warm_up(step: EagerStep, training: Training) -> None:
    """Connect the ranks and compile, by steps on noise at rate 0; weights, optimizer and generators are as before."""
    if not training.config.warm_up_steps:
        return
    batch = noise(training.config, training.vocabulary, training.ranks)
    with without_trace(training.updates, training.ranks):
        if training.config.compile:
            torch_abilities.compile_in_turns(lambda: training.loss_sum(batch).backward(), training.ranks)
            training.updates.gradients.zero_()
        for _ in range(training.config.warm_up_steps):
            step(training, batch, 0.0)
            stopping.progress()
