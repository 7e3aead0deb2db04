"""How fast the step and the translation are, next to a plain PyTorch loop, in one run.

    $ python -m benchmarks.transformer.pytorch.bench --config config.json --data DATA

The plain loop is what one would write first: nn.Transformer on batches of any pairs, as many as a batch of ours has on
average, padded to their longest; the logits of a whole batch, torch.optim.Adam. Speeds are target tokens/s, those of
translations sentences/s: batches of eval_batch_size next to one sentence after the other. The last line of the output
is the result as JSON.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Callable

import torch
from torch import nn
from torch.nn import functional

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.transformer.pytorch.config import Config
from benchmarks.transformer.pytorch.data import evaluation_input, order_of
from benchmarks.transformer.pytorch.model import sinusoids
from benchmarks.transformer.pytorch.search import decode
from benchmarks.transformer.pytorch.train import build, train_step
from benchmarks.translation.arrays import open_data
from benchmarks.translation.orders import MARKS
from benchmarks.translation.pytorch.batches import PLAIN, Batch, synthetic_batch
from benchmarks.translation.pytorch.bench import Parts, subject
from benchmarks.translation.vocabulary import PAD


class PlainNetwork(nn.Module):
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


def plain_step(
    config: Config, network: PlainNetwork, ranks: Ranks, next_batch: Callable[[], Batch]
) -> Callable[[], None]:
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


def prepare(config: Config, ranks: Ranks, folder: Path) -> bench.Subject:
    data = open_data(folder)
    training = build(config, data.vocabulary.size, ranks, {})
    orders, positions = order_of(config, data, ranks), len(training.network.positions)
    first, steps = orders(0), -(-len(data.test) // (config.eval_batch_size * ranks.size))
    length = max(2, config.max_length // 2)
    synthetic = synthetic_batch(training.words, max(1, config.batch_size // length), length, ranks)
    network = PlainNetwork(config, len(training.network.table.weight), positions).to(ranks.context)
    parts = Parts(
        training,
        data,
        orders,
        PLAIN,
        longest=config.max_length - MARKS,
        sentences=max(1, round(len(first.sentences) / first.steps)),
        tokens=(data.train.target.lengths[first.sentences].sum() + len(first.sentences)) / first.steps,
        synthetic=synthetic,
        synthetic_tokens=synthetic.tokens,
        step=lambda batch: train_step(training, batch, 0.0),
        plain_step=partial(plain_step, config, network, ranks),
        decode=partial(decode, training.network, training.words),
        # The longest come first.
        translated=next(islice(evaluation_input(config, data, ranks), steps // 2, None)),
        title=f"Transformer, {config.layers} + {config.layers} layers, width {config.width}, "
        f"{training.words:,} entries, {config.batch_size} positions",
    )
    return subject(parts)


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare)
