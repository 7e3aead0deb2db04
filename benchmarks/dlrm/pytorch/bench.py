"""Training speed with synthetic and real data, input speed, and plain PyTorch for comparison, in one process.

    $ python -m benchmarks.dlrm.pytorch.bench --config config.json --data DATA

Plain PyTorch follows its tutorials: the same network and batch with an nn.EmbeddingBag per table, all pairs by
advanced indexing, torch.optim.SGD with sparse gradients. The last line of the output is the result as JSON.
"""

from functools import partial
from pathlib import Path
from typing import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.dlrm.blocks import NUMBERS
from benchmarks.dlrm.flops import training_flops
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import Batch, free_memory, open_data, synthetic_batch, training_batches
from benchmarks.dlrm.pytorch.model import mlp
from benchmarks.dlrm.pytorch.operators import ALIGNMENT
from benchmarks.dlrm.pytorch.train import build, train_step, warm_up


class PlainNetwork(nn.Module):
    """The same network, table by table."""

    def __init__(self, config: Config, sizes: Sequence[int]) -> None:
        super().__init__()
        width, count = config.bottom_mlp[-1], 1 + len(sizes)
        pairs = count * (count - 1) // 2
        self.padding = -(width + pairs) % ALIGNMENT
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, width, mode="sum", sparse=True) for size in sizes)
        self.bottom = mlp((NUMBERS, *config.bottom_mlp), last_is_linear=False)
        self.top = mlp((width + pairs + self.padding, *config.top_mlp), last_is_linear=True)
        self.register_buffer("pairs", torch.tril_indices(count, count, -1))

    def forward(self, numbers: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        hidden = self.bottom(numbers)
        vectors = [table(rows.unsqueeze(1)) for table, rows in zip(self.tables, indices)]
        together = torch.stack([hidden, *[vector.to(hidden.dtype) for vector in vectors]], dim=1)
        products = torch.bmm(together, together.transpose(1, 2))
        pairs = products[:, self.pairs[0], self.pairs[1]]
        padded = functional.pad(torch.cat([hidden, pairs], dim=1), (0, self.padding))
        return self.top(padded).squeeze(1)


def bare_step(config: Config, sizes: Sequence[int], ranks: Ranks, batch: Batch) -> Callable[[], None]:
    """Return a plain PyTorch training step with the same network and batch; sparse gradients need int64."""
    network = PlainNetwork(config, sizes).to(ranks.context)
    optimizer = torch.optim.SGD(network.parameters(), lr=bench.RATE)
    scale = config.loss_scale if config.precision == "fp16" else 1.0
    indices = batch.indices.long()

    def step() -> None:
        optimizer.zero_grad()
        with pytorch.autocast(ranks.context, config.precision):
            logits = network(batch.numbers, indices)
        loss = functional.binary_cross_entropy_with_logits(logits.float(), batch.labels)
        (loss * scale).backward()
        optimizer.step()

    return step


def prepare(config: Config, ranks: Ranks, folder: Path) -> bench.Subject:
    data = open_data(folder, config, ranks.size, free_memory(ranks))
    sizes = data.table_sizes
    batch = synthetic_batch(config, sizes, ranks)
    training = build(config, sizes, ranks, {})
    evaluated = synthetic_batch(config, sizes, ranks, config.eval_batch_size)
    warm_up(training, sizes)
    real, loader = (training_batches(config, data, range(len(sizes)), ranks, 0) for _ in range(2))
    rate = torch.zeros((), device=ranks.context)

    def close() -> None:
        for batches in (real, loader):
            batches.close()

    def step(batch: Batch) -> torch.Tensor:
        return train_step(training, batch, rate.fill_(bench.RATE))

    loops = {
        "bare": bench.repeated(bare_step(config, sizes, ranks, batch)),
        "synthetic": bench.training_loop(pytorch, config, ranks, step, lambda: batch),
        "real": bench.training_loop(pytorch, config, ranks, step, partial(next, real)),
        "input": bench.repeated(partial(next, loader)),
        bench.EVALUATION: bench.repeated(lambda: training.scores(evaluated)),
    }
    layers = " and ".join("-".join(map(str, widths)) for widths in (config.bottom_mlp, config.top_mlp))
    title = f"DLRM, MLPs {layers}, batch {config.batch_size}, {config.precision}, one {config.device}"
    titles = {"bare": "plain PyTorch, synthetic data", "input": "input alone"}
    samples = {bench.EVALUATION: config.eval_batch_size}
    flops = dict.fromkeys(("bare", "synthetic", "real"), config.batch_size * training_flops(config, len(sizes)))
    return bench.Subject(title, config.batch_size, loops, titles, samples, close=close, flops=flops)


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare)
