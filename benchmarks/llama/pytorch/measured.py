"""Loops of the Llama benches."""

import dataclasses
from contextlib import ExitStack, closing
from functools import lru_cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any, Callable, Generator, Sequence

import torch

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.llama import order
from benchmarks.llama.dataset import open_data
from benchmarks.llama.flops import training_flops
from benchmarks.llama.pytorch.data import Batch, synthetic_batch, training_input
from benchmarks.llama.pytorch.network import Network
from benchmarks.llama.pytorch.parallel import initialize

STEPS = 64  # minimum number of steps in the sample order
MOST_LAYERS = {"cpu": 4, "gpu": 2}


def for_one_rank(config: Any) -> Any:
    """Return the configuration for one rank, with up to MOST_LAYERS layers.

    All layers are alike, so a few are enough to measure the speed. The training step and the plain loop together need
    28 bytes per weight (weights, gradients and moments): 42 GB for two layers of Llama 3.1 8B, 66 GB for gpt-oss-20b.
    """
    shared = [field.name for field in dataclasses.fields(config) if field.name.endswith("_parallelism")]
    batch, layers = max(1, config.batch_size // config.group), min(config.layers, MOST_LAYERS[config.device])
    return dataclasses.replace(config, batch_size=batch, layers=layers, **dict.fromkeys(shared, 1))


def subject(
    config: Any,
    ranks: Ranks,
    *,
    title: str,
    vocabulary: int,
    synthetic: Sequence[Any],
    bare: Callable[[], Callable[[], None]],
    step: Callable[[Any], Any],
    read: Callable[[], Generator[Any, None, None]],
    evaluated: Callable[[], None],
    flops: float,
) -> bench.Subject:
    """Return the bench subject of a Llama benchmark.

    Args:
        config: for one rank.
        ranks: one.
        title: start of the title.
        vocabulary: rows of the embedding.
        synthetic: a step's micro-batches, the argument for ``step``.
        bare: builds the plain loop and returns its step.
        step: trains on a step's micro-batches.
        read: starts an infinite stream of batches.
        evaluated: evaluates the first micro-batch of ``synthetic``.
        flops: per sample.
    """
    inputs = ExitStack()

    def batches() -> Callable[[], Any]:
        return partial(next, inputs.enter_context(closing(read())))

    trained = partial(bench.training_loop, pytorch, config, ranks, step)
    built = lru_cache(None)(bare)  # for its first step: `--only synthetic` needs neither its time nor its memory
    loops = {
        "bare": bench.repeated(lambda: built()()),
        "synthetic": trained(lambda: synthetic),
        "real": trained(batches()),
        "input": bench.repeated(batches()),
        bench.EVALUATION: bench.repeated(evaluated),
    }
    return bench.Subject(
        f"{title}, {config.layers} layers, width {config.width}, {vocabulary:,} entries, "
        f"{config.batch_size} samples of {config.sequence_length:,} tokens, {config.precision}, one {config.device}",
        config.batch_size * config.sequence_length,
        loops,
        {"bare": "plain PyTorch loop, synthetic data"},
        {bench.EVALUATION: synthetic[0].tokens.numel()},
        close=inputs.close,
        unit="tokens",
        flops=dict.fromkeys(("bare", "synthetic", "real"), config.batch_size * flops),
    )


def bare_step(
    config: Any, vocabulary: int, ranks: Ranks, batch: Batch, change: Callable[[Network], None]
) -> Callable[[], None]:
    """Return a plain PyTorch loop's step with the same network and batch; ``change`` replaces optimized parts."""
    with torch.device("meta"):
        network = Network(config.shape(vocabulary))
    initialize(network, config.initial_weights, config.seed, ranks.context)
    change(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=bench.RATE)

    def step() -> None:
        optimizer.zero_grad()
        for part in batch:
            with pytorch.autocast(ranks.context, config.precision):
                loss = network(part.tokens, part.labels) / part.labels.numel()
            (loss / len(batch)).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), config.gradient_clip)
        optimizer.step()

    return step


def pretraining(
    title: str,
    build: Callable[..., Any],
    step: Callable[[Any, Batch, float], Any],
    plain: Callable[[Network], None],
    config: Any,
    ranks: Ranks,
    folder: Path,
) -> bench.Subject:
    data = open_data(folder)
    vocabulary = data.padded_vocabulary(config.vocabulary_multiple)
    training = build(config, vocabulary, ranks, {})
    synthetic = synthetic_batch(config, vocabulary, ranks)
    samples = order.shuffled(data.train.lengths, config.sequence_length, STEPS * config.batch_size, config.seed)
    # The loops take more batches than the order has.
    numbers = len(samples) // config.batch_size

    def evaluated() -> None:
        with torch.no_grad():
            training.network(synthetic[0].tokens, synthetic[0].labels, synthetic[0].positions)

    return subject(
        config,
        ranks,
        title=title,
        vocabulary=vocabulary,
        synthetic=synthetic,
        bare=partial(bare_step, config, vocabulary, ranks, synthetic, plain),
        step=lambda batch: step(training, batch, 0.0),
        read=lambda: training_input(config, data.train, samples, ranks, cycle(range(numbers))),
        evaluated=evaluated,
        flops=training_flops(config, vocabulary, config.sequence_length),
    )
