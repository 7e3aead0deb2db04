"""Parameter counts, the loss, seeds, bf16 and XLA of the TensorFlow network, as JSON."""

import dataclasses
import json
import os
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from benchmarks.common.frameworks import tensorflow
from benchmarks.common.run.metrics import MetricsStream, StepReports
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet import weights
from benchmarks.resnet.architecture import STAGES
from benchmarks.resnet.tensorflow import model, optimizer, train
from benchmarks.resnet.tensorflow.config import Config
from benchmarks.resnet.tensorflow.train import Training

import numpy as np  # isort: skip
import tensorflow as tf  # isort: skip

BASE = dataclasses.replace(
    Config(),
    device="cpu",
    precision="fp32",
    pad_channels=False,
    num_classes=10,
    batch_size=8,
    image_size=32,
    eval_resize=32,
    depth=18,
    loss_scale=1.0,
)


def trainable(depth):
    config = dataclasses.replace(BASE, depth=depth, num_classes=1000)
    shapes = weights.shapes(config)
    return int(sum(np.prod(shapes[name]) for name in weights.trained_names(config)))


def loss_error(smoothing):
    """Error of the loss against the formula in float64."""
    generator = np.random.RandomState(0)
    logits, labels = generator.randn(5, 7), np.array([0, 3, 6, 2, 2])
    found = model.smoothed_loss(tf.constant(logits, tf.float32), tf.constant(labels), smoothing).numpy()
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    target = np.full((5, 7), smoothing / 7)
    target[np.arange(5), labels] += 1 - smoothing
    return float(np.abs(found + (target * logs).sum(axis=1)).max())


def batch_of():
    generator = np.random.RandomState(0)
    images = tf.constant(generator.randn(8, 32, 32, 3), tf.float32)
    return images, tf.constant(generator.randint(0, 10, 8), tf.int32)


def built(factor=1.0, **changes):
    """A fresh training whose first convolution is multiplied by ``factor``, and its step as a graph."""
    config = dataclasses.replace(BASE, seed=1, **changes)
    network = model.build(config)
    network.variables["stem.conv.weight"].assign(factor * network.variables["stem.conv.weight"])
    training = Training(network, optimizer.build(network.trained, config), config)
    return training, tf.function(partial(train.train_step, training))


def losses_of(step, *rates):
    return [float(step(*batch_of(), tf.constant(rate))) for rate in rates]


def changed(**changes):
    """Losses of 2 steps on one batch, and the weights of the first convolution after them."""
    training, step = built(**changes)
    return losses_of(step, 0.01, 0.01), training.network.variables["stem.conv.weight"].numpy()


def warm_up_changes():
    """Which variables and losses a warm-up changes, and how often the step was traced over steps of other rates."""
    training, step = built(warm_up_steps=2, optimizer="lars")
    variables = train._variables(training)
    found, calls = [], [losses_of(built(warm_up_steps=0, optimizer="lars")[1], 0.1, 0.2)]
    for _ in range(2):
        before = {name: variable.numpy() for name, variable in variables.items()}
        train.warm_up(training, step)
        found += [name for name, variable in variables.items() if (variable.numpy() != before[name]).any()]
        calls.append(losses_of(step, 0.1, 0.2))
    found += [] if calls[1] == calls[0] else ["first losses"]
    return found, step.experimental_get_tracing_count()


class Frozen:
    """A network whose batch-norm has the running statistics."""

    def __init__(self, network):
        self.network, self.trained = network, network.trained

    def __call__(self, images, training):
        return self.network(images, training=False)


def accumulated(passes, xla):
    """Loss and gradients of one batch in so many passes, batch-norm with its running statistics."""
    training, _ = built(accumulation_steps=passes, batch_size=8, xla=xla)
    training.network = Frozen(training.network)
    loss, gradients = training.compiled(train.forward_backward, *batch_of())
    return loss.numpy(), np.concatenate([gradient.numpy().ravel() for gradient in gradients])


ALONE = Ranks(0, 1, 0, 1, "/CPU:0")


def end_of_overflow():
    """What a run says whose gradients overflow in the first step, and after how many steps."""
    _, step = built(loss_scale=float("inf"))
    stream, sums = MetricsStream(Path("/dev/null"), 0), tensorflow.LaggedSums(ALONE, "step")
    reports = StepReports(stream, sums, tensorflow.input_wait(ALONE), ALONE, 8, 100, 1)
    for number in range(10):
        try:
            reports.add(range(number, number + 1), step(*batch_of(), tf.constant(0.1)), False, 0.1)
        except SystemExit as error:
            return number + 1, str(error).splitlines()[0]
    return None


def sends_without_waiting():
    """Whether three losses are sent before the first sum over the ranks is there, and what is read then."""
    arrived = threading.Event()

    def slow(values, name):
        assert arrived.wait(20), "the step waits for its loss"
        return values * 2

    with mock.patch.object(tensorflow, "_sum", slow):
        sums = tensorflow.LaggedSums(ALONE, "step")
        sent = [sums.send(tf.constant(loss), False) for loss in (1.0, 2.0)]
        arrived.set()
        return [*sent, sums.send(tf.constant(3.0), True), *sums.drain()]


def visible_gpu(visible, local_rank):
    """The only GPU that a rank sees afterwards."""
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": visible}):
        tensorflow._show_one_gpu(local_rank)
        return os.environ["CUDA_VISIBLE_DEVICES"]


def difference(left, right):
    return float(np.linalg.norm(left - right) / np.linalg.norm(right))


tensorflow.start(SimpleNamespace(device="cpu", precision="fp32"))
plain, again, scaled = changed(), changed(), changed(loss_scale=128.0)
bf16, xla = changed(precision="bf16"), changed(xla=True)
(whole_loss, whole), (loss, parts), (_, compiled) = accumulated(1, False), accumulated(4, False), accumulated(4, True)
other = model.build(dataclasses.replace(BASE, seed=2)).variables["stem.conv.weight"].numpy()
zeroed = model.build(dataclasses.replace(BASE, zero_init_residual=True)).variables
print(
    json.dumps(
        {
            "parameters": {depth: trainable(depth) for depth in STAGES},
            "loss error": max(loss_error(0.0), loss_error(0.1)),
            "same seed": difference(again[1], plain[1]),
            "other seed": difference(other, plain[1]),
            "scaled loss": difference(scaled[1], plain[1]),
            "bf16": max(abs(a - b) / b for a, b in zip(bf16[0], plain[0])),
            "XLA": max(abs(a - b) / b for a, b in zip(xla[0], plain[0])),
            "losses with NaN are finite": [bool(np.isfinite(loss)) for loss in changed(factor=np.nan)[0]],
            "changed by a warm-up": warm_up_changes(),
            "accumulated": [abs(float(loss - whole_loss)), difference(parts, whole), difference(compiled, whole)],
            "overflow": end_of_overflow(),
            "sums": sends_without_waiting(),
            "visible": [visible_gpu("3,5", 1), visible_gpu("3", 1)],
            "compiles": [
                dataclasses.replace(BASE, device=d, xla=x).compiles
                for d in ("cpu", "gpu")
                for x in ("auto", True, False)
            ],
            "zeroed": [name for name, variable in zeroed.items() if "gamma" in name and not variable.numpy().any()],
        }
    )
)
tensorflow.finish()
