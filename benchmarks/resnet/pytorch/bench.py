"""How fast the step is: synthetic data, real data, the input alone, beside a bare PyTorch loop, in one run.

    $ python -m benchmarks.resnet.pytorch.bench --config config.json --data DATA

The bare loop is what a tutorial would write: the same network, layout, precision and torch.compile, a plain
cross-entropy, torch.optim.SGD as it comes, no DistributedDataParallel, no CUDA graph, no reports. The kinds are
measured in turn, several times; the median counts. The last line of the output is the result as JSON.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Callable

import torch
from torch.nn import functional

from benchmarks.common import configuration, torch_ranks
from benchmarks.common.benching import Loop, measure, parse_arguments
from benchmarks.common.metrics import MetricsStream
from benchmarks.common.progress import StepReports
from benchmarks.common.ranks import Ranks
from benchmarks.common.torch_precision import autocast
from benchmarks.resnet.pytorch import model, optimizer, step
from benchmarks.resnet.pytorch.config import Config
from benchmarks.resnet.pytorch.data import Batch, training_input
from benchmarks.resnet.pytorch.progress import LossSums


def wait(device: torch.device) -> None:
    """Wait for the device to finish its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bare_loop(config: Config, device: torch.device, batch: Batch) -> Loop:
    """The same network and batch in a plain loop."""
    network = model.place(model.build(config), config, device)
    sgd = torch.optim.SGD(
        network.parameters(), lr=0.01, momentum=config.momentum, weight_decay=config.weight_decay
    )
    if config.compile != "none":
        network = torch.compile(network, mode=config.compile, dynamic=False)

    def steps(count: int) -> float:
        for _ in range(count):
            sgd.zero_grad()
            with autocast(device, config.precision):
                loss = functional.cross_entropy(network(batch[0]), batch[1])
            loss.backward()
            sgd.step()
        wait(device)
        return 0.0

    return steps


def training_loop(config: Config, ranks: Ranks, next_batch: Callable[[], Batch]) -> Loop:
    """The step of train.py with its reports, on batches of ``next_batch``."""
    network = model.place(model.build(config), config, ranks.context)
    trainer = optimizer.build(network, config)
    parallel = step.parallel(network, config, ranks)
    graphed = step.warm_up(parallel, network, trainer, config, ranks.context)
    reports = StepReports(MetricsStream(Path("/dev/null"), 0), config, ranks.size, 1 << 30, LossSums(ranks))

    def steps(count: int) -> float:
        started = time.time()
        waited = 0.0
        for number in range(count):
            trainer.set_learning_rate(0.01)
            before = time.time()
            images, labels = next_batch()
            waited += time.time() - before
            if graphed is None:
                loss = step.forward_backward(parallel, trainer, config, images, labels)
            else:
                loss = graphed.replay(images, labels)
            trainer.step()
            reports.add(number, loss, False, 0.01)
        wait(ranks.context)
        return waited / (time.time() - started)

    return steps


def input_loop(next_batch: Callable[[], Batch], device: torch.device) -> Loop:
    """The input without a network."""

    def steps(count: int) -> float:
        for _ in range(count):
            next_batch()
        wait(device)
        return 1.0

    return steps


def main() -> int:
    arguments = parse_arguments(__doc__)
    config = configuration.load(Config, arguments.config)
    step.set_up(config)
    ranks = torch_ranks.start(config.device)
    batch = step.synthetic_batch(config, ranks.context)
    real = training_input(config, arguments.data, ranks)
    loops = {
        "bare": bare_loop(config, ranks.context, batch),
        "synthetic": training_loop(config, ranks, lambda: batch),
        "real": training_loop(config, ranks, real.next),
        "input": input_loop(real.next, ranks.context),
    }
    compiled = "eager" if config.compile == "none" else f"compiled ({config.compile})"
    measured, input_share = measure(
        loops,
        config.batch_size,
        arguments.steps,
        arguments.repeats,
        f"bare PyTorch loop, {compiled}, synthetic data",
    )
    title = (
        f"ResNet-{config.depth}, {config.image_size} x {config.image_size}, batch {config.batch_size}, "
        f"{config.precision}, {config.layout}, {compiled}, one {config.device}"
    )
    result = {"title": title, "measured": measured, "input_share": input_share, "device": config.device}
    torch_ranks.finish()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
