"""Speed of the training step compared with a plain PyTorch loop of the same network, in one process.

    $ python -m benchmarks.ssd.pytorch.bench --config config.json --data DATA

The plain loop uses the same network in fp32 and NCHW, without CUDA graphs, and torch.optim.SGD. Speeds are images/s.
The last line of the output is the result as JSON.
"""

from dataclasses import replace
from pathlib import Path
from typing import Callable

import torch

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import capabilities
from benchmarks.detection.annotations import open_data
from benchmarks.ssd.flops import training_flops
from benchmarks.ssd.pytorch import model, norms
from benchmarks.ssd.pytorch.config import Config
from benchmarks.ssd.pytorch.data import Batch, TrainingInput, synthetic_batch, synthetic_images
from benchmarks.ssd.pytorch.train import build, train_step

TITLES = {"bare": "plain PyTorch loop, synthetic data"}


def plain_step(config: Config, classes: int, device: torch.device) -> Callable[[], None]:
    config = replace(config, layout="NCHW", pad_channels=False, precision="fp32")
    network = model.SSD(config, classes, norms.norm_of(None, device)).to(device)
    optimizer = torch.optim.SGD(
        network.parameters(), lr=bench.RATE, momentum=config.momentum, weight_decay=config.weight_decay
    )
    batch = synthetic_batch(config, classes, device)

    def step() -> None:
        optimizer.zero_grad()
        network.loss(*batch).backward()
        optimizer.step()

    return step


def prepare(config: Config, ranks: Ranks, folder: Path) -> bench.Subject:
    config = capabilities.resolve(config, ranks)
    data = open_data(folder)
    classes = len(data.categories) + 1
    training = build(config, classes, ranks, {})
    noise = synthetic_batch(config, classes, ranks.context)
    images = synthetic_images(config, ranks.context, config.eval_batch_size)
    real, loader = (TrainingInput(config, data.train, ranks) for _ in range(2))

    def step(batch: Batch) -> torch.Tensor:
        return train_step(training, batch, bench.RATE)

    def evaluated() -> None:
        training.network.eval()
        model.detect(training.network, images, training.defaults, config)
        training.network.train()

    loops = {
        "bare": bench.repeated(plain_step(config, classes, ranks.context)),
        "synthetic": bench.training_loop(pytorch, config, ranks, step, lambda: noise),
        "real": bench.training_loop(pytorch, config, ranks, step, real.next),
        "input": bench.repeated(loader.next),
        bench.EVALUATION: bench.repeated(evaluated),
    }
    compiled = "eager" if config.compile == "none" else f"compiled ({config.compile})"
    title = (
        f"SSD, {config.image_size} x {config.image_size}, width {config.width}, batch {config.batch_size}, "
        f"{config.precision}, {config.layout}, {compiled}, one {config.device}"
    )
    samples = {bench.EVALUATION: config.eval_batch_size}
    flops = dict.fromkeys(("bare", "synthetic", "real"), config.batch_size * training_flops(config, classes))
    return bench.Subject(title, config.batch_size, loops, TITLES, samples, flops=flops)


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare)
