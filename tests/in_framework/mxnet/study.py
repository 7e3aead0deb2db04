"""The study's networks, and their parameters after three steps: equal by every way of communication."""

import json
import os

import numpy as np
import pytest

from benchmarks.study.mxnet import measure, model
from benchmarks.study.mxnet.config import Config
from benchmarks.study.mxnet.model import build as network_of
from benchmarks.study.mxnet.training import batches, build, start

import mxnet as mx  # isort: skip

LONG = True
RANKS = (1, 2)
WAYS = ("horovod",) if os.environ.get("HOROVOD_SIZE", "1") != "1" else ("local", "device")
# As symbols/alexnet.py of MXNet 0.12 to 1.3.1: what is pooled is normalized.
STAGE = ["Convolution", "Activation", "LRN", "Pooling"]


@pytest.mark.parametrize(
    ("name", "image", "classes", "expected"),
    [
        # Convolutions, fully connected, weights. The study prints 60K, 60M, 4M, 24M and 55M.
        ("lenet", 224, 1000, (2, 2, 70_753_070)),
        ("lenet", 28, 10, (2, 2, 432_080)),
        ("alexnet", 224, 1000, (5, 3, 50_844_008)),
        ("googlenet", 224, 1000, (57, 1, 6_998_552)),
        ("inception-v3", 299, 1000, (94, 1, 23_817_352)),
        # 3 x 3 convolutions are 109, with 3 on short cuts; with the fully connected layer that is 110.
        ("resnet-110", 28, 1000, (112, 1, 1_795_131)),
        ("resnet-110", 28, 10, (112, 1, 1_730_781)),
    ],
)
def test_layers_weights_and_output_shape(name, image, classes, expected):
    network = network_of(name, classes, image)
    facts = model.describe(network, (2, 3, image, image))
    assert (facts["convolutions"], facts["fully_connected"], facts["weights"]) == expected
    assert facts["output"] == [2, classes]
    operators = [node["op"] for node in json.loads(network.tojson())["nodes"] if node["op"] != "null"]
    # 8 layers of AlexNet have a weight and a bias each.
    assert name != "alexnet" or (len(facts["sizes"]), operators[:8]) == (16, [*STAGE, *STAGE])


def trained(network, way, devices, batch):
    # Return the parameters of each device after three steps, without what is random in a step.
    config = Config(
        network=network, image=64, classes=10, way=way, ranks=devices, batch_size=batch, precision="fp32",
        device="cpu", records="", blocks=1, block_seconds=0.1, learning_rate=0.01, momentum=0.9, dropout=0.0,
        largest_batch=False, memory_limit_mib=2048, seed=1,
    )  # fmt: skip
    place = start(config)
    training = build(config, place)
    next_batch = batches(config, place)
    for _ in range(3):
        measure.train_step(training, next_batch())
    mx.nd.waitall()
    parameters = training.network.collect_params().values()
    return [[each.asnumpy() for each in parameter.list_data()] for parameter in parameters]


@pytest.mark.parametrize("network", ["lenet", "googlenet"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_the_same(network, way):
    # Networks without batch norm, whose statistics belong to a device: a joint batch would be another training.
    for copies, (joint,) in zip(trained(network, way, 2, 4), trained(network, "local", 1, 8)):
        assert all((each == copies[0]).all() for each in copies)
        np.testing.assert_allclose(copies[0], joint, rtol=2e-4, atol=2e-6)
