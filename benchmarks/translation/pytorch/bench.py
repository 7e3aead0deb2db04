"""Loops of both translation benches: training steps, input, translation, and a plain loop."""

from contextlib import ExitStack, closing
from functools import partial
from itertools import cycle
from typing import Any, Callable, Iterator

import numpy as np
import torch

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.translation.arrays import DataSet
from benchmarks.translation.orders import Order
from benchmarks.translation.pytorch.batches import Batch, Shape, SourceBatch, training_input
from benchmarks.translation.pytorch.evaluation import Decode
from benchmarks.translation.pytorch.loss import plain_loss
from benchmarks.translation.pytorch.state import Training

TITLES = {
    "bare": "plain PyTorch loop, tokens/s",
    "synthetic": "training step, synthetic data, tokens/s",
    "real": "training step, real data, tokens/s",
    "input": "input pipeline alone, tokens/s",
    "one by one": "translation of one sentence at a time, sentences/s",
    "evaluation": "translation in batches, sentences/s, next to one at a time",
}
NextBatch = Callable[[], Batch]


def subject(
    training: Training,
    data: DataSet,
    orders: Callable[[int], Order],
    shape: Shape,
    *,
    longest: int,
    sentences: int,
    tokens: float,
    synthetic: Batch,
    synthetic_tokens: int,
    synthetic_flops: float,
    step: Callable[[Batch], torch.Tensor],
    plain: torch.nn.Module,
    logits: Callable[[Batch], torch.Tensor],
    decode: Decode,
    translated: SourceBatch,
    title: str,
) -> bench.Subject:
    """Return a translator's bench subject.

    Args:
        training: network and optimizer.
        data: real pairs.
        orders: batches in an epoch.
        shape: layout of the batches.
        longest: maximum tokens per side without marks.
        sentences: pairs per batch of the plain loop.
        tokens: per batch of real data.
        synthetic: batch.
        synthetic_tokens: its tokens.
        synthetic_flops: model FLOPs for a training step with it.
        step: trains on a batch.
        plain: network of the plain loop.
        logits: (B, T, vocabulary) of the plain network.
        decode: translates a batch.
        translated: test sentences to translate as a batch and one at a time.
        title: of the measurement.
    """
    opened = ExitStack()
    config, ranks = training.config, training.ranks

    def batches(orders: Callable[[int], Order], shape: Shape) -> NextBatch:
        stream = training_input(data.train, orders, ranks, 0, shape, config.prefetch)
        return partial(next, opened.enter_context(closing(stream)))

    def evaluated(batch: SourceBatch) -> Any:
        training.network.eval()
        hypotheses = decode(batch)
        training.network.train()
        return hypotheses

    any_pairs = batches(any_order(data, longest, sentences, ranks.size), shape._replace(multiple=1))
    single_batches = singles(translated)
    loops = {
        "bare": bench.repeated(plain_step(config, plain, logits, any_pairs)),
        "synthetic": bench.training_loop(pytorch, config, ranks, step, lambda: synthetic),
        "real": bench.training_loop(pytorch, config, ranks, step, batches(orders, shape)),
        "input": bench.repeated(batches(orders, shape)),
        "one by one": bench.repeated(lambda: evaluated(next(single_batches))),
        "evaluation": bench.repeated(lambda: evaluated(translated)),
    }
    return bench.Subject(
        f"{title}, {config.precision}, one {config.device}",
        round(tokens),
        loops,
        TITLES,
        samples={
            "synthetic": synthetic_tokens,
            "one by one": 1,
            "evaluation": len(translated.indices),
        },
        against={"evaluation": "one by one"},
        close=opened.close,
        unit="tokens",
        flops={"synthetic": synthetic_flops},
    )


def plain_step(
    config: Any, network: torch.nn.Module, logits: Callable[[Batch], torch.Tensor], next_batch: NextBatch
) -> Callable[[], None]:
    # Return a plain training step with full-batch logits and torch.optim.Adam.
    optimizer = torch.optim.Adam(network.parameters(), bench.RATE, (config.beta1, config.beta2), config.epsilon)

    def step() -> None:
        batch = next_batch()
        optimizer.zero_grad()
        with pytorch.autocast(batch.source.device, config.precision):
            outputs = logits(batch)
        loss = plain_loss(outputs.flatten(0, 1), batch.target_out.flatten(), config.label_smoothing)
        (loss / batch.all_tokens).backward()
        if config.gradient_clip:
            torch.nn.utils.clip_grad_norm_(network.parameters(), config.gradient_clip)
        optimizer.step()

    return step


def any_order(data: DataSet, longest: int, sentences: int, ranks: int) -> Callable[[int], Order]:
    # Return unsorted batches with a fixed number of pairs.
    fitting = np.flatnonzero(np.maximum(data.train.source.lengths, data.train.target.lengths) <= longest)
    steps = len(fitting) // (sentences * ranks)

    def order_of(epoch: int) -> Order:
        selected = np.random.RandomState(epoch).permutation(fitting)[: steps * sentences * ranks]
        return Order(selected, np.arange(0, len(selected) + 1, sentences), steps)

    return order_of


def singles(batch: SourceBatch) -> Iterator[SourceBatch]:
    # Cycle through the sentences without padding.
    rows = [(slice(row, row + 1), length) for row, length in enumerate(batch.source_lengths.tolist())]
    return cycle(
        [SourceBatch(batch.indices[row], batch.source[row, :length], batch.source_lengths[row]) for row, length in rows]
    )
