"""How fast the step and the answering are, next to a plain PyTorch loop, in one run.

    $ python -m benchmarks.bert_squad.pytorch.bench --config config.json --data DATA

The plain loop is what one would write first, as run_squad.py does: nn.TransformerEncoder on windows that are all padded
to the longest length, the loss over padding too, torch.optim.AdamW. Speeds are sequences/s. The last line of the output
is the result as JSON.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Callable

import torch
from torch import nn
from torch.nn import functional

from benchmarks.bert_squad.arrays import open_data
from benchmarks.bert_squad.pytorch.config import Config
from benchmarks.bert_squad.pytorch.data import (
    Batch,
    TrainingInput,
    evaluation_batches,
    noise,
    steps_per_epoch,
)
from benchmarks.bert_squad.pytorch.train import build, train_step
from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks

TITLES = {
    "bare": "plain PyTorch loop on padded windows, sequences/s",
    "synthetic": "training step, noise without padding, sequences/s",
    "real": "training step, real data, sequences/s",
    "input": "input pipeline alone, sequences/s",
    "evaluation": "answering in batches, sequences/s",
}


class PlainNetwork(nn.Module):
    """The same network by PyTorch's own modules."""

    def __init__(self, config: Config, vocabulary: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, config.width, padding_idx=0)
        self.places = nn.Embedding(config.positions, config.width)
        self.segments = nn.Embedding(2, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        layer = nn.TransformerEncoderLayer(
            config.width, config.heads, config.inner_width, config.dropout, "gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.span = nn.Linear(config.width, 2)

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """Logits (B, length, 2)."""
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        embedded = self.dropout(self.norm(self.words(tokens) + places + self.segments(segments)))
        found: torch.Tensor = self.span(self.layers(embedded, src_key_padding_mask=~there))
        return found


def plain_step(
    config: Config, network: PlainNetwork, ranks: Ranks, next_batch: Callable[[], Batch]
) -> Callable[[], None]:
    """A step of a plain loop."""
    optimizer = torch.optim.AdamW(network.parameters(), bench.RATE, (config.beta1, config.beta2), config.epsilon)

    def step() -> None:
        batch = next_batch()
        size = (len(batch), config.sequence_length)
        owners = batch.wide // batch.rows.longest
        tokens, segments = (torch.zeros(size, dtype=torch.int64, device=ranks.context) for _ in range(2))
        there = torch.zeros(size, dtype=torch.bool, device=ranks.context)
        tokens[owners, batch.rows.positions] = batch.rows.tokens
        segments[owners, batch.rows.positions] = batch.rows.segments
        there[owners, batch.rows.positions] = True
        optimizer.zero_grad()
        with pytorch.autocast(ranks.context, config.precision):
            first, last = network(tokens, segments, there).float().unbind(2)
        loss = functional.cross_entropy(first, batch.start) + functional.cross_entropy(last, batch.end)
        (loss / 2).backward()
        nn.utils.clip_grad_norm_(network.parameters(), config.gradient_clip or float("inf"))
        optimizer.step()

    return step


def prepare(config: Config, ranks: Ranks, folder: Path) -> bench.Subject:
    """Build what is measured."""
    data = open_data(folder)
    training = build(config, data, ranks, {})
    steps = steps_per_epoch(config, data, ranks)
    inputs = ExitStack()

    def opened() -> Callable[[], Batch]:
        return inputs.enter_context(closing(TrainingInput(config, data, steps, ranks, 0))).next

    def step(batch: Batch) -> torch.Tensor:
        return train_step(training, batch, 0.0)

    synthetic = noise(config, training.vocabulary, ranks)
    network = PlainNetwork(config, training.vocabulary).to(ranks.context)
    evaluation = list(evaluation_batches(config, data.test, ranks))
    answered = next(islice(evaluation, len(evaluation) // 2, None))  # the longest come first
    loops = {
        "bare": bench.repeated(plain_step(config, network, ranks, opened())),
        "synthetic": bench.training_loop(pytorch, config, ranks, step, lambda: synthetic),
        "real": bench.training_loop(pytorch, config, ranks, step, opened()),
        "input": bench.repeated(opened()),
        "evaluation": bench.repeated(lambda: training.logits(answered).cpu()),
    }
    padding = 1 - data.train.lengths.mean() / config.sequence_length
    title = (
        f"BERT on SQuAD, {config.layers} layers, width {config.width}, {config.sequence_length} tokens, of which "
        f"{padding:.0%} would be padding, {config.batch_size} windows, {config.precision}, one {config.device}"
    )
    samples = {"evaluation": len(answered)}
    return bench.Subject(title, config.batch_size, loops, TITLES, samples=samples, close=inputs.close)


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare)
