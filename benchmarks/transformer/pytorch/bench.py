"""How fast the step and the translation are, next to a plain PyTorch loop, in one run.

    $ python -m benchmarks.transformer.pytorch.bench --config config.json --data DATA

The plain loop is what one would write first: nn.Transformer on batches of any pairs, as many as a batch of ours has on
average, padded to their longest; the logits of a whole batch, torch.optim.Adam. Speeds are target tokens/s, those of
translations sentences/s: batches of eval_batch_size next to one sentence after the other. The last line of the output
is the result as JSON.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, closing
from itertools import cycle, islice
from pathlib import Path
from typing import Callable, Dict, Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.data import evaluation_order, noise, order_of
from benchmarks.transformer.pytorch.model import sinusoids
from benchmarks.transformer.pytorch.train import Training, build, train_step
from benchmarks.translation.arrays import DataSet, open_data
from benchmarks.translation.orders import MARKS, Order
from benchmarks.translation.pytorch.batches import Batch, SourceBatch, TrainingInput, evaluation_batches
from benchmarks.translation.vocabulary import PAD

TITLES = {
    "bare": "plain PyTorch loop, tokens/s",
    "synthetic": "training step, synthetic data, tokens/s",
    "real": "training step, real data, tokens/s",
    "input": "input pipeline alone, tokens/s",
    "one by one": "translation of one sentence at a time, sentences/s",
    "evaluation": "translation in batches, sentences/s, next to one at a time",
}


class PlainNetwork(nn.Module):
    """The same network by PyTorch's own module."""

    def __init__(self, config: Config, vocabulary: int, longest: int) -> None:
        super().__init__()
        self.scale, self.dropout = math.sqrt(config.width), config.dropout
        self.table = nn.Embedding(vocabulary, config.width, padding_idx=PAD)
        nn.init.normal_(self.table.weight, std=config.width**-0.5)
        self.register_buffer("positions", sinusoids(longest, config.width))
        self.layers = nn.Transformer(
            config.width,
            config.heads,
            config.layers,
            config.layers,
            config.inner_width,
            config.dropout,
            batch_first=True,
            norm_first=config.norm == "pre",
        )
        for layer in self.layers.modules():
            if isinstance(layer, nn.MultiheadAttention):
                layer.dropout = config.attention_dropout
            elif isinstance(layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
                layer.dropout.p = config.relu_dropout

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """(sentences, length, width)."""
        return functional.dropout(self.table(tokens) * self.scale + self.positions[: tokens.shape[1]], self.dropout)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Logits (sentences, T, vocabulary)."""
        future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=source.device).triu(1)
        absent = source == PAD
        hidden = self.layers(
            self.embed(source),
            self.embed(target),
            tgt_mask=future,
            src_key_padding_mask=absent,
            memory_key_padding_mask=absent,
        )
        return hidden @ self.table.weight.t()


def any_order(config: Config, data: DataSet, sentences: int) -> Callable[[int], Order]:
    """Return batches of so many pairs of any of the admitted lengths."""
    longer = np.maximum(data.train.source.lengths, data.train.target.lengths) + MARKS
    fitting = np.flatnonzero(longer <= config.max_length)
    steps = len(fitting) // sentences

    def order_of(epoch: int) -> Order:
        chosen = np.random.RandomState(epoch).permutation(fitting)[: steps * sentences]
        return Order(chosen, np.arange(0, len(chosen) + 1, sentences), steps, 0.0)

    return order_of


def plain_step(
    config: Config, network: PlainNetwork, ranks: Ranks, next_batch: Callable[[], Batch]
) -> Callable[[], None]:
    """A step of a plain loop."""
    optimizer = torch.optim.Adam(network.parameters(), bench.RATE, (config.beta1, config.beta2), config.epsilon)

    def step() -> None:
        batch = next_batch()
        optimizer.zero_grad()
        with pytorch.autocast(ranks.context, config.precision):
            logits = network(batch.source, batch.target_in).flatten(0, 1).float()
        smoothing = {"ignore_index": PAD, "label_smoothing": config.label_smoothing}
        functional.cross_entropy(logits, batch.target_out.flatten(), **smoothing).backward()
        optimizer.step()

    return step


def singles(batch: SourceBatch) -> Iterator[SourceBatch]:
    """Its sentences without padding, again and again."""
    parts = [slice(row, row + 1) for row in range(len(batch.indices))]
    lengths = batch.source_lengths.tolist()
    return cycle(
        SourceBatch(batch.indices[part], batch.source[part, :length], batch.source_lengths[part])
        for part, length in zip(parts, lengths)
    )


def translation_loops(training: Training, data: DataSet, order: Order, ranks: Ranks) -> Dict[str, bench.Loop]:
    """Translate the sentences of one batch of the test part, all together and one at a time."""
    batches = evaluation_batches(data.test.source, order, ranks)
    batch = next(islice(batches, order.steps // 2, None))  # the longest come first
    alone = singles(batch)
    return {
        "one by one": bench.repeated(lambda: training.decode(next(alone))),
        "evaluation": bench.repeated(lambda: training.decode(batch)),
    }


def prepare(config: Config, ranks: Ranks, folder: Path) -> bench.Subject:
    """Build what is measured."""
    data = open_data(folder)
    training = build(config, data, ranks, {})
    orders = order_of(config, data, ranks)
    first, lengths = orders(0), data.train.target.lengths
    tokens = round((lengths[first.sentences].sum() + len(first.sentences)) / first.steps)
    pairs = max(1, round(len(first.sentences) / first.steps))
    inputs = ExitStack()

    def opened(order: Callable[[int], Order]) -> Callable[[], Batch]:
        batches = inputs.enter_context(closing(TrainingInput(data.train, order, ranks, 0, ahead=config.prefetch)))
        return batches.next

    def step(batch: Batch) -> torch.Tensor:
        return train_step(training, batch, 0.0)

    synthetic = noise(config, training.vocabulary, ranks)
    network = PlainNetwork(config, training.vocabulary, len(training.network.positions)).to(ranks.context)
    evaluation = evaluation_order(config, data, ranks)
    loops = {
        "bare": bench.repeated(plain_step(config, network, ranks, opened(any_order(config, data, pairs)))),
        "synthetic": bench.training_loop(pytorch, config, ranks, step, lambda: synthetic),
        "real": bench.training_loop(pytorch, config, ranks, step, opened(orders)),
        "input": bench.repeated(opened(orders)),
        **translation_loops(training, data, evaluation, ranks),
    }
    title = (
        f"Transformer, {config.layers} + {config.layers} layers, width {config.width}, {training.words:,} entries, "
        f"{config.batch_size} positions, {config.precision}, one {config.device}"
    )
    decoded = int(np.diff(evaluation.bounds)[evaluation.steps // 2])
    samples = {"synthetic": synthetic.tokens, "one by one": 1, "evaluation": decoded}
    against = {"evaluation": "one by one"}
    return bench.Subject(
        title, tokens, loops, TITLES, samples=samples, against=against, close=inputs.close, unit="tokens"
    )


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare)
