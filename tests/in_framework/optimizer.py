"""LARS and SGD of the implementation against the submitted rules in NumPy, in fp32 and fp16; prints the worst error."""

import dataclasses
import json
from types import SimpleNamespace

import mxnet as mx
import numpy as np
from mxnet import gluon

from benchmarks.common.frameworks import mxnet
from benchmarks.resnet.mxnet import optimizer
from benchmarks.resnet.mxnet.config import Config
from tests.in_framework import sgd_and_lars

STEPS = 12
SHAPES = {
    "conv_weight": (8, 3, 3, 3),
    "bn_gamma": (8,),
    "bn_beta": (8,),
    "dense_weight": (10, 8),
    "dense_bias": (10,),
}
NO_WEIGHT_DECAY = {"sgd": ("beta", "bias"), "lars": ("gamma", "beta")}
"""As the systems have it."""


def trained(values, gradients, config, rates, batch):
    """Steps of the implementation's trainer."""
    dtype = "float16" if config.precision == "fp16" else "float32"
    parameters = gluon.ParameterDict()
    for name, value in values.items():
        kind = "float32" if name.startswith("bn") else dtype
        parameters.get(name, shape=value.shape, dtype=kind, init=mx.init.Constant(mx.nd.array(value)))
    parameters.initialize()
    trainer = optimizer.build_trainer(parameters, config)
    for step, rate in enumerate(rates):
        trainer.set_learning_rate(rate)
        for name, parameter in parameters.items():
            parameter.grad()[:] = mx.nd.array(gradients[step][name]).astype(parameter.dtype)
            parameter._data[0]._fresh_grad = True
        trainer.step(batch, ignore_stale_grad=True)
    return {name: parameter.data().asnumpy() for name, parameter in parameters.items()}


def worst(name, precision):
    """Largest error of any parameter, relative to its norm."""
    config = dataclasses.replace(
        Config(),
        device="gpu",
        optimizer=name,
        precision=precision,
        weight_decay=0.01,
        momentum=0.9,
        lars_eta=0.1,
        no_weight_decay=NO_WEIGHT_DECAY[name],
    )
    generator = np.random.RandomState(0)
    values = {key: generator.randn(*shape).astype("float16").astype("float32") for key, shape in SHAPES.items()}
    gradients = [
        {key: (generator.randn(*shape) * 8).astype("float16").astype("float32") for key, shape in SHAPES.items()}
        for _ in range(STEPS)
    ]
    rates = [sgd_and_lars.rate_at(step + 1, 1.0, STEPS, warmup=4) for step in range(STEPS)]
    averaged = [{key: gradient / 4 for key, gradient in each.items()} for each in gradients]
    expected = sgd_and_lars.trained(values, averaged, rates, config)
    found = trained(values, gradients, config, rates, batch=4)
    return max(float(np.linalg.norm(found[key] - expected[key]) / np.linalg.norm(expected[key])) for key in SHAPES)


mxnet.start(SimpleNamespace(device="cpu", precision="fp32"))
errors = {f"{name} {kind}": worst(name, kind) for name in ("sgd", "lars") for kind in ("fp32", "fp16")}
mxnet.finish()
print(json.dumps(errors))
