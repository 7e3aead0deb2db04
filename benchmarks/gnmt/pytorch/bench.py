"""How fast the step and the translation are, next to a plain PyTorch loop, in one run.

    $ python -m benchmarks.gnmt.pytorch.bench --config config.json --data DATA

The plain loop is what one would write first: batches of any pairs, padded to their longest, nn.LSTM, attention by
broadcasting, the logits of a whole batch, torch.optim.Adam. Speeds are tokens/s of both sides, those of translations
sentences/s: batches next to one sentence after the other. The last line of the output is the result
as JSON.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Callable, Dict, Iterator, List

import numpy as np
import torch
from torch import nn

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.gnmt.pytorch import attention
from benchmarks.gnmt.pytorch.config import Config
from benchmarks.gnmt.pytorch.data import evaluation_input, order_of, shape, synthetic_batch
from benchmarks.gnmt.pytorch.model import GNMT
from benchmarks.gnmt.pytorch.train import Training, build, train_step
from benchmarks.translation.arrays import DataSet, open_data
from benchmarks.translation.orders import Order
from benchmarks.translation.pytorch.batches import Batch, SourceBatch, TrainingInput
from benchmarks.translation.pytorch.loss import plain_loss

DECODED = 32
"""Sentences of a batch that is translated, at most."""
MARKS = 3
"""Tokens of a pair besides those of the data: BOS and EOS of the source, EOS of the target."""
TITLES = {
    "bare": "plain PyTorch loop, tokens/s",
    "synthetic": "training step, synthetic data, tokens/s",
    "real": "training step, real data, tokens/s",
    "input": "input pipeline alone, tokens/s",
    "one by one": "translation of one sentence at a time, sentences/s",
    "evaluation": "translation in batches, sentences/s, next to one at a time",
}


def any_order(config: Config, data: DataSet, ranks: Ranks) -> Callable[[int], Order]:
    """Return batches of any pairs of the admitted lengths."""
    longer = np.maximum(data.train.source.lengths, data.train.target.lengths)
    fitting = np.flatnonzero(longer + 2 <= config.max_length_train)
    size = config.batch_size * ranks.size
    steps = len(fitting) // size

    def order_of(epoch: int) -> Order:
        chosen = np.random.RandomState(epoch).permutation(fitting)[: steps * size]
        return Order(chosen, np.arange(0, len(chosen) + 1, config.batch_size), steps, 0.0)

    return order_of


def plain_step(config: Config, vocabulary: int, ranks: Ranks, next_batch: Callable[[], Batch]) -> Callable[[], None]:
    """A step of a plain loop with the same network."""
    network = GNMT(config, vocabulary).to(ranks.context)
    network.decoder.attention.scores = attention.plain
    optimizer = torch.optim.Adam(network.parameters(), lr=config.learning_rate)

    def step() -> None:
        batch = next_batch()
        optimizer.zero_grad()
        with pytorch.autocast(ranks.context, config.precision):
            logits = network.classifier(network(batch.source, batch.source_lengths, batch.target_in))
        loss = plain_loss(logits.flatten(0, 1), batch.target_out.flatten(), config.label_smoothing)
        (loss / batch.sentences).backward()
        nn.utils.clip_grad_norm_(network.parameters(), config.gradient_clip)
        optimizer.step()

    return step


def singles(batch: SourceBatch) -> Iterator[SourceBatch]:
    """Its sentences without padding, again and again."""
    lengths = batch.source_lengths.tolist()
    parts: List[SourceBatch] = []
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        parts.append(SourceBatch(batch.indices[one], batch.source[one, :length], batch.source_lengths[one]))
    return cycle(parts)


def decoded_at_once(config: Config) -> int:
    """Return the sentences of a batch: on a CPU fewer, which takes seconds for them."""
    return config.eval_batch_size if config.device == "gpu" else min(DECODED, config.eval_batch_size)


def translation_loops(subject: Training, data: DataSet, ranks: Ranks) -> Dict[str, bench.Loop]:
    """Translate a batch of the test part, and its sentences one at a time."""
    config = replace(subject.config, eval_batch_size=decoded_at_once(subject.config))
    batch = next(iter(evaluation_input(config, data, ranks)))
    alone = singles(batch)

    def decode(one: SourceBatch) -> None:
        subject.network.eval()
        subject.decode(one)
        subject.network.train()

    return {
        "one by one": bench.repeated(lambda: decode(next(alone))),
        "evaluation": bench.repeated(lambda: decode(batch)),
    }


def prepare(config: Config, ranks: Ranks, folder: Path) -> bench.Subject:
    """Build what is measured."""
    data = open_data(folder)
    subject = build(config, data.vocabulary.size, ranks, {})
    opened = ExitStack()
    real, alone, any_pairs = (
        opened.enter_context(closing(TrainingInput(data.train, order(config, data, ranks), ranks, 0, layout)))
        for order, layout in (
            (order_of, shape(config)),
            (order_of, shape(config)),
            (any_order, shape(config)._replace(multiple=1)),
        )
    )
    length = round(float(np.mean([data.train.source.lengths.mean() + 2, data.train.target.lengths.mean() + 1])))
    noise = synthetic_batch(config, data.vocabulary.size, ranks.context, length)
    tokens = config.batch_size * (data.train.source.lengths.mean() + data.train.target.lengths.mean() + MARKS)

    def step(batch: Batch) -> torch.Tensor:
        return train_step(subject, batch, bench.RATE)

    loops = {
        "bare": bench.repeated(plain_step(config, data.vocabulary.size, ranks, any_pairs.next)),
        "synthetic": bench.training_loop(pytorch, config, ranks, step, lambda: noise),
        "real": bench.training_loop(pytorch, config, ranks, step, real.next),
        "input": bench.repeated(alone.next),
        **translation_loops(subject, data, ranks),
    }
    title = (
        f"GNMT, width {config.width}, {config.layers} layers, vocabulary {data.vocabulary.size:,}, batch "
        f"{config.batch_size}, {config.precision}, one {config.device}"
    )
    decoded = min(decoded_at_once(config), len(data.test))
    samples = {"synthetic": 2 * length * config.batch_size, "one by one": 1, "evaluation": decoded}
    against = {"evaluation": "one by one"}
    return bench.Subject(
        title, round(tokens), loops, TITLES, samples=samples, against=against, close=opened.close, unit="tokens"
    )


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare)
