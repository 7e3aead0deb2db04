"""Train SSD300 in PyTorch: COCO's images in by DALI, boxes judged by pycocotools' mAP, MLPerf events out.

    $ python -m benchmarks.ssd.pytorch.train --config config.json --data DATA --output OUT
    $ torchrun --nproc-per-node 8 -m benchmarks.ssd.pytorch.train --config config.json --data DATA --output OUT

OUT gets result.txt (MLPerf log), metrics.jsonl, detections/, heartbeat/ and checkpoint/; a run that finds a checkpoint
there resumes from it. Exit code 0: ended as planned, the last record of metrics.jsonl says how; else: failed.
"""

from __future__ import annotations

from functools import partial
from typing import List, Optional

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.mllog import samples
from benchmarks.common.run import Run
from benchmarks.common.stopping import end_process
from benchmarks.detection.annotations import open_data
from benchmarks.detection.detections import Detections, empty, joined
from benchmarks.detection.evaluator import Evaluator
from benchmarks.detection.pytorch.gather import gathered
from benchmarks.ssd import events
from benchmarks.ssd.pytorch.config import Config
from benchmarks.ssd.pytorch.data import Batch, EvaluationInput, TrainingInput, steps_per_epoch
from benchmarks.ssd.pytorch.detection import in_original
from benchmarks.ssd.pytorch.model import statistics
from benchmarks.ssd.pytorch.training import Training, backbone_file, build, content, own_content
from benchmarks.ssd.schedule import learning_rate


def whole_step(training: Training, batch: Batch) -> torch.Tensor:
    """Forward, backward and update on one batch, at the rate that is set; returns the mean loss of this rank."""
    loss = training.loss(batch)
    (loss * training.loss_scale).backward()
    training.updates.step(training.rate, training.ranks.size * training.loss_scale)
    return loss.detach()


def train_step(training: Training, batch: Batch, rate: float) -> torch.Tensor:
    """Train on one batch; return the mean loss of this rank, still on the device."""
    training.set_rate(rate)
    if training.graph is not None:  # the same, captured
        loss: torch.Tensor = training.graph(*batch)
        return loss
    return whole_step(training, batch)


def evaluate(training: Training, evaluation: EvaluationInput, run: Run) -> Optional[Detections]:
    """Detections of all ranks in all validation images, each in one rank's share; None but on rank 0, or to stop."""
    if training.config.average_statistics:  # else each rank evaluates its images with its own, as v0.5 and v0.6
        pytorch.average_tensors(statistics(training.network))
    training.network.eval()
    found = [empty()]
    for images, positions in run.watch(evaluation.one_pass()):
        found.append(in_original(training.detect(images), evaluation.part, positions))
    training.network.train()
    return None if run.interrupted else gathered(joined(found), run.ranks)


def main(argv: Optional[List[str]] = None) -> int:
    run = Run.start(Config, pytorch, __doc__, argv, events.WORDING)
    config, ranks, saved = run.config, run.ranks, run.saved
    data = run.open(lambda: open_data(run.data))
    backbone = backbone_file(config, run.data)
    with run.initialization():
        training = run.open(lambda: build(config, len(data.categories) + 1, ranks, saved, whole_step, backbone))
    run.log(events.hyperparameters(config, ranks.size))
    # No object is counted before run_start.
    with run.timed(lambda: events.timeline(config, ranks.size, steps_per_epoch(data.train, config, ranks))):
        batches = TrainingInput(config, data.train, ranks, saved)
        evaluation = EvaluationInput(config, data.val, ranks)
        steps = steps_per_epoch(data.train, config, ranks)
        run.log({**events.decays(config, ranks.size, steps), **samples(len(data.train.with_objects), evaluation.total)})
        run.keep(partial(content, training), partial(own_content, training, batches))
        run.use(Evaluator(data, {"bbox": "map"}, run.output))
        for _ in run.blocks():
            for number in run.steps():
                rate = learning_rate(config, number, ranks.size, steps)
                run.report(train_step(training, run.wait_for(batches.next), rate), rate)
            if run.evaluates():
                run.evaluated_later(evaluate(training, evaluation, run))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
