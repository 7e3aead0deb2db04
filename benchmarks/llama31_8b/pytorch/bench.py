"""How fast the step is, next to a plain PyTorch loop, in one run.

    $ python -m benchmarks.llama31_8b.pytorch.bench --config config.json --data DATA

The plain loop is what one would write first: the same network with the logits of all positions at once and keys and
values repeated for each head of queries, torch.autocast, torch.optim.AdamW, on one device. Of a network that no device
holds with it some layers are measured: each layer is like the others. Speeds are tokens/s. The last line of the output
is the result as JSON.
"""

from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch
from torch.nn import functional

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.llama import order
from benchmarks.llama.flops import training_flops
from benchmarks.llama.pytorch.measured import Measured, for_one_rank, subject
from benchmarks.llama.pytorch.network import Network
from benchmarks.llama.pytorch.parallel import initialize
from benchmarks.llama31_8b.dataset import open_data
from benchmarks.llama31_8b.pytorch.config import Config
from benchmarks.llama31_8b.pytorch.data import Batch, synthetic_batch, training_input
from benchmarks.llama31_8b.pytorch.train import build, train_step

STEPS = 64  # whose samples the order has, at least


def repeated(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    keys, values = (tensor.repeat_interleave(queries.shape[1] // tensor.shape[1], dim=1) for tensor in (keys, values))
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


def plain(network: Network) -> None:
    for layer in network.layers:
        layer.self_attn.attend = repeated


def bare_step(
    config: Any, vocabulary: int, ranks: Ranks, batch: Batch, change: Callable[[Network], None]
) -> Callable[[], None]:
    """A step of a plain PyTorch loop with the same network, which ``change`` makes plain, and batch."""
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


class Benched(NamedTuple):
    """What the benches of a pretraining differ in."""

    title: str
    build: Callable[..., Any]
    step: Callable[[Any, Batch, float], Any]
    plain: Callable[[Network], None]


def pretraining(benched: Benched, config: Any, ranks: Ranks, folder: Path) -> bench.Subject:
    data = open_data(folder)
    vocabulary = data.padded_vocabulary(config.vocabulary_multiple)
    training = benched.build(config, vocabulary, ranks, {})
    synthetic = synthetic_batch(config, vocabulary, ranks)
    samples = order.shuffled(data.train.lengths, config.sequence_length, STEPS * config.batch_size, config.seed)
    # The loops take more batches than the order has.
    numbers = len(samples) // config.batch_size

    def evaluated() -> None:
        with torch.no_grad():
            training.network(synthetic[0].tokens, synthetic[0].labels, synthetic[0].positions)

    measured = Measured(
        benched.title,
        vocabulary,
        synthetic,
        bare_step(config, vocabulary, ranks, synthetic, benched.plain),
        lambda batch: benched.step(training, batch, 0.0),
        lambda: training_input(config, data.train, samples, ranks, cycle(range(numbers))),
        evaluated,
        training_flops(config, vocabulary, config.sequence_length),
    )
    return subject(config, ranks, measured)


prepare = partial(pretraining, Benched("Llama", build, train_step, plain))

if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare, for_one_rank=for_one_rank)
