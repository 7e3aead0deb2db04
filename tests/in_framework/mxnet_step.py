"""The range of gradients, NaN, warm-up and the choice of the GPU in MXNet, as JSON."""

import dataclasses
import json
import math
from types import SimpleNamespace
from unittest import mock

import numpy as np

from benchmarks.common.frameworks import mxnet
from benchmarks.resnet.architecture import input_shape
from benchmarks.resnet.mxnet import train
from benchmarks.resnet.mxnet.config import Config
from benchmarks.resnet.mxnet.train import build, content, train_step

import mxnet as mx  # isort: skip

CONFIG = dataclasses.replace(
    Config(), device="cpu", layout="NCHW", precision="fp32", pad_channels=False, image_size=32, depth=18,
)  # fmt: skip
found = {}


def batches(config, count):
    """The same noise at each call."""
    generator = np.random.RandomState(0)
    for _ in range(count):
        labels = generator.randint(0, config.num_classes, config.batch_size)
        yield mx.nd.array(generator.standard_normal(input_shape(config))), mx.nd.array(labels)


def losses(training, count, skip=0):
    taken = list(batches(training.config, count))[skip:]
    rates = [0.1 * (step + 1) for step in range(count)][skip:]
    return [float(train_step(training, *batch, rate).asscalar()) for batch, rate in zip(taken, rates)]


def show_range_and_nan(ranks):
    """ResNet-50 at the submitted batch size; small images have larger gradients than those of 224 pixels."""
    config = dataclasses.replace(CONFIG, depth=50, batch_size=408)
    training = build(config, ranks, {})
    found["loss before"] = losses(training, 1)[0]
    parameters = list(training.network.collect_params().values())
    gradients = [parameter.grad() for parameter in parameters if parameter.grad_req != "null"]
    found["largest gradient"] = max(float(mx.nd.abs(gradient).max().asscalar()) for gradient in gradients)

    small = dataclasses.replace(CONFIG, batch_size=8)
    training = build(small, ranks, {})
    first = next(iter(training.network.collect_params().values()))
    first.set_data(first.data() * math.nan)
    found["loss is finite with NaN in the first convolution"] = math.isfinite(losses(training, 1)[0])


def show_warm_up(ranks, optimizer):
    """Losses with and without a warm-up, of a fresh training and of a resumed one."""
    config = dataclasses.replace(CONFIG, batch_size=8, optimizer=optimizer, learning_rate=0.3)
    found[f"losses {optimizer}"] = losses(build(config, ranks, {}), 4)
    training = build(config, ranks, {})
    with mock.patch.object(train, "train_step", wraps=train_step) as counted:
        train.warm_up(training)
    found[f"steps of the warm-up {optimizer}"] = counted.call_count
    begun = losses(training, 2)
    saved = content(training)
    found[f"losses after warm-up {optimizer}"] = begun + losses(training, 4, skip=2)
    resumed = build(config, ranks, saved)
    train.warm_up(resumed)
    found[f"losses resumed {optimizer}"] = losses(resumed, 4, skip=2)


def show_gpu():
    mxnet.hvd.local_rank = lambda: 3
    for visible in (4, 1):
        mx.context.num_gpus = lambda visible=visible: visible
        context = mxnet.start(SimpleNamespace(device="gpu")).context
        found[f"GPU of local rank 3 of {visible} visible"] = context.device_id


ranks = mxnet.start(SimpleNamespace(device="cpu"))
show_range_and_nan(ranks)
for name in ("sgd", "lars"):
    show_warm_up(ranks, name)
show_gpu()
mxnet.finish()
print(json.dumps(found))
