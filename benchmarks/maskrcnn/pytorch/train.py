"""Train Mask R-CNN in PyTorch: images in, boxes and masks judged by COCO's AP, MLPerf events out.

    $ python -m benchmarks.maskrcnn.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.maskrcnn.pytorch.train --config config.json --data DATA --output OUT

OUT gets result.txt (MLPerf log), metrics.jsonl, detections, heartbeat/ and checkpoint/; a run that finds a checkpoint
there resumes from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from typing import List, Optional

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.mllog import samples
from benchmarks.common.run import Run
from benchmarks.common.stopping import end_process
from benchmarks.detection.annotations import DataSet, open_data
from benchmarks.detection.detections import Detections
from benchmarks.detection.evaluator import Evaluator
from benchmarks.maskrcnn import events
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.maskrcnn.pytorch.data import Batch, Orders, TrainingInput
from benchmarks.maskrcnn.pytorch.evaluation import detections
from benchmarks.maskrcnn.pytorch.training import Training, build, content
from benchmarks.maskrcnn.schedule import Rates, rates

QUALITIES = {"bbox": "box_ap", "segm": "mask_ap"}
"""Name of the quality of each kind of comparison."""


def whole_step(training: Training, batch: Batch) -> torch.Tensor:
    """Forward, backward and update on one batch, at the rates that are set; returns the sum of this rank's losses."""
    losses = training.losses(batch)
    loss = torch.stack(list(losses.values())).sum()
    training.updates.scaled(loss).backward()
    training.update()
    return loss.detach()


def train_step(training: Training, batch: Batch, rates: Rates) -> torch.Tensor:
    """Train on one batch; return the sum of this rank's losses, still on the device."""
    training.set_rates(rates)
    graph = training.graph_of(batch)
    if graph is not None:  # the same, captured
        loss: torch.Tensor = graph(*batch.tensors())
        return loss
    return whole_step(training, batch)


def evaluate(training: Training, data: DataSet, run: Run) -> Optional[Detections]:
    """Return the detections of all ranks in all evaluation images on rank 0; None elsewhere or if it is to stop."""
    training.network.eval()
    found = detections(training, data, run)
    training.network.train()
    return found


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, events.WORDING)
    config, ranks = run.config, run.ranks
    data = run.open(lambda: open_data(run.data))
    trained = run.data / config.backbone if config.backbone else None
    with run.initialization():
        training = run.open(lambda: build(config, len(data.categories) + 1, ranks, run.saved, whole_step, trained))
    run.log(events.hyperparameters(config, ranks.size))
    orders = Orders(config, data.train, ranks)
    # No image, nor the size of one, is read before run_start.
    with ExitStack() as owned, run.timed(lambda: events.timeline(config, orders.steps)):
        batches = owned.enter_context(closing(TrainingInput(orders, ranks, run.position)))
        run.log(samples(len(data.train.with_objects), len(data.val)))
        run.keep(partial(content, training))
        run.use(Evaluator(data, QUALITIES, run.output, config.eval_workers))
        for _ in run.blocks():
            for number in run.steps():
                now = rates(config, number)
                run.report(train_step(training, run.wait_for(batches.next), now), now.weights)
            if run.evaluates():
                run.evaluated_later(evaluate(training, data, run))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
