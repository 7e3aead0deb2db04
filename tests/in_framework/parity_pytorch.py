"""PyTorch's results of the parity tests against another framework's; prints the differences as JSON.

Arguments: the other framework's file, data folder.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.common.run.ranks import Ranks
from benchmarks.common.torch import networks
from benchmarks.resnet.inputs import training_input
from benchmarks.resnet.pytorch import data as tensors
from benchmarks.resnet.pytorch import model, optimizer
from benchmarks.resnet.pytorch.config import Config
from benchmarks.resnet.pytorch.train import Training, forward_backward, train_step
from tests.in_framework import parity_task

CPU = torch.device("cpu")


def network_with(config, arrays):
    network = model.place(model.build(config), config, CPU)
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            tensor.copy_(torch.from_numpy(arrays[model.neutral_name(name)]))
    return network


def images_of(config, batch):
    return torch.from_numpy(batch[0]).to(memory_format=networks.memory_format(config.layout))


def logits(config, arrays, batch):
    with torch.no_grad():
        return network_with(config, arrays).eval()(images_of(config, batch)).numpy()


def loss_and_gradients(config, arrays, batch):
    network = network_with(config, arrays)
    training = Training(network, network, optimizer.build(network, config), config)
    loss = forward_backward(training, images_of(config, batch), torch.from_numpy(batch[1]))
    return loss.item(), {model.neutral_name(n): p.grad.numpy() for n, p in network.named_parameters()}


def optimized(config, arrays, gradients, rates):
    network = network_with(config, arrays)
    trainer = optimizer.build(network, config)
    for gradient, rate in zip(gradients, rates):
        trainer.set_learning_rate(rate)
        for name, parameter in network.named_parameters():
            # In the parameter's own memory order, as a backward pass leaves it.
            parameter.grad = torch.empty_like(parameter).copy_(torch.from_numpy(gradient[model.neutral_name(name)]))
        trainer.step()
    return {model.neutral_name(name): tensor.detach().numpy() for name, tensor in network.state_dict().items()}


def trained(config, arrays, data, rates):
    network = network_with(config, arrays)
    training = Training(network, network, optimizer.build(network, config), config)
    batches = training_input(tensors, config, data, Ranks(0, 1, 0, 1, CPU))
    losses, first = [], None
    for rate in rates:
        images, labels = batches.next()
        first = images.numpy() if first is None else first
        losses.append(train_step(training, images, labels, rate).item())
    return first, np.array(losses)


functions = SimpleNamespace(logits=logits, loss_and_gradients=loss_and_gradients, optimized=optimized, trained=trained)
found = parity_task.run(Config, functions, Path(sys.argv[2]))
print(json.dumps(parity_task.differences(found, sys.argv[1])))
