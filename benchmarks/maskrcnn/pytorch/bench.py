"""Speed of training step and evaluation compared with a plain PyTorch loop, in one process.

    $ python -m benchmarks.maskrcnn.pytorch.bench --config config.json --data DATA

The plain loop is model.py with PyTorch operators, without CUDA graphs, and torch.optim.SGD. Speeds are images/s. The
last line of the output is the result as JSON.
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
from benchmarks.detection.pytorch.boxes import DetectedBoxes
from benchmarks.maskrcnn.flops import training_flops
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.data import Batch, EvaluationBatch, Orders, evaluation_input, training_input
from benchmarks.maskrcnn.pytorch.evaluation import no_cudnn_benchmark, to_detections
from benchmarks.maskrcnn.pytorch.model import Model
from benchmarks.maskrcnn.pytorch.operators import OperatorSet
from benchmarks.maskrcnn.pytorch.train import build, train_step
from benchmarks.maskrcnn.schedule import Rates

TITLES = {
    "bare": "plain PyTorch loop, images/s",
    "synthetic": "training step, one batch again and again, images/s",
    "real": "training step, real data, images/s",
    "input": "input pipeline alone, images/s",
    "evaluation": "detections and masks of evaluation images, images/s",
}
EPOCHS = 2  # minimum number of epochs to run: shapes of later epochs are not known in advance
RATE = 1e-4  # small, so that weights and the number of proposals hardly change


def plain_step(config: Config, classes: int, ranks: Ranks, batch: Batch) -> Callable[[], None]:
    model = Model(replace(config, compile="none"), classes, OperatorSet({}), ranks.context)
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
    # Every shape is compiled: only the shapes of the first epochs.
    shapes = sorted({batch.shape for epoch in range(EPOCHS) for batch in orders.of_epoch(epoch)})
    training = build(config, classes, ranks, {}, shapes=shapes)
    real, loader, first = (opened.enter_context(closing(training_input(orders, ranks, 0))) for _ in range(3))
    # A real batch: of noise the losses would have other numbers of objects.
    batch = next(first)
    evaluation_batches: List[EvaluationBatch] = [
        evaluation_batch for evaluation_batch, _ in zip(evaluation_input(config, data, ranks), range(2))
    ]
    again = cycle(evaluation_batches)

    def step(batch: Batch) -> torch.Tensor:
        return train_step(training, batch, Rates(RATE, RATE))

    @no_cudnn_benchmark()
    def evaluated() -> None:
        batch = next(again)
        detected, masks = training.model.detect(batch.images, batch.sizes)
        to_detections(
            data,
            batch,
            DetectedBoxes(*(evaluation_batch.cpu() for evaluation_batch in detected)),
            masks.cpu().numpy(),
            config.edge,
        )

    loops: Dict[str, bench.Loop] = {
        "bare": bench.repeated(plain_step(config, classes, ranks, batch)),
        "synthetic": bench.training_loop(pytorch, config, ranks, step, lambda: batch),
        "real": bench.training_loop(pytorch, config, ranks, step, partial(next, real)),
        "input": bench.repeated(partial(next, loader)),
        "evaluation": bench.repeated(evaluated),
    }
    return bench.Subject(
        f"Mask R-CNN, stages {config.stages}, width {config.stem_width}, short side {config.short_side}, batch "
        f"{config.batch_size}, {config.precision}, one {config.device}",
        config.batch_size,
        loops,
        TITLES,
        samples={"evaluation": len(evaluation_batches[0].positions)},
        close=opened.close,
        flops=dict.fromkeys(
            ("bare", "synthetic"), config.batch_size * training_flops(config, classes, *batch.images.shape[2:])
        ),
    )


if __name__ == "__main__":
    bench.main(__doc__, Config, pytorch, prepare)
