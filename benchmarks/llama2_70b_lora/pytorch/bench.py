"""Measure the training step, compared with a plain PyTorch loop.

    $ python -m benchmarks.llama2_70b_lora.pytorch.bench --config config.json --data DATA

The plain loop uses the same network and adapters with PyTorch's dropout, the logits of all positions at once,
torch.autocast and torch.optim.AdamW, on one device. Up to two layers are measured on a GPU, four on a
CPU, with random weights. Speeds are tokens/s. The last line of the output is the result as JSON.
"""

import dataclasses
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Callable

import torch
from torch.nn import functional

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.llama.flops import adapter_flops
from benchmarks.llama.pytorch import adapters
from benchmarks.llama.pytorch.measured import for_one_rank, subject
from benchmarks.llama.pytorch.network import Network
from benchmarks.llama.pytorch.parallel import initialize
from benchmarks.llama2_70b_lora.dataset import open_data
from benchmarks.llama2_70b_lora.pytorch.config import Config
from benchmarks.llama2_70b_lora.pytorch.data import Batch, synthetic_batch, training_input
from benchmarks.llama2_70b_lora.pytorch.model import rule_of
from benchmarks.llama2_70b_lora.pytorch.train import build, mean_loss, train_step


class PlainDropout(adapters.Dropout):
    """PyTorch's dropout."""

    def of(self, hidden: torch.Tensor, adapter: int, width: int) -> torch.Tensor:
        return functional.dropout(hidden, self.rule.dropout)


def bare_step(config: Config, vocabulary: int, ranks: Ranks, batch: Batch) -> Callable[[], None]:
    """Return a plain PyTorch loop's step with the same network and batch."""
    with torch.device("meta"):
        network = Network(config.shape(vocabulary))
    adapters.add(network, rule_of(config), 0)
    initialize(network, config.initial_weights, config.seed, ranks.context)
    adapters.initialize(network, config.seed)
    plain = PlainDropout(rule_of(config), 0)
    for layer in network.layers:
        layer.self_attn.qkv_lora.dropout = layer.self_attn.o_lora.dropout = plain
    trained = list(adapters.trained(network).values())
    optimizer = torch.optim.AdamW(trained, lr=bench.RATE)

    def step() -> None:
        optimizer.zero_grad()
        for part in batch:
            with pytorch.autocast(ranks.context, config.precision):
                loss = network(part.tokens, part.labels) / part.counted
            (loss / len(batch)).backward()
        torch.nn.utils.clip_grad_norm_(trained, config.gradient_clip)
        optimizer.step()

    return step


def single_rank_config(config: Config) -> Config:
    cut = for_one_rank(config)
    return dataclasses.replace(cut, base="" if cut.layers < config.layers else cut.base)


def prepare(config: Config, ranks: Ranks, folder: Path) -> bench.Subject:
    data = open_data(folder)
    training = build(config, data, ranks, {})
    vocabulary = training.vocabulary
    synthetic = synthetic_batch(config, vocabulary, ranks)
    # The loops need more batches than an epoch has.
    numbers = -(-len(data.train) // config.batch_size)

    def evaluated() -> None:
        with torch.no_grad():
            mean_loss(training, synthetic[0])

    return subject(
        config,
        ranks,
        title=f"Llama with LoRA of rank {config.lora_rank}",
        vocabulary=vocabulary,
        synthetic=synthetic,
        bare=partial(bare_step, config, vocabulary, ranks, synthetic),
        step=lambda batch: train_step(training, batch, 0.0),
        read=lambda: training_input(config, data.train, ranks, cycle(range(numbers))),
        evaluated=evaluated,
        flops=adapter_flops(config, vocabulary, config.sequence_length),
    )


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare, for_one_rank=single_rank_config)
