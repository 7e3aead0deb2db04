"""A run on any number of ranks without a network, whose detections are moved less after each epoch.

Arguments: a prepared data set, the run's folder, and JSON: targets, "concurrently", "names" of the qualities in the
log, "spreads" of the epochs, "seconds" of a step. Logs what mlperf-logging's checker asks of Mask R-CNN.
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
from benchmarks.common.run.mllog import Wording, samples
from benchmarks.common.run.run import Run
from benchmarks.common.run.stopping import end_process
from benchmarks.common.run.timeline import by_epochs
from benchmarks.detection.annotations import open_data
from benchmarks.detection.detections import empty, joined
from benchmarks.detection.evaluator import Evaluator
from benchmarks.detection.pytorch.boxes import gathered
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
    """Detections in all images, each by one rank."""
    parts = [
        noisy(data, position, spread)
        for position in run.interruptible(range(run.ranks.rank, len(data.val), run.ranks.size))
    ]
    return None if run.interrupted else gathered(joined(parts) if parts else empty(masks=True), run.ranks)


def main() -> int:
    options = json.loads(sys.argv[3])
    config = Config(options["targets"], len(options["spreads"]))
    wording = Wording("maskrcnn", accuracy_first=True, names=options.get("names") or {})
    run = Run(config, pytorch, Path(sys.argv[1]), Path(sys.argv[2]), wording)
    data = run.open(lambda: open_data(run.data))
    with run.initialization():
        run.log({"cache_clear": True})
    run.log(
        {
            "submission_org": "o", "submission_platform": "p", "submission_division": "closed",
            "submission_status": "onprem", "submission_benchmark": "maskrcnn", "global_batch_size": 32,
            "opt_name": "sgd_with_momentum", "opt_base_learning_rate": 0.04, "opt_learning_rate_warmup_steps": 500,
            "opt_learning_rate_warmup_factor": 0.01, "num_image_candidates": 2000,
            "opt_learning_rate_decay_factor": 0.1, "opt_learning_rate_decay_steps": [9000, 12000],
            "min_image_size": 800, "max_image_size": 1333,
        }
    )  # fmt: skip
    concurrently = options.get("concurrently", True)
    with run.timed(by_epochs(config, STEPS, lambda epoch: True, evaluates_concurrently=concurrently)):
        run.log(samples(len(data.train), len(data.val)))
        run.register_state(dict)
        run.use(Evaluator(data, QUALITIES, run.output, options.get("workers", 1)))
        for _ in run.blocks():
            for _ in run.steps():
                time.sleep(options["seconds"])
                run.report(torch.zeros(()), 0.1)
            if run.evaluates():
                run.evaluated_later(detect(data, run, options["spreads"][run.epoch]))
    return run.finish()


if __name__ == "__main__":
    end_process(main)
