"""What ResNet is in every framework: its size, its loss, and how an evaluation of a part of the ranks counts."""

import dataclasses

import numpy as np

from benchmarks.common.run.metrics import MetricsStream, StepReports
from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.run import Run

# As torchvision's documentation has them.
PARAMETERS = {18: 11689512, 34: 21797672, 50: 25557032, 101: 44549160, 152: 60192808}
GENERATOR = np.random.RandomState(0)
LOGITS, LABELS = GENERATOR.randn(5, 7), np.array([0, 3, 6, 2, 2])


def smoothed_losses(smoothing):
    # Cross-entropy of LOGITS with label smoothing, by its formula in float64.
    logs = LOGITS - np.log(np.exp(LOGITS).sum(axis=1, keepdims=True))
    target = np.full((5, 7), smoothing / 7)
    target[np.arange(5), LABELS] += 1 - smoothing
    return -(target * logs).sum(axis=1)


def config_of(config_class, layout="NCHW", **changes):
    # A small ResNet-18 for small images, in fp32 on the CPU.
    values = dict(  # noqa: C408
        device="cpu", layout=layout, precision="fp32", pad_channels=False, depth=18, num_classes=10, image_size=32,
        eval_resize=32, batch_size=8, dali_threads=1, loss_scale=1.0, warm_up_steps=0, seed=5,
    )  # fmt: skip
    return dataclasses.replace(config_class(), **{**values, **changes})


def run_of(config, framework, data, output):
    # A run on a data set that has not begun.
    return Run(config, framework, data, output, Wording("some"))


def end_of_overflow(framework, ranks, losses):
    # Return what a run reports whose loss is not finite, and after how many steps; None where it goes on.
    stream, sums = MetricsStream("/dev/null", 0), framework.LaggedSums(ranks, "step")
    reports = StepReports(stream, sums, framework.input_wait(ranks), ranks, 8, 100, 1)
    for step, loss in enumerate(losses):
        try:
            reports.add(range(step, step + 1), loss, False, 0.1)
        except SystemExit as error:
            return step + 1, str(error).splitlines()[0]
    return None
