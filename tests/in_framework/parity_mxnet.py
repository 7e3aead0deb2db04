"""MXNet's results of the parity tests; arguments: file to write, data folder."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmarks.common.frameworks import mxnet
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet import weights
from benchmarks.resnet.inputs import TrainingInput
from benchmarks.resnet.mxnet import data as tensors
from benchmarks.resnet.mxnet import model, optimizer
from benchmarks.resnet.mxnet.config import Config
from tests.in_framework import parity_task

import mxnet as mx  # isort: skip
from mxnet import autograd  # isort: skip


def _neutral_names(parameters, config):
    """Names of benchmarks/resnet/weights.py, in the order of Gluon's parameters, which is the network's."""
    names = list(weights.shapes(config))
    if len(names) != len(parameters):
        raise ValueError(f"{len(parameters)} parameters, but ResNet-{config.depth} has {len(names)} arrays")
    return names


def export_weights(network, config):
    """All weights and statistics under the names and with the axes of benchmarks/resnet/weights.py."""
    parameters = network.collect_params()
    arrays = {}
    for name, parameter in zip(_neutral_names(list(parameters), config), parameters.values()):
        array = parameter.data().astype("float32").asnumpy()
        is_nhwc = array.ndim == 4 and config.layout == "NHWC"  # Gluon has OHWI then
        arrays[name] = array.transpose(0, 3, 1, 2) if is_nhwc else array
    return arrays


def import_weights(network, arrays, config):
    """Set all weights and statistics to what ``export_weights`` of any implementation returned."""
    parameters = network.collect_params()
    for name, parameter in zip(_neutral_names(list(parameters), config), parameters.values()):
        array = arrays[name]
        is_nhwc = array.ndim == 4 and config.layout == "NHWC"
        parameter.set_data(mx.nd.array(array.transpose(0, 2, 3, 1) if is_nhwc else array))


def network_with(config, arrays):
    network = model.build(config)
    model.initialize(network, config, mx.cpu())
    import_weights(network, arrays, config)
    return network


def exported(config, arrays):
    return export_weights(network_with(config, arrays), config)


def logits(config, arrays, batch):
    return network_with(config, arrays)(mx.nd.array(batch[0])).asnumpy()


def loss_and_gradients(config, arrays, batch):
    network = network_with(config, arrays)
    with autograd.record():
        loss = model.SmoothedLoss(config.label_smoothing)(network(mx.nd.array(batch[0])), mx.nd.array(batch[1]))
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
    return export_weights(network, config)


def trained(config, arrays, data, rates):
    network = network_with(config, arrays)
    trainer = optimizer.build_trainer(network.collect_params(), config)
    loss_function = model.SmoothedLoss(config.label_smoothing)
    training = TrainingInput(tensors, config, data, Ranks(0, 1, 0, 1, mx.cpu()))
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
