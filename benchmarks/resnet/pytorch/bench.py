"""Training speed with synthetic and real data, input speed, and a bare loop for comparison, in one process.

    $ python -m benchmarks.resnet.pytorch.bench --config config.json --data DATA

The bare loop follows PyTorch's tutorials: the same network and batch, torch's cross-entropy and SGD, compiled if
configured; no reports. The last line of the output is the result as JSON.
"""

from functools import partial
from pathlib import Path
from typing import Callable

import torch
from torch.nn import functional

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import capabilities
from benchmarks.resnet.architecture import bench_title
from benchmarks.resnet.inputs import bench_subject
from benchmarks.resnet.pytorch import data as tensors
from benchmarks.resnet.pytorch import model
from benchmarks.resnet.pytorch.config import Config
from benchmarks.resnet.pytorch.data import Batch, synthetic_batch
from benchmarks.resnet.pytorch.train import Training, build, train_step


def bare_step(config: Config, device: torch.device, batch: Batch) -> Callable[[], None]:
    network = model.to_device(model.build(config), config, device)
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


@torch.no_grad()
def evaluation_step(training: Training, images: torch.Tensor, labels: torch.Tensor) -> None:
    network = training.network.eval()
    with pytorch.autocast(images.device, training.config.precision):
        logits = network(images)
    (logits.argmax(dim=1) == labels).sum()
    network.train()


def prepare(config: Config, ranks: Ranks, data: Path) -> bench.Subject:
    config = capabilities.resolve(config, ranks)
    batch, evaluated = (synthetic_batch(config, ranks.context, size) for size in (0, config.eval_batch_size))
    training = build(config, ranks, {})
    compiled = "eager" if config.compile == "none" else f"compiled ({config.compile})"
    return bench_subject(
        pytorch,
        tensors,
        config,
        ranks,
        data,
        batch=batch,
        bare=bare_step(config, ranks.context, batch),
        step=partial(train_step, training, rate=bench.RATE),
        evaluation=partial(evaluation_step, training, *evaluated),
        titles=(bench_title(config, compiled), f"bare PyTorch loop, {compiled}, synthetic data"),
    )


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare)
