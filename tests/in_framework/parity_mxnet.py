"""MXNet's results of the parity tests; arguments: file to write, data folder."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmarks.common.frameworks import mxnet
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet import architecture
from benchmarks.resnet.inputs import training_input
from benchmarks.resnet.mxnet import data as tensors
from benchmarks.resnet.mxnet import model, optimizer
from benchmarks.resnet.mxnet.config import Config
from tests.in_framework import parity_task

import mxnet as mx  # isort: skip
from mxnet import autograd  # isort: skip


def named(network, config):
    # Parameters by the names of benchmarks/resnet/architecture.py, whose order is that of Gluon's.
    return dict(zip(architecture.shapes(config), network.collect_params().values(), strict=True))


def network_with(config, arrays):
    network = model.build(config)
    model.initialize(network, config, mx.cpu())
    for name, parameter in named(network, config).items():
        parameter.set_data(mx.nd.array(arrays[name]))
    return network


def logits(config, arrays, batch):
    return network_with(config, arrays)(mx.nd.array(batch[0])).asnumpy()


def loss_and_gradients(config, arrays, batch):
    network = network_with(config, arrays)
    with autograd.record():
        loss = model.SmoothedLoss(config.label_smoothing)(network(mx.nd.array(batch[0])), mx.nd.array(batch[1]))
    loss.backward()
    parameters = named(network, config).items()
    gradients = {name: p.grad().asnumpy() / len(batch[1]) for name, p in parameters if p.grad_req != "null"}
    return loss.mean().asscalar(), gradients


def optimized(config, arrays, gradients, rates):
    network = network_with(config, arrays)
    trainer, by_name = optimizer.build_trainer(network.collect_params(), config), named(network, config)
    for gradient, rate in zip(gradients, rates):
        trainer.set_learning_rate(rate)
        for name, array in gradient.items():
            by_name[name].grad()[:] = mx.nd.array(array)
            by_name[name]._data[0]._fresh_grad = True
        trainer.step(1)
    return {name: parameter.data().asnumpy() for name, parameter in by_name.items()}


def trained(config, arrays, data, rates):
    network = network_with(config, arrays)
    trainer = optimizer.build_trainer(network.collect_params(), config)
    loss_function = model.SmoothedLoss(config.label_smoothing)
    training = training_input(tensors, config, data, Ranks(0, 1, 0, 1, mx.cpu()))
    losses, first = [], None
    for rate in rates:
        trainer.set_learning_rate(rate)
        images, labels = training.next()
        first = images.asnumpy() if first is None else first
        with autograd.record():
            loss = loss_function(network(images), labels)
        loss.backward()
        trainer.step(config.batch_size)
        losses.append(loss.mean().asscalar())
    return first, np.array(losses)


mxnet.start(SimpleNamespace(device="cpu", precision="fp32"))
functions = SimpleNamespace(logits=logits, loss_and_gradients=loss_and_gradients, optimized=optimized, trained=trained)
np.savez(sys.argv[1], **parity_task.run(Config, functions, Path(sys.argv[2])))
mxnet.finish()
