"""How fast the step is, next to a plain PyTorch loop of the same network, in one run.

    $ python -m benchmarks.ssd.pytorch.bench --config config.json --data DATA

The plain loop is written as MLPerf's reference and torchvision's detection loops do it: images NCHW in fp32, objects
matched with the default boxes image by image in PyTorch, hard negatives by sorting twice, torch.optim.SGD. Speeds are
images/s. The last line of the output is the result as JSON.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Callable, List, Tuple

import torch
from torch.nn import functional

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import abilities
from benchmarks.detection.annotations import open_data
from benchmarks.ssd.pytorch import model, norms
from benchmarks.ssd.pytorch.coding import match
from benchmarks.ssd.pytorch.config import Config
from benchmarks.ssd.pytorch.data import Batch, TrainingInput, synthetic_batch, synthetic_images
from benchmarks.ssd.pytorch.default_boxes import default_boxes
from benchmarks.ssd.pytorch.train import Training, build, train_step

TITLES = {"bare": "plain PyTorch loop, synthetic data"}
OBJECTS = 7
"""In an image: COCO has 7.3 on average."""
Targets = List[Tuple[torch.Tensor, torch.Tensor]]


def sorted_loss(predictions: torch.Tensor, offsets: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss with the rank of each box's loss by two sorts, as the reference has it."""
    positive = labels > 0
    count = positive.sum(1)
    distance = functional.smooth_l1_loss(predictions[..., :4], offsets, reduction="none").sum(2)
    entropy = functional.cross_entropy(predictions[..., 4:].transpose(1, 2), labels, reduction="none")
    _, order = entropy.masked_fill(positive, 0.0).sort(dim=1, descending=True)
    _, rank = order.sort(dim=1)
    negative = rank < (3 * count).clamp(max=labels.shape[1])[:, None]
    total = (positive * distance + entropy * (positive.float() + negative.float())).sum(1)
    return (total * (count > 0) / count.float().clamp(min=1e-6)).mean()


def targets_of(config: Config, classes: int, device: torch.device) -> Targets:
    """Objects of noise for each image of a batch."""
    found = []
    for _ in range(config.batch_size):
        corner, size = torch.rand(OBJECTS, 2) * 0.7, 0.05 + torch.rand(OBJECTS, 2) * 0.25
        boxes = torch.cat((corner, corner + size), 1).to(device)
        found.append((boxes, torch.randint(1, classes, (OBJECTS,)).to(device)))
    return found


def plain_step(config: Config, classes: int, device: torch.device) -> Callable[[], None]:
    """A step of a plain loop with the same network."""
    config = replace(config, layout="NCHW", pad_channels=False)
    network = model.build(config, classes, norms.norm_of(None, device)).to(device)
    optimizer = torch.optim.SGD(
        network.parameters(), lr=bench.RATE, momentum=config.momentum, weight_decay=config.weight_decay
    )
    defaults = torch.from_numpy(default_boxes(config.image_size, config.box_scales)).float().to(device)
    images = synthetic_images(replace(config, precision="fp32"), device, config.batch_size)
    objects = targets_of(config, classes, device)

    def step() -> None:
        offsets, labels = (torch.stack(each) for each in zip(*(match(*each, defaults) for each in objects)))
        optimizer.zero_grad()
        loss = sorted_loss(network(images), offsets, labels)
        loss.backward()
        optimizer.step()

    return step


def evaluated(training: Training, images: torch.Tensor) -> None:
    """Detect objects in a batch."""
    training.network.eval()
    training.detect(images)
    training.network.train()


def prepare(config: Config, ranks: Ranks, folder: Path) -> bench.Subject:
    """Build what is measured."""
    config = abilities.settle(config, ranks)
    data = open_data(folder)
    classes = len(data.categories) + 1
    training = build(config, classes, ranks, {})
    noise = synthetic_batch(config, classes, ranks.context)
    images = synthetic_images(config, ranks.context, config.eval_batch_size)
    real, alone = (TrainingInput(config, data.train, ranks) for _ in range(2))

    def step(batch: Batch) -> torch.Tensor:
        return train_step(training, batch, bench.RATE)

    loops = {
        "bare": bench.repeated(plain_step(config, classes, ranks.context)),
        "synthetic": bench.training_loop(pytorch, config, ranks, step, lambda: noise),
        "real": bench.training_loop(pytorch, config, ranks, step, real.next),
        "input": bench.repeated(alone.next),
        bench.EVALUATION: bench.repeated(lambda: evaluated(training, images)),
    }
    compiled = "eager" if config.compile == "none" else f"compiled ({config.compile})"
    title = (
        f"SSD, {config.image_size} x {config.image_size}, width {config.width}, batch {config.batch_size}, "
        f"{config.precision}, {config.layout}, {compiled}, one {config.device}"
    )
    samples = {bench.EVALUATION: config.eval_batch_size}
    return bench.Subject(title, config.batch_size, loops, TITLES, samples)


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare)
