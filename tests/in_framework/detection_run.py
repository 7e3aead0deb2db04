"""A run on any number of ranks without a network, whose detections are moved less after each epoch.

Arguments: a prepared data set, the run's folder, and JSON: targets, "concurrently", "spreads" of the epochs, and
"seconds" of a step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.run import mllog, stopping, timeline
from benchmarks.common.run.run import Run
from benchmarks.detection import detections, evaluator
from benchmarks.detection.annotations import open_data
from benchmarks.detection.pytorch.boxes import gather_detections
from tests.in_framework.some_detections import noisy

STEPS = 6
QUALITIES = {"bbox": "box_ap", "segm": "mask_ap"}


@dataclass(frozen=True)
class Config:
    targets: Mapping[str, float]
    epochs: int
    device: str = "cpu"
    precision: str = "fp32"
    seed: int = 7
    round: str = "v0.7"
    batch_size: int = 2
    log_interval: int = 1
    checkpoint_interval: int = 0


def detect(data, run, spread):
    # Detections in all images, each by one rank
    parts = [
        noisy(data, position, spread)
        for position in run.interruptible(range(run.ranks.rank, len(data.val), run.ranks.size))
    ]
    return (
        None
        if run.interrupted
        else gather_detections(detections.join_detections(parts) if parts else detections.empty(masks=True), run.ranks)
    )


def main() -> int:
    options = json.loads(sys.argv[3])
    config = Config(options["targets"], len(options["spreads"]))
    run = Run(config, pytorch, Path(sys.argv[1]), Path(sys.argv[2]), mllog.Wording("maskrcnn", accuracy_first=True))
    data = run.open(lambda: open_data(run.data))
    with run.initialization():
        pass
    concurrently = options.get("concurrently", True)
    with run.timed(timeline.by_epochs(config, STEPS, lambda epoch: True, evaluates_concurrently=concurrently)):
        run.log(mllog.samples(len(data.train), len(data.val)))
        run.register_state(dict)
        run.set_evaluator(evaluator.Evaluator(data, QUALITIES, run.output, options.get("workers", 1)))
        for _ in run.blocks():
            for _ in run.steps():
                time.sleep(options["seconds"])
                run.report(torch.zeros(()), 0.1)
            if run.evaluates():
                run.submit_evaluation(detect(data, run, options["spreads"][run.epoch]))
    return run.finish()


if __name__ == "__main__":
    stopping.end_process(main)
