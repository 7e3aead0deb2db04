"""What a step works on: the network and the updates of its weights; built, warmed up; and how it translates."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping

import torch

from benchmarks.common import torch_optimizers
from benchmarks.common.frameworks import pytorch
from benchmarks.common.ranks import Ranks
from benchmarks.common.torch_updates import ScaleRule, Updates
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.model import Network, State
from benchmarks.translation.arrays import DataSet
from benchmarks.translation.orders import Order, by_tokens, for_evaluation
from benchmarks.translation.pytorch.batches import Batch
from benchmarks.translation.pytorch.beam import Rules, length_penalty, search
from benchmarks.translation.pytorch.loss import smoothed_loss
from benchmarks.translation.vocabulary import BOS, EOS

Step = Callable[[Batch, float], torch.Tensor]
"""Train on a batch at a learning rate; return this rank's share of the mean loss over all tokens, times the ranks."""


class Training:
    """The network on this rank's device, and its optimizer."""

    def __init__(self, config: Config, vocabulary: int, ranks: Ranks, saved: Mapping[str, Any], longest: int) -> None:
        """Draw the weights, or take those of a checkpoint; ``longest`` is the positions of the longest sentence."""
        self.config, self.ranks = config, ranks
        torch.manual_seed(config.seed)
        self.network = Network(config, vocabulary, longest).to(ranks.context)
        self.hidden: Any = self.network
        if config.compile:
            self.hidden = torch.compile(self.network, dynamic=True)
        betas = (config.beta1, config.beta2)
        self.updates = Updates(
            list(self.network.parameters()),
            torch_optimizers.adam_candidates(config.learning_rate, betas, config.epsilon, torch_optimizers.find_apex()),
            saved.get("kernel", config.optimizer_kernel),
            ranks,
            clip=config.gradient_clip or None,
            scale=ScaleRule(config.loss_scale, config.loss_scale_window) if config.precision == "fp16" else None,
            split=config.split_optimizer,
        )
        if saved:
            self.network.load_state_dict(saved["network"])
            self.updates.restore(saved)
        pytorch.broadcast(self.network.parameters())
        # Each rank drops other values; a checkpoint brings the generator's state.
        if not saved:
            torch.manual_seed(config.seed + (ranks.rank + 1) * 1_000_003)

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """The smoothed loss of this rank's tokens, summed."""
        config, network = self.config, self.network
        with pytorch.autocast(self.ranks.context, config.precision):
            hidden = self.hidden(batch.source, batch.target_in).flatten(0, 1)
            loss, _ = smoothed_loss(
                hidden,
                network.table.weight,
                None,
                batch.target_out.flatten(),
                config.label_smoothing,
                config.loss_chunk or None,
                batch.rows,
            )
        return loss

    def content(self) -> Dict[str, Any]:
        """What all ranks have in common, for a checkpoint."""
        return {"network": self.network.state_dict(), **self.updates.content()}


def order_of(config: Config, data: DataSet, ranks: Ranks) -> Callable[[int], Order]:
    """Return what gives the training batches of an epoch."""
    return lambda epoch: by_tokens(
        data.train.source.lengths,
        data.train.target.lengths,
        tokens=config.batch_size,
        ranks=ranks.size,
        seed=config.seed,
        epoch=epoch,
        longest=config.max_length,
        length_multiple=config.length_multiple,
    )


def evaluation_order(config: Config, data: DataSet, ranks: Ranks) -> Order:
    """Return the batches of the test part."""
    return for_evaluation(data.test.source.lengths, batch_size=config.eval_batch_size, ranks=ranks.size)


def limit(config: Config, length: int) -> int:
    """Return the most tokens of a translation, EOS included, of a source of ``length`` tokens, EOS included."""
    return int(config.longest_factor * length) + config.longest_offset


def longest_of(config: Config, data: DataSet) -> int:
    """Return the positions of the longest sentence that is trained on, read or written."""
    read = int(data.test.source.lengths.max()) + 1
    return max(config.max_length + config.length_multiple, read, limit(config, read) + 1)


def vocabulary_of(config: Config, data: DataSet) -> int:
    """Return the entries of the table, padding included."""
    return data.vocabulary.padded(config.vocabulary_multiple)


@torch.no_grad()
def translate_batch(network: Network, source: torch.Tensor, lengths: torch.Tensor, words: int) -> List[List[int]]:
    """Translate sentences, int64 (sentences, S) with ``lengths``, EOS included; ``words``: entries to choose from."""
    config = network.config
    trains = network.training
    network.eval()
    with pytorch.autocast(source.device, config.precision):
        found = search(
            lambda tokens, position, state: (network.next(tokens, position, state), None),
            State(network, source, config.beam),
            len(source),
            beam=config.beam,
            longest=[limit(config, int(length)) for length in lengths.tolist()],
            rules=Rules(length_penalty(config.length_penalty, config.length_constant), shortest=1, vocabulary=words),
            device=source.device,
        )
    network.train(trains)
    return found


def noise(config: Config, vocabulary: int, ranks: Ranks) -> Batch:
    """A batch as full as they come, of pairs of half the longest length."""
    length = max(2, config.max_length // 2)
    sentences = max(1, config.batch_size // length)
    generator = torch.Generator().manual_seed(config.seed)
    tokens = torch.randint(EOS + 1, vocabulary, (2, sentences, length), generator=generator)
    tokens[:, :, -1] = EOS
    target_in = tokens[1].roll(1, dims=1)
    target_in[:, 0] = BOS
    lengths = torch.full((sentences,), length)
    count = sentences * length
    tensors = (tokens[0], lengths, target_in, tokens[1], torch.arange(count))
    on_device = (tensor.to(ranks.context) for tensor in tensors)
    return Batch(*on_device, tokens=count, all_tokens=count * ranks.size, sentences=sentences * ranks.size)


def warm_up(step: Step, training: Training, vocabulary: int) -> None:
    """Connect the ranks and compile on noise, before the clock (MLPerf since v0.6); nothing of it stays.

    Adam's moments and the generators are put back; the weights stay as they are at rate 0.
    """
    generators = torch.get_rng_state(), torch.cuda.get_rng_state() if training.ranks.context.type == "cuda" else None
    batch = noise(training.config, vocabulary, training.ranks)
    kept = training.updates.keep()
    for _ in range(training.config.warm_up_steps):
        step(batch, 0.0)
    training.updates.put_back(kept)
    torch.set_rng_state(generators[0])
    if generators[1] is not None:
        torch.cuda.set_rng_state(generators[1])
