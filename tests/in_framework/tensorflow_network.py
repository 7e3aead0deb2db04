"""Parameter counts, the loss, seeds, bf16 and XLA of the TensorFlow network, as JSON."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

from benchmarks.common.frameworks import tensorflow
from benchmarks.resnet import weights
from benchmarks.resnet.architecture import STAGES
from benchmarks.resnet.tensorflow import model, optimizer, train
from benchmarks.resnet.tensorflow.config import Config
from benchmarks.resnet.tensorflow.training import Training

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


def changed(**changes):
    """Weights of the first convolution after 2 steps on one batch."""
    config = dataclasses.replace(BASE, seed=1, **changes)
    network = model.build(config)
    training = Training(network, optimizer.build(network.trained, config), config)
    step = tf.function(partial(train.train_step, training))
    generator = np.random.RandomState(0)
    images = tf.constant(generator.randn(8, 32, 32, 3), tf.float32)
    labels = tf.constant(generator.randint(0, 10, 8), tf.int32)
    losses = [float(step(images, labels, tf.constant(rate))) for rate in (0.01, 0.01)]
    return losses, network.variables["stem.conv.weight"].numpy()


def difference(left, right):
    return float(np.linalg.norm(left - right) / np.linalg.norm(right))


tensorflow.start(SimpleNamespace(device="cpu", precision="fp32"))
plain, again, scaled = changed(), changed(), changed(loss_scale=128.0)
bf16, xla = changed(precision="bf16"), changed(xla=True)
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
            "zeroed": [name for name, variable in zeroed.items() if "gamma" in name and not variable.numpy().any()],
        }
    )
)
tensorflow.finish()
