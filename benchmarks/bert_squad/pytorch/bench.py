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
    steps_per_epoch,
    synthetic_batch,
)
from benchmarks.bert_squad.pytorch.train import build, logits, train_step
from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.language.pytorch.plain import PlainEncoder, tables

TITLES = {
    "bare": "plain PyTorch loop on padded windows, sequences/s",
    "synthetic": "training step, synthetic data without padding, sequences/s",
    "real": "training step, real data, sequences/s",
    "input": "input pipeline alone, sequences/s",
    "evaluation": "answering in batches, sequences/s",
}


def plain_step(config: Config, vocabulary: int, ranks: Ranks, next_batch: Callable[[], Batch]) -> Callable[[], None]:
    encoder = PlainEncoder(config, vocabulary)
    network = nn.ModuleList([encoder, nn.Linear(config.width, 2)]).to(ranks.context)
    optimizer = torch.optim.AdamW(network.parameters(), bench.RATE, (config.beta1, config.beta2), config.epsilon)

    def step() -> None:
        batch = next_batch()
        optimizer.zero_grad()
        with pytorch.autocast(ranks.context, config.precision):
            both = network[1](encoder(*tables(batch.rows, config.sequence_length)))
        first, last = both.float().unbind(2)
        loss = functional.cross_entropy(first, batch.start) + functional.cross_entropy(last, batch.end)
        (loss / 2).backward()
        nn.utils.clip_grad_norm_(network.parameters(), config.gradient_clip or float("inf"))
        optimizer.step()

    return step


def prepare(config: Config, ranks: Ranks, folder: Path) -> bench.Subject:
    data = open_data(folder)
    training = build(config, data, ranks, {})
    steps = steps_per_epoch(config, data, ranks)
    inputs = ExitStack()

    def opened() -> Callable[[], Batch]:
        return inputs.enter_context(closing(TrainingInput(config, data, steps, ranks, 0))).next

    def step(batch: Batch) -> torch.Tensor:
        return train_step(training, batch, 0.0)

    synthetic = synthetic_batch(config, training.vocabulary, ranks)
    evaluation = list(evaluation_batches(config, data.test, ranks))
    answered = next(islice(evaluation, len(evaluation) // 2, None))  # the longest come first
    loops = {
        "bare": bench.repeated(plain_step(config, training.vocabulary, ranks, opened())),
        "synthetic": bench.training_loop(pytorch, config, ranks, step, lambda: synthetic),
        "real": bench.training_loop(pytorch, config, ranks, step, opened()),
        "input": bench.repeated(opened()),
        "evaluation": bench.repeated(lambda: logits(training, answered).cpu()),
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
