"""TensorFlow's results of the parity tests against another framework's; prints the differences as JSON.

Arguments: the other framework's file, data folder.
"""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from benchmarks.common.frameworks import tensorflow
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet.inputs import training_input
from benchmarks.resnet.tensorflow import data as tensors
from benchmarks.resnet.tensorflow import model, optimizer
from benchmarks.resnet.tensorflow.config import Config
from benchmarks.resnet.tensorflow.train import Training, forward_backward, train_step
from tests.in_framework import parity_task

import numpy as np  # isort: skip
import tensorflow as tf  # isort: skip


def _from_tensorflow(name, array):
    if array.ndim == 4:
        return array.transpose(3, 2, 0, 1)
    return array.T if name == "dense.weight" else array


def export_arrays(values):
    # Variables, gradients or momenta with the axes of benchmarks/resnet/architecture.py.
    return {name: _from_tensorflow(name, value.numpy()) for name, value in values.items()}


def network_with(config, arrays):
    network = model.build(config)
    for name, variable in network.variables.items():
        variable.assign(model.to_tensorflow(name, arrays[name]))
    return network


def tensors_of(batch):
    return tf.constant(batch[0].transpose(0, 2, 3, 1)), tf.constant(batch[1].astype("int32"))


def logits(config, arrays, batch):
    return network_with(config, arrays)(tensors_of(batch)[0], training=False).numpy()


def loss_and_gradients(config, arrays, batch):
    network = network_with(config, arrays)
    training = Training(network, optimizer.build(network.trained, config), config)
    loss, gradients = training.compiled(forward_backward, *tensors_of(batch))
    return loss.numpy(), export_arrays(dict(zip(network.trained, gradients)))


def optimized(config, arrays, gradients, rates):
    network = network_with(config, arrays)
    updates = optimizer.build(network.trained, config)
    step = tf.function(updates.step)
    for gradient, rate in zip(gradients, rates):
        mine = [tf.constant(model.to_tensorflow(name, gradient[name])) for name in network.trained]
        step(mine, tf.constant(rate, tf.float32))
    return export_arrays(network.variables)


def trained(config, arrays, data, rates):
    network = network_with(config, arrays)
    training = Training(network, optimizer.build(network.trained, config), config)
    step = tf.function(partial(train_step, training))
    batches = training_input(tensors, config, data, Ranks(0, 1, 0, 1, "/CPU:0"))
    losses, first = [], None
    for rate in rates:
        images, labels = batches.next()
        first = images.numpy().transpose(0, 3, 1, 2) if first is None else first
        losses.append(step(images, labels, tf.constant(rate, tf.float32)).numpy())
    return first, np.array(losses)


tensorflow.start(SimpleNamespace(device="cpu", precision="fp32"))
functions = SimpleNamespace(logits=logits, loss_and_gradients=loss_and_gradients, optimized=optimized, trained=trained)
found = parity_task.run(Config, functions, Path(sys.argv[2]))
tensorflow.finish()
print(json.dumps(parity_task.differences(found, sys.argv[1])))
