"""Parameter counts, strides, fused operators and the loss of the network, as JSON."""

import dataclasses
import json
from types import SimpleNamespace

import mxnet as mx
import numpy as np

from benchmarks.resnet.architecture import STAGES
from benchmarks.resnet.mxnet import model
from benchmarks.resnet.mxnet.config import Config

BASE = dataclasses.replace(
    Config(),
    device="cpu",
    layout="NCHW",
    precision="fp32",
    pad_channels=False,
    num_classes=1000,
    batch_size=2,
)


def trainable(depth):
    network = model.build(dataclasses.replace(BASE, depth=depth))
    parameters = network.collect_params().values()
    return int(sum(np.prod(p.shape) for p in parameters if p.grad_req != "null"))


def strides_of_first_bottleneck():
    """Strides of the three convolutions of the first block of the second stage of ResNet-50."""
    network = model.build(dataclasses.replace(BASE, depth=50))
    block = network[3 + 3]
    return [
        layer._kwargs["stride"][0] for layer in block.body if hasattr(layer, "_kwargs") and "stride" in layer._kwargs
    ]


def choice(config, operators):
    found = model.fused_operators(config, operators)
    return [found.batch_norm_relu, found.batch_norm_add_relu]


def loss_error(smoothing):
    """Error of the loss against the formula in float64."""
    generator = np.random.RandomState(0)
    logits, labels = generator.randn(5, 7), np.array([0, 3, 6, 2, 2])
    found = model.SmoothedLoss(smoothing)(mx.nd.array(logits), mx.nd.array(labels)).asnumpy()
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    target = np.full((5, 7), smoothing / 7)
    target[np.arange(5), labels] += 1 - smoothing
    return float(np.abs(found + (target * logs).sum(axis=1)).max())


def initial(seed):
    network = model.build(dataclasses.replace(BASE, depth=18, num_classes=10))
    model.initialize(network, dataclasses.replace(BASE, depth=18, num_classes=10, seed=seed), mx.cpu())
    return network


class NgcOperators:
    """Symbols with the arguments that NVIDIA's submissions hand to them, and no others."""

    @staticmethod
    def BatchNorm(data, act_type, axis, eps, momentum, fix_gamma):
        assert (act_type, axis, fix_gamma) == ("relu", 3, False)

    @staticmethod
    def BatchNormAddRelu(data, addend, axis, eps, momentum, fix_gamma):
        assert (axis, fix_gamma) == (3, False)


class OldOperators:
    """An MXNet whose documentation alone knows of the fused operator."""

    @staticmethod
    def BatchNorm(data, axis, eps, momentum, fix_gamma):
        """There is no act_type."""


def fused_arguments():
    """What the network's fused blocks hand to NVIDIA's operators."""
    found = []

    def operator(**arguments):
        found.append(sorted(arguments))

    layers = model.Layers(gpu, model.FusedOperators(True, True))
    operators = SimpleNamespace(BatchNorm=operator, BatchNormAddRelu=operator)
    parameters = dict.fromkeys(("gamma", "beta", "running_mean", "running_var"))
    layers.norm_relu(8).hybrid_forward(operators, None, **parameters)
    layers.norm_add_relu(8).hybrid_forward(operators, None, None, **parameters)
    return found


gpu = dataclasses.replace(Config(), device="gpu", layout="NHWC", precision="fp16")
first, second, other = initial(1), initial(1), initial(2)
image = mx.nd.random.uniform(shape=(2, 3, 32, 32))
print(
    json.dumps(
        {
            "parameters": {depth: trainable(depth) for depth in STAGES},
            "strides": strides_of_first_bottleneck(),
            "fused on NGC": choice(gpu, NgcOperators()),
            "fused upstream": choice(gpu, mx.sym),
            "fused by documentation": choice(gpu, OldOperators()),
            "reported upstream": model.missing_operators(gpu),
            "reported on NGC": model.missing_operators(gpu, NgcOperators()),
            "reported on a CPU": model.missing_operators(BASE),
            "arguments of a fused block": fused_arguments(),
            "fused in fp32": choice(dataclasses.replace(gpu, precision="fp32"), NgcOperators()),
            "loss error": max(loss_error(0.0), loss_error(0.1)),
            "same seed": float(mx.nd.abs(first(image) - second(image)).max().asscalar()),
            "other seed": float(mx.nd.abs(first(image) - other(image)).max().asscalar()),
        }
    )
)
