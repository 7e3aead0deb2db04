"""Sizes and losses of ResNet, a small configuration, and the report of an overflow, for all frameworks."""

import dataclasses

from benchmarks.common.run import metrics, mllog, run

# As torchvision's documentation has them.
PARAMETERS = {18: 11689512, 34: 21797672, 50: 25557032, 101: 44549160, 152: 60192808}


def config_of(config_class, layout="NCHW", **changes):
    # A small ResNet-18 for small images, in fp32 on the CPU.
    values = dict(  # noqa: C408
        device="cpu", layout=layout, precision="fp32", pad_channels=False, depth=18, num_classes=10, image_size=32,
        eval_resize=32, batch_size=8, dali_threads=1, loss_scale=1.0, warm_up_steps=0, seed=5,
    )  # fmt: skip
    return dataclasses.replace(config_class(), **{**values, **changes})


def run_of(config, framework, data, output):
    # A run that has not started
    return run.Run(config, framework, data, output, mllog.Wording("some"))


def end_of_overflow(framework, ranks, losses):
    # Number of steps after which a run stops because its loss is not finite, and its message; None if it continues
    stream, sums = metrics.MetricsStream("/dev/null", 0), framework.LaggedSums(ranks, "step")
    reports = metrics.StepReports(stream, sums, framework.input_wait(ranks), ranks, 8, 100, 1)
    for step, loss in enumerate(losses):
        try:
            reports.add(range(step, step + 1), loss, False, 0.1)
        except SystemExit as error:
            return step + 1, str(error).splitlines()[0]
    return None
