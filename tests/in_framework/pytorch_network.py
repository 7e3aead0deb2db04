"""Parameter counts, strides, layouts, precisions and the loss of the network in PyTorch, as JSON."""

import dataclasses
import json

import numpy as np
import torch

from benchmarks.common.frameworks.pytorch import autocast
from benchmarks.resnet.architecture import STAGES, input_shape
from benchmarks.resnet.pytorch import model, optimizer, train, training
from benchmarks.resnet.pytorch.config import Config

BASE = dataclasses.replace(
    Config(), device="cpu", layout="NCHW", precision="fp32", pad_channels=False, batch_size=2, image_size=32,
    depth=18, num_classes=10,
)  # fmt: skip


def trainable(depth):
    with torch.device("meta"):
        network = model.build(dataclasses.replace(BASE, depth=depth, num_classes=1000))
    return sum(parameter.numel() for parameter in network.parameters())


def strides_of_first_bottleneck():
    """Strides of the three convolutions of the first block of the second stage of ResNet-50."""
    with torch.device("meta"):
        block = model.build(dataclasses.replace(BASE, depth=50)).stage2.block1
    return [conv.stride[0] for conv in (block.conv1, block.conv2, block.conv3)]


def loss_error(smoothing):
    """Error of the loss against the formula in float64."""
    generator = np.random.RandomState(0)
    logits, labels = generator.randn(5, 7), np.array([0, 3, 6, 2, 2])
    found = model.smoothed_loss(torch.from_numpy(logits), torch.from_numpy(labels), smoothing).item()
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    target = np.full((5, 7), smoothing / 7)
    target[np.arange(5), labels] += 1 - smoothing
    return float(abs(found + (target * logs).sum(axis=1).mean()))


def logits(**changes):
    """Logits of one batch with the weights of the base's seed."""
    config = dataclasses.replace(BASE, **changes)
    torch.manual_seed(9)
    images = torch.rand(input_shape(BASE)).to(memory_format=model.memory_format(config))
    network = model.place(model.build(config), config, torch.device("cpu")).eval()
    with torch.no_grad(), autocast(torch.device("cpu"), config.precision):
        return network(images).float()


def distance(left, right):
    return float((left - right).norm() / right.norm())


def weights_kept_by_a_warm_up():
    """Whether compiling leaves weights, statistics and gradients as they were; the compiler itself is not asked."""
    config = dataclasses.replace(BASE, compile="default")
    network = model.build(config)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    eager = training.Training(network, network, optimizer.build(network, config), config)
    training.warm_up(eager, torch.device("cpu"), train.forward_backward)
    same = all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    return same and all(parameter.grad is None for parameter in network.parameters())


first = logits()
print(
    json.dumps(
        {
            "parameters": {depth: trainable(depth) for depth in STAGES},
            "strides": strides_of_first_bottleneck(),
            "loss error": max(loss_error(0.0), loss_error(0.1)),
            "same seed": distance(logits(), first),
            "other seed": distance(logits(seed=2), first),
            "NHWC": distance(logits(layout="NHWC"), first),
            "bf16": distance(logits(precision="bf16"), first),
            "warm-up keeps": weights_kept_by_a_warm_up(),
        }
    )
)
