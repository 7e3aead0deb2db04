"""What a step works on: built, warmed up, carried through checkpoints; and what feeds it."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Callable, Dict, Iterator, List, Mapping

import torch

from benchmarks.common import torch_optimizers
from benchmarks.common.frameworks import pytorch
from benchmarks.common.ranks import Ranks
from benchmarks.common.torch_updates import ScaleRule, Updates
from benchmarks.gnmt.pytorch.config import Config
from benchmarks.gnmt.pytorch.model import GNMT, Decoding
from benchmarks.translation import orders
from benchmarks.translation.arrays import DataSet
from benchmarks.translation.orders import Order
from benchmarks.translation.pytorch import beam
from benchmarks.translation.pytorch.batches import (
    Batch,
    Shape,
    SourceBatch,
    TrainingInput,
    evaluation_batches,
)
from benchmarks.translation.pytorch.loss import smoothed_loss
from benchmarks.translation.vocabulary import BOS, EOS

MULTIPLES = {"fp16": 8, "bf16": 8}
"""Of the positions of a batch, as tensor cores want it."""
SEED_STRIDE = 1_000_003
"""Between the seeds of the ranks' dropout."""


class Training:
    """Network, its updates, and how a batch goes through them."""

    def __init__(self, config: Config, vocabulary: int, ranks: Ranks, kernel: str) -> None:
        self.config, self.ranks, self.vocabulary = config, ranks, vocabulary
        padded = -(-vocabulary // config.vocabulary_multiple) * config.vocabulary_multiple
        self.network = GNMT(config, padded).to(ranks.context)
        candidates = torch_optimizers.adam_candidates(
            config.learning_rate, (config.beta1, config.beta2), config.epsilon, torch_optimizers.find_apex()
        )
        rule = ScaleRule(config.loss_scale, config.loss_scale_interval, config.loss_scale_limit)
        self.updates = Updates(
            list(self.network.parameters()),
            candidates,
            kernel,
            ranks,
            clip=config.gradient_clip,
            scale=rule if config.precision == "fp16" else None,
            split=config.optimizer_kernel == "split",
        )

    def loss(self, batch: Batch) -> torch.Tensor:
        """Sum over the tokens of this rank's pairs."""
        network, config = self.network, self.config
        with pytorch.autocast(self.ranks.context, config.precision):
            hidden = network(batch.source, batch.source_lengths, batch.target_in)
            loss, _ = smoothed_loss(
                hidden.reshape(-1, config.width),
                network.classifier.weight,
                network.classifier.bias,
                batch.target_out.view(-1),
                config.label_smoothing,
                config.loss_chunk or None,
                batch.rows,
            )
        return loss

    @torch.no_grad()
    def decode(self, batch: SourceBatch) -> List[List[int]]:
        """Translate a batch by beam search."""
        config, count = self.config, len(batch.source)
        with pytorch.autocast(self.ranks.context, config.precision):
            encoded = self.network.encode(batch.source, batch.source_lengths)
            return beam.search(
                lambda tokens, position, state: state.step(tokens),
                Decoding(self.network, encoded, config.beam_size),
                count,
                beam=config.beam_size,
                longest=config.max_length_test - 1,  # BOS counts as submitted
                rules=search_rules(config, self.vocabulary),
                device=self.ranks.context,
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
    wanted = "auto" if config.optimizer_kernel == "split" else config.optimizer_kernel
    # A checkpoint's states of the generators are set when it is read.
    with torch.random.fork_rng(generators(ranks)):
        torch.manual_seed(config.seed)
        training = Training(config, vocabulary, ranks, saved.get("kernel", wanted))
    if saved:
        training.network.load_state_dict(saved["network"])
        training.updates.restore(saved)
    else:
        pytorch.broadcast(training.network.parameters())
        # The weights are the same everywhere, what dropout draws must not be.
        torch.manual_seed(config.seed + SEED_STRIDE * (1 + ranks.rank))
    return training


def generators(ranks: Ranks) -> List[torch.device]:
    """Return the devices, besides the CPU, whose generators a rank draws from."""
    return [ranks.context] if ranks.context.type == "cuda" else []


def content(training: Training) -> Dict[str, Any]:
    """What all ranks have in common."""
    return {"network": training.network.state_dict(), **training.updates.content()}


def order_of(config: Config, data: DataSet, ranks: Ranks) -> Callable[[int], Order]:
    """Return what makes the order of an epoch."""
    rule: Callable[..., Order] = partial(orders.by_sentences, buckets=config.buckets)
    if config.batching == "shards":
        rule = partial(orders.by_shards, shard_size=config.shard_size)
    size = {"batch_size": config.batch_size, "ranks": ranks.size, "longest": config.max_length_train}

    @lru_cache(maxsize=2)
    def of_epoch(epoch: int) -> Order:
        return rule(data.train.source.lengths, data.train.target.lengths, **size, seed=config.seed, epoch=epoch)

    return of_epoch


def training_input(
    config: Config, data: DataSet, orders: Callable[[int], Order], ranks: Ranks, position: int
) -> TrainingInput:
    """Return this rank's batches from the step ``position`` on."""
    return TrainingInput(data.train, orders, ranks, position, shape(config), config.prefetch)


def evaluation_input(config: Config, data: DataSet, ranks: Ranks) -> Iterator[SourceBatch]:
    """Yield this rank's share of the test sentences."""
    order = orders.for_evaluation(data.test.source.lengths, batch_size=config.eval_batch_size, ranks=ranks.size)
    return evaluation_batches(data.test.source, order, ranks, shape(config))


def shape(config: Config) -> Shape:
    """Return how batches are laid out: GNMT's source has a BOS."""
    return Shape(source_bos=True, multiple=MULTIPLES.get(config.precision, 1))


def synthetic_batch(config: Config, vocabulary: int, device: torch.device, length: int, sentences: int = 0) -> Batch:
    """One batch of noise with sides of ``length`` without padding, by default of a training step."""
    count = sentences or config.batch_size
    tokens = torch.randint(EOS + 1, vocabulary, (2, count, length), device=device)
    source, target = tokens.unbind()
    target_in = torch.cat((torch.full_like(target[:, :1], BOS), target[:, :-1]), 1)
    rows = torch.arange(target.numel(), device=device)
    lengths = torch.full((count,), length, device=device)
    return Batch(source, lengths, target_in, target, rows, target.numel(), target.numel(), count)


def warm_up(training: Training) -> None:
    """Take the memory of the largest batch, as the submissions do, and open connections; changes nothing."""
    config = training.config
    with torch.random.fork_rng(generators(training.ranks)):
        batch = synthetic_batch(config, training.vocabulary, training.ranks.context, config.max_length_train)
        for _ in range(config.warm_up_steps):
            training.updates.scaled(training.loss(batch)).backward()
    for parameter in training.network.parameters():
        parameter.grad.zero_()
    pytorch.total([0.0])
