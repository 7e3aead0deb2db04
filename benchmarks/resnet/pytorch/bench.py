"""How fast the step is: synthetic data, real data, the input alone, next to a bare loop, in one run.

    $ python -m benchmarks.resnet.pytorch.bench --config config.json --data DATA

The bare loop is what a tutorial would write: the same network and batch, torch's cross-entropy and SGD, compiled
if the configuration says so; no reports. The last line of the output is the result as JSON.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Callable

import torch
from torch.nn import functional

from benchmarks.common import bench, torch_abilities
from benchmarks.common.frameworks import pytorch
from benchmarks.common.ranks import Ranks
from benchmarks.resnet.architecture import bench_title
from benchmarks.resnet.inputs import TrainingInput, bench_loops
from benchmarks.resnet.pytorch import data as tensors
from benchmarks.resnet.pytorch import model
from benchmarks.resnet.pytorch.config import Config
from benchmarks.resnet.pytorch.data import Batch
from benchmarks.resnet.pytorch.train import train_step, whole_step
from benchmarks.resnet.pytorch.training import build, synthetic_batch


def bare_step(config: Config, device: torch.device, batch: Batch) -> Callable[[], None]:
    """A step of a plain loop with the same network and batch."""
    network = model.place(model.build(config), config, device)
    sgd = torch.optim.SGD(network.parameters(), lr=0.01, momentum=config.momentum, weight_decay=config.weight_decay)
    if config.compile != "none":
        network = torch.compile(network, mode=config.compile, dynamic=False)

    def step() -> None:
        sgd.zero_grad()
        with pytorch.autocast(device, config.precision):
            loss = functional.cross_entropy(network(batch[0]), batch[1])
        loss.backward()
        sgd.step()

    return step


def prepare(config: Config, ranks: Ranks, data: Path) -> bench.Subject:
    """What is measured."""
    config = torch_abilities.settle(config, ranks)
    batch = synthetic_batch(config, ranks.context)
    real = TrainingInput(tensors, config, data, ranks)
    step = partial(train_step, build(config, ranks, {}, whole_step), rate=bench.RATE)
    bare = bare_step(config, ranks.context, batch)
    loops = bench_loops(pytorch, config, ranks, bare, step, batch, real)
    compiled = "eager" if config.compile == "none" else f"compiled ({config.compile})"
    titles = {"bare": f"bare PyTorch loop, {compiled}, synthetic data"}
    return bench.Subject(bench_title(config, compiled), config.batch_size, loops, titles)


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare)
