"""MXNet's part of parity.py."""

from benchmarks.common.frameworks import mxnet
from benchmarks.resnet import architecture
from benchmarks.resnet.mxnet import data as tensors
from benchmarks.resnet.mxnet import train
from benchmarks.resnet.mxnet.config import Config

import mxnet as mx  # isort: skip

framework, train_step, in_numpy = mxnet, train.train_step, mx.nd.NDArray.asnumpy
__all__ = ["Config", "framework", "in_numpy", "tensors", "train_step"]


def named(training):
    # Parameters by the names of benchmarks/resnet/architecture.py, whose order is that of Gluon's.
    return dict(zip(architecture.shapes(training.config), training.network.collect_params().values(), strict=True))


def training_with(config, arrays, ranks):
    training = train.build(config, ranks, {})
    for name, parameter in named(training).items():
        parameter.set_data(mx.nd.array(arrays[name]))
    return training


def batch_of(config, images, labels):
    return mx.nd.array(images), mx.nd.array(labels)


def logits(training, images):
    return training.network(images)


def loss_and_gradients(training, images, labels):
    loss = train_step(training, images, labels, 0.1)
    return loss, {name: p.grad() for name, p in named(training).items() if p.grad_req != "null"}


def optimized(training, gradients, rates):
    for gradient, rate in zip(gradients, rates):
        training.trainer.set_learning_rate(rate)
        for name, array in gradient.items():
            named(training)[name].grad()[:] = mx.nd.array(array)
            named(training)[name]._data[0]._fresh_grad = True
        training.trainer.step(1)
    return {name: parameter.data() for name, parameter in named(training).items()}
