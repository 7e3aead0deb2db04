"""What a step works on: built, warmed up, and carried through checkpoints."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping

import torch

from benchmarks.common import stopping, torch_optimizers
from benchmarks.common.frameworks import pytorch
from benchmarks.common.ranks import Ranks
from benchmarks.common.torch_generators import seed_dropout
from benchmarks.common.torch_updates import ScaleRule, Updates
from benchmarks.gnmt.pytorch.config import Config
from benchmarks.gnmt.pytorch.data import synthetic_batch
from benchmarks.gnmt.pytorch.model import GNMT, Decoding
from benchmarks.translation.pytorch import beam, operators
from benchmarks.translation.pytorch.batches import Batch, SourceBatch
from benchmarks.translation.pytorch.loss import smoothed_loss


class Training:
    """Network, its updates, and how a batch goes through them."""

    def __init__(self, config: Config, vocabulary: int, ranks: Ranks, saved: Mapping[str, Any]) -> None:
        self.config, self.ranks, self.vocabulary = config, ranks, vocabulary
        padded = -(-vocabulary // config.vocabulary_multiple) * config.vocabulary_multiple
        self.network = GNMT(config, padded).to(ranks.context)
        sizes = {"loss": {"rows": operators.LOSS_ROWS, "vocabulary": padded}}
        dtype = pytorch.DTYPES[config.precision]
        self.kernels, chosen = operators.choose(config.kernels, sizes, ranks, dtype, saved.get("kernels", {}))
        self._of_rows = chosen["loss"]
        candidates = torch_optimizers.adam_candidates(
            config.learning_rate, (config.beta1, config.beta2), config.epsilon, torch_optimizers.find_apex()
        )
        rule = ScaleRule(config.loss_scale, config.loss_scale_interval, config.loss_scale_limit)
        self.updates = Updates(
            list(self.network.parameters()),
            candidates,
            saved.get("kernel", config.optimizer_kernel),
            ranks,
            clip=config.gradient_clip,
            scale=rule if config.precision == "fp16" else None,
            split=config.split_optimizer,
        )

    def loss(self, batch: Batch) -> torch.Tensor:
        """Sum over the tokens of this rank's pairs."""
        network, config = self.network, self.config
        with pytorch.autocast(self.ranks.context, config.precision):
            hidden = network(batch.source, batch.source_lengths, batch.target_in)
            return smoothed_loss(
                hidden.reshape(-1, config.width),
                network.classifier.weight,
                network.classifier.bias,
                batch.target_out.view(-1),
                config.label_smoothing,
                config.loss_chunk or None,
                batch.rows,
                self._of_rows,
            )

    @torch.no_grad()
    def decode(self, batch: SourceBatch) -> List[List[int]]:
        """Translate a batch by beam search."""
        with pytorch.autocast(self.ranks.context, self.config.precision):
            encoded = self.network.encode(batch.source, batch.source_lengths)
            state = Decoding(self.network, encoded, self.config.beam_size)
            return search(
                self.config, self.vocabulary, batch, state, lambda tokens, position, state: state.step(tokens)
            )


def search(config: Config, vocabulary: int, batch: SourceBatch, state: Any, step: beam.Step) -> List[List[int]]:
    """Translate a batch by the submissions' beam search, whatever makes a ``step`` from a ``state``."""
    return beam.search(
        step,
        state,
        len(batch.source),
        beam=config.beam_size,
        longest=config.max_length_test - 1,  # BOS counts as submitted
        rules=search_rules(config, vocabulary),
        device=batch.source.device,
    )


def search_rules(config: Config, vocabulary: int) -> beam.Rules:
    """Return how the submissions search (seq2seq/inference/beam_search.py); a length counts BOS."""
    return beam.Rules(
        normalize=beam.length_penalty(config.length_penalty, config.length_constant + 1),
        coverage=beam.coverage_penalty(config.coverage_penalty) if config.coverage_penalty else None,
        ended_stay=True,
        attention_stays=True,
        vocabulary=vocabulary,
    )


def build(config: Config, vocabulary: int, ranks: Ranks, saved: Mapping[str, Any]) -> Training:
    """Build with what ``content`` and the updates saved, or with rank 0's fresh weights."""
    # A checkpoint's states of the generators are set when it is read.
    with torch.random.fork_rng(generators(ranks)):
        torch.manual_seed(config.seed)
        training = Training(config, vocabulary, ranks, saved)
    if saved:
        training.network.load_state_dict(saved["network"])
        training.updates.restore(saved)
    else:
        pytorch.broadcast(training.network.parameters())
        seed_dropout(config.seed, ranks)
    return training


def generators(ranks: Ranks) -> List[torch.device]:
    """Return the devices, besides the CPU, whose generators a rank draws from."""
    return [ranks.context] if ranks.context.type == "cuda" else []


def content(training: Training) -> Dict[str, Any]:
    """What all ranks have in common."""
    return {"network": training.network.state_dict(), "kernels": training.kernels, **training.updates.content()}


def warm_up(training: Training) -> None:
    """Take the memory of the largest batch, as the submissions do, and open connections; changes nothing."""
    config = training.config
    with torch.random.fork_rng(generators(training.ranks)):
        batch = synthetic_batch(config, training.vocabulary, training.ranks.context, config.max_length_train)
        for _ in range(config.warm_up_steps):
            training.updates.scaled(training.loss(batch)).backward()
            stopping.progress()
    for parameter in training.network.parameters():
        parameter.grad.zero_()
    pytorch.total([0.0])
