"""MXNet's results of the parity tests; arguments: file to write, data folder."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmarks.common.frameworks import mxnet
from benchmarks.common.ranks import Ranks
from benchmarks.resnet.mxnet import model, optimizer
from benchmarks.resnet.mxnet.config import Config
from benchmarks.resnet.mxnet.data import training_input
from tests.in_framework import parity_task

import mxnet as mx  # isort: skip
from mxnet import autograd  # isort: skip


def network_with(config, arrays):
    network = model.build(config)
    model.initialize(network, config, mx.cpu())
    model.import_weights(network, arrays, config)
    return network


def exported(config, arrays):
    return model.export_weights(network_with(config, arrays), config)


def logits(config, arrays, batch):
    return network_with(config, arrays)(mx.nd.array(batch[0])).asnumpy()


def loss_and_gradients(config, arrays, batch):
    network = network_with(config, arrays)
    with autograd.record():
        loss = model.SmoothedLoss(config.label_smoothing)(
            network(mx.nd.array(batch[0])), mx.nd.array(batch[1])
        )
    loss.backward()
    parameters = zip(arrays, network.collect_params().values())
    gradients = {name: p.grad().asnumpy() / len(batch[1]) for name, p in parameters if p.grad_req != "null"}
    return loss.mean().asscalar(), gradients


def optimized(config, arrays, gradients, rates):
    network = network_with(config, arrays)
    parameters = network.collect_params()
    trainer = optimizer.build_trainer(parameters, config)
    by_name = dict(zip(arrays, parameters.values()))
    for gradient, rate in zip(gradients, rates):
        trainer.set_learning_rate(rate)
        for name, array in gradient.items():
            by_name[name].grad()[:] = mx.nd.array(array)
            by_name[name]._data[0]._fresh_grad = True
        trainer.step(1)
    return model.export_weights(network, config)


def trained(config, arrays, data, rates):
    network = network_with(config, arrays)
    trainer = optimizer.build_trainer(network.collect_params(), config)
    loss_function = model.SmoothedLoss(config.label_smoothing)
    training = training_input(config, data, Ranks(0, 1, 0, 1, mx.cpu()))
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
functions = SimpleNamespace(
    logits=logits,
    loss_and_gradients=loss_and_gradients,
    exported=exported,
    optimized=optimized,
    trained=trained,
)
np.savez(sys.argv[1], **parity_task.run(Config, functions, Path(sys.argv[2])))
mxnet.finish()
