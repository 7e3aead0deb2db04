"""Measure the training step and the evaluation, compared with a plain PyTorch loop.

    $ python -m benchmarks.bert_squad.pytorch.bench --config config.json --data DATA

The plain loop is similar to run_squad.py: nn.TransformerEncoder on windows padded to the maximum length, and
torch.optim.AdamW. Speeds are sequences/s. The last line of the output is the result as JSON.
"""

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Callable

import torch

from benchmarks.bert_squad.arrays import open_data
from benchmarks.bert_squad.pytorch.config import Config
from benchmarks.bert_squad.pytorch.data import (
    Batch,
    evaluation_batches,
    steps_per_epoch,
    synthetic_batch,
    training_input,
)
from benchmarks.bert_squad.pytorch.model import Network
from benchmarks.bert_squad.pytorch.train import build, logits, train_step
from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.language.flops import answering_flops
from benchmarks.language.pytorch.encoder import lengths_of
from benchmarks.language.pytorch.plain import PlainEncoder, plain_step

TITLES = {
    "bare": "plain PyTorch loop on padded windows, sequences/s",
    "synthetic": "training step, synthetic data without padding, sequences/s",
    "real": "training step, real data, sequences/s",
    "input": "input pipeline alone, sequences/s",
    "evaluation": "answering in batches, sequences/s",
}


def prepare(config: Config, ranks: Ranks, folder: Path) -> bench.Subject:
    data = open_data(folder)
    training = build(config, data, ranks, {})
    steps = steps_per_epoch(config, data, ranks)
    inputs = ExitStack()

    def opened(config: Config = config) -> Callable[[], Batch]:
        return partial(next, inputs.enter_context(closing(training_input(config, data, steps, ranks, 0))))

    def step(batch: Batch) -> torch.Tensor:
        return train_step(training, batch, 0.0)

    synthetic = synthetic_batch(config, training.vocabulary, ranks)
    evaluation = list(evaluation_batches(config, data.test, ranks))
    answered = next(islice(evaluation, len(evaluation) // 2, None))  # the longest come first
    network, plain = Network(config, training.vocabulary, "padded"), opened(replace(config, cuda_graph=False))
    network.encoder = PlainEncoder(config, training.vocabulary, config.sequence_length)
    loops = {
        "bare": bench.repeated(plain_step(config, network, network.loss_sum, ranks.context, lambda: [plain()])),
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
    samples = {"evaluation": len(answered.start)}
    flops = {"synthetic": answering_flops(config, lengths_of(synthetic.rows))}
    return bench.Subject(title, config.batch_size, loops, TITLES, samples=samples, close=inputs.close, flops=flops)


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare)
