"""TensorFlow's part of parity.py, which has the axes (height, width, in, out) and images (N, H, W, C)."""

from functools import partial

from benchmarks.common.frameworks import tensorflow
from benchmarks.resnet.tensorflow import data as tensors
from benchmarks.resnet.tensorflow import model, train
from benchmarks.resnet.tensorflow.config import Config

import tensorflow as tf  # isort: skip

framework = tensorflow
__all__ = ["Config", "framework", "in_numpy", "tensors", "train_step"]


def in_numpy(tensor):
    return tensor.numpy()


def with_neutral_axes(tensors):
    axes = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}
    return {name: tf.transpose(tensor, axes[len(tensor.shape)]) for name, tensor in tensors.items()}


def training_with(config, arrays, ranks):
    training = train.build(config, {})
    for name, variable in training.network.variables.items():
        variable.assign(model.to_tensorflow(name, arrays[name]))
    training.step = tf.function(partial(train.train_step, training))
    return training


def batch_of(config, images, labels):
    return tf.constant(images.transpose(0, 2, 3, 1)), tf.constant(labels.astype("int32"))


def logits(training, images):
    return training.network(images, training=False)


def loss_and_gradients(training, images, labels):
    loss, gradients = training.compiled(train.forward_backward, images, labels)
    return loss, with_neutral_axes(dict(zip(training.network.trained, gradients)))


def optimized(training, gradients, rates):
    for gradient, rate in zip(gradients, rates):
        mine = [tf.constant(model.to_tensorflow(name, gradient[name])) for name in training.network.trained]
        training.update(mine, tf.constant(rate, tf.float32))
    return with_neutral_axes(training.network.variables)


def train_step(training, images, labels, rate):
    return training.step(images, labels, tf.constant(rate, tf.float32))
