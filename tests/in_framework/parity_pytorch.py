"""PyTorch's part of parity.py."""

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.torch import networks
from benchmarks.resnet.pytorch import data as tensors
from benchmarks.resnet.pytorch import model, train
from benchmarks.resnet.pytorch.config import Config
from benchmarks.resnet.pytorch.train import train_step

framework, in_numpy = pytorch, torch.Tensor.numpy
__all__ = ["Config", "framework", "in_numpy", "tensors", "train_step"]


def training_with(config, arrays, ranks):
    training = train.build(config, ranks, {})
    with torch.no_grad():
        for name, tensor in training.network.state_dict().items():
            tensor.copy_(torch.from_numpy(arrays[model.neutral_name(name)]))
    return training


def batch_of(config, images, labels):
    return torch.from_numpy(images).to(memory_format=networks.memory_format(config.layout)), torch.from_numpy(labels)


@torch.no_grad()
def logits(training, images):
    found = training.network.eval()(images)
    training.network.train()
    return found


def loss_and_gradients(training, images, labels):
    loss = train.forward_backward(training, images, labels)
    return loss, {model.neutral_name(name): p.grad for name, p in training.network.named_parameters()}


def optimized(training, gradients, rates):
    for gradient, rate in zip(gradients, rates):
        training.optimizer.set_learning_rate(rate)
        for name, parameter in training.network.named_parameters():
            # In the parameter's own memory order, as a backward pass leaves it.
            parameter.grad = torch.empty_like(parameter).copy_(torch.from_numpy(gradient[model.neutral_name(name)]))
        training.optimizer.step()
    return {model.neutral_name(name): tensor.detach() for name, tensor in training.network.state_dict().items()}
