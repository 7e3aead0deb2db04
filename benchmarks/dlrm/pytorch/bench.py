"""How fast the step is: synthetic data, real data, the input alone, beside plain PyTorch, in one run.

    $ python -m benchmarks.dlrm.pytorch.bench --config config.json --data DATA

Plain PyTorch is what its tutorials would write: the same network and batch with an nn.EmbeddingBag a table,
all pairs gathered by advanced indexing, torch.optim.SGD with sparse gradients. The kinds are measured in turn,
several times; the median counts. The last line of the output is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.common import configuration, torch_precision, torch_ranks
from benchmarks.common.metrics import MetricsStream
from benchmarks.common.ranks import Ranks
from benchmarks.common.torch_progress import StepReports
from benchmarks.dlrm.blocks import NUMBERS
from benchmarks.dlrm.pytorch import step as steps
from benchmarks.dlrm.pytorch.config import Config
from benchmarks.dlrm.pytorch.data import Batch, TrainingInput, free_memory, open_data
from benchmarks.dlrm.pytorch.model import ALIGNMENT, mlp

TITLES = {
    "bare": "plain PyTorch, synthetic data",
    "synthetic": "training step, synthetic data",
    "real": "training step, real data",
    "input": "input alone",
}
RATE = 0.01
Loop = Callable[[int], float]
"""Does so many steps and returns the share of the time that it waited for data."""


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
        first, second = torch.tril_indices(count, count, -1)
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, numbers: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Log-odds (rows,) of numbers (rows, 13) and indices (tables, rows)."""
        hidden = self.bottom(numbers)
        vectors = [table(one.unsqueeze(1)) for table, one in zip(self.tables, indices)]
        together = torch.stack([hidden, *[vector.to(hidden.dtype) for vector in vectors]], dim=1)
        products = torch.bmm(together, together.transpose(1, 2))
        pairs = products[:, self.first, self.second]
        padded = functional.pad(torch.cat([hidden, pairs], dim=1), (0, self.padding))
        return self.top(padded).squeeze(1)


def wait(device: torch.device) -> None:
    """Let the device finish."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def synthetic_batch(config: Config, sizes: Sequence[int], device: torch.device) -> Batch:
    """One batch of noise on the device."""
    rows = config.batch_size
    return Batch(
        torch.rand(rows, NUMBERS, device=device),
        torch.randint(0, 2, (rows,), device=device).float(),
        torch.stack([torch.randint(0, size, (rows,), device=device) for size in sizes]),
    )


def bare_loop(config: Config, sizes: Sequence[int], ranks: Ranks, batch: Batch) -> Loop:
    """The same network and batch in a plain PyTorch loop."""
    network = PlainNetwork(config, sizes).to(ranks.context)
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    scale = config.loss_scale if config.precision == "fp16" else 1.0

    def loop(count: int) -> float:
        for _ in range(count):
            optimizer.zero_grad()
            with torch_precision.autocast(ranks.context, config.precision):
                odds = network(batch.numbers, batch.indices)
            loss = functional.binary_cross_entropy_with_logits(odds.float(), batch.labels)
            (loss * scale).backward()
            optimizer.step()
        wait(ranks.context)
        return 0.0

    return loop


def training_loop(
    config: Config, sizes: Tuple[int, ...], ranks: Ranks, next_batch: Callable[[], Batch]
) -> Loop:
    """The step of train.py with its reports, on batches of ``next_batch``."""
    model = steps.build(config, sizes, ranks)
    step = steps.plain(model, config, ranks)
    if config.cuda_graph:
        step = steps.recorded(model, config, ranks, next_batch())
    stream = MetricsStream(Path("/dev/null"), 0)
    reports = StepReports(stream, ranks, config.batch_size, 1 << 30, config.log_interval)
    rate = torch.zeros((), device=ranks.context)

    def loop(count: int) -> float:
        started = time.time()
        waited = 0.0
        for number in range(count):
            before = time.time()
            batch = next_batch()
            waited += time.time() - before
            reports.add(number, step(batch, rate.fill_(RATE)), False, RATE)
        wait(ranks.context)
        return waited / (time.time() - started)

    return loop


def input_loop(next_batch: Callable[[], Batch], device: torch.device) -> Loop:
    """The input without a network."""

    def loop(count: int) -> float:
        for _ in range(count):
            next_batch()
        wait(device)
        return 1.0

    return loop


def measure(loops: Dict[str, Loop], config: Config, count: int, repeats: int) -> Tuple[Dict[str, Any], float]:
    """Rows per second of each loop, measured in turn, and the share of waiting with real data."""
    speeds: Dict[str, List[float]] = {name: [] for name in loops}
    shares = []
    for loop in loops.values():
        loop(3)
    for number in range(repeats):
        for name, loop in loops.items():
            started = time.time()
            share = loop(count)
            speeds[name].append(count * config.batch_size / (time.time() - started))
            if name == "real":
                shares.append(share)
        print(f"measurement {number + 1} of {repeats} done", file=sys.stderr)
    measured = {}
    for name, values in speeds.items():
        # Each against the bare loop of its own turn: the machine's speed drifts.
        ratios = [value / bare for value, bare in zip(values, speeds["bare"])]
        measured[name] = {
            "title": TITLES[name],
            "median": statistics.median(values),
            "least": min(values),
            "most": max(values),
            "ratio": statistics.median(ratios),
        }
    return measured, statistics.median(shares)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="resolved configuration (JSON)")
    parser.add_argument("--data", type=Path, required=True, help="folder of a prepared data set")
    parser.add_argument("--steps", type=int, default=20, help="steps of a measurement")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each kind")
    arguments = parser.parse_args()
    config = configuration.load(Config, arguments.config)
    ranks = torch_ranks.start(config.device)
    torch_precision.set_matmul(config.precision)
    data = open_data(arguments.data, config, ranks.size, free_memory(ranks))
    sizes = data.table_sizes
    batch = synthetic_batch(config, sizes, ranks.context)
    real = TrainingInput(config, data, range(len(sizes)), ranks, 0)
    alone = TrainingInput(config, data, range(len(sizes)), ranks, 0)
    loops = {
        "bare": bare_loop(config, sizes, ranks, batch),
        "synthetic": training_loop(config, sizes, ranks, lambda: batch),
        "real": training_loop(config, sizes, ranks, real.next),
        "input": input_loop(alone.next, ranks.context),
    }
    measured, input_share = measure(loops, config, arguments.steps, arguments.repeats)
    layers = " and ".join("-".join(map(str, widths)) for widths in (config.bottom_mlp, config.top_mlp))
    title = f"DLRM, MLPs {layers}, batch {config.batch_size}, {config.precision}, one {config.device}"
    torch_ranks.finish()
    print(
        json.dumps(
            {"title": title, "measured": measured, "input_share": input_share, "device": config.device}
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
