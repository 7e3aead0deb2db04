"""Sizes and losses of ResNet, a small configuration, and the report of an overflow, for all frameworks."""

import dataclasses

import numpy as np

from benchmarks.common.run.metrics import MetricsStream, StepReports
from benchmarks.common.run.mllog import Wording
from benchmarks.common.run.run import Run
from tests.in_framework.waves import waves

# As torchvision's documentation has them.
PARAMETERS = {18: 11689512, 34: 21797672, 50: 25557032, 101: 44549160, 152: 60192808}
LOGITS, LABELS = 2 * waves(5, 7), np.array([0, 3, 6, 2, 2])
# Cross-entropy by label smoothing, recorded from its formula in float64
LOSSES = {
    0.0: [2.20194151, 1.17157368, 3.79714457, 3.9985362, 1.17755868],
    0.1: [2.22741511, 1.28591767, 3.67590561, 3.86440203, 1.32805956],
}


def config_of(config_class, layout="NCHW", **changes):
    # A small ResNet-18 for small images, in fp32 on the CPU.
    values = dict(  # noqa: C408
        device="cpu", layout=layout, precision="fp32", pad_channels=False, depth=18, num_classes=10, image_size=32,
        eval_resize=32, batch_size=8, dali_threads=1, loss_scale=1.0, warm_up_steps=0, seed=5,
    )  # fmt: skip
    return dataclasses.replace(config_class(), **{**values, **changes})


def run_of(config, framework, data, output):
    # A run that has not started
    return Run(config, framework, data, output, Wording("some"))


def end_of_overflow(framework, ranks, losses):
    # Number of steps after which a run stops because its loss is not finite, and its message; None if it continues
    stream, sums = MetricsStream("/dev/null", 0), framework.LaggedSums(ranks, "step")
    reports = StepReports(stream, sums, framework.input_wait(ranks), ranks, 8, 100, 1)
    for step, loss in enumerate(losses):
        try:
            reports.add(range(step, step + 1), loss, False, 0.1)
        except SystemExit as error:
            return step + 1, str(error).splitlines()[0]
    return None
