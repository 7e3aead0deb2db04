"""How fast the step and the evaluation are, next to a plain PyTorch loop, in one run.

    $ python -m benchmarks.maskrcnn.pytorch.bench --config config.json --data DATA

The plain loop is model.py with PyTorch's operators, one launch after the other, and torch.optim.SGD.
Speeds are images/s. The last line of the output is the result as JSON.
"""

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Callable, Dict, List

import torch

from benchmarks.common.checks import bench
from benchmarks.common.frameworks import pytorch
from benchmarks.common.run.ranks import Ranks
from benchmarks.detection.annotations import open_data
from benchmarks.detection.pytorch.boxes import Found
from benchmarks.maskrcnn.flops import training_flops
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.data import Batch, EvaluationBatch, Orders, evaluation_input, training_input
from benchmarks.maskrcnn.pytorch.evaluation import in_images
from benchmarks.maskrcnn.pytorch.model import Model
from benchmarks.maskrcnn.pytorch.operators import Chosen
from benchmarks.maskrcnn.pytorch.train import build, train_step
from benchmarks.maskrcnn.schedule import Rates

TITLES = {
    "bare": "plain PyTorch loop, images/s",
    "synthetic": "training step, one batch again and again, images/s",
    "real": "training step, real data, images/s",
    "input": "input pipeline alone, images/s",
    "evaluation": "detections and masks of evaluation images, images/s",
}
EPOCHS = 2  # at least, that are read: of more the shapes are not known in advance
RATE = 1e-4  # so small that the weights, and with them the number of proposals, hardly change


def plain_step(config: Config, classes: int, ranks: Ranks, batch: Batch) -> Callable[[], None]:
    model = Model(replace(config, compile="none"), classes, Chosen({}), ranks.context)
    trained = [parameter for parameter in model.network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE, momentum=config.momentum, weight_decay=config.weight_decay)

    def step() -> None:
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()

    return step


def prepare(config: Config, ranks: Ranks, folder: Path) -> bench.Subject:
    data = open_data(folder)
    classes = len(data.categories) + 1
    orders, opened = Orders(config, data.train, ranks), ExitStack()
    # Each shape takes time to compile: those that the first epochs have.
    shapes = sorted({batch.shape for epoch in range(EPOCHS) for batch in orders.of_epoch(epoch)})
    training = build(config, classes, ranks, {}, shapes=shapes)
    real, alone, first = (opened.enter_context(closing(training_input(orders, ranks, 0))) for _ in range(3))
    # A real batch: of noise the losses would have other numbers of objects.
    batch = next(first)
    some: List[EvaluationBatch] = [each for each, _ in zip(evaluation_input(config, data, ranks), range(2))]
    again = cycle(some)

    def step(batch: Batch) -> torch.Tensor:
        return train_step(training, batch, Rates(RATE, RATE))

    def evaluated() -> None:
        batch = next(again)
        found, masks = training.model.detect(batch.images, batch.sizes)
        in_images(data, batch, Found(*(each.cpu() for each in found)), masks.cpu().numpy(), config.edge)

    loops: Dict[str, bench.Loop] = {
        "bare": bench.repeated(plain_step(config, classes, ranks, batch)),
        "synthetic": bench.training_loop(pytorch, config, ranks, step, lambda: batch),
        "real": bench.training_loop(pytorch, config, ranks, step, partial(next, real)),
        "input": bench.repeated(partial(next, alone)),
        "evaluation": bench.repeated(evaluated),
    }
    title = (
        f"Mask R-CNN, stages {config.stages}, width {config.stem_width}, short side {config.short_side}, batch "
        f"{config.batch_size}, {config.precision}, one {config.device}"
    )
    return bench.Subject(
        title,
        config.batch_size,
        loops,
        TITLES,
        samples={"evaluation": len(some[0].positions)},
        close=opened.close,
        flops=dict.fromkeys(
            ("bare", "synthetic"), config.batch_size * training_flops(config, classes, *batch.images.shape[2:])
        ),
    )


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare)
