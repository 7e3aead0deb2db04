"""ResNet in MXNet: network, fused operators, step, optimizers, and what the input hands out."""

import collections
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.common.data.recordio import read_index, read_record, unpack
from benchmarks.common.frameworks import mxnet
from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet import architecture, inputs, schedule
from benchmarks.resnet.mxnet import data as tensors
from benchmarks.resnet.mxnet import model, optimizer, train
from benchmarks.resnet.mxnet.config import Config
from tests.in_framework import resnet
from tests.in_framework.waves import digest, waves

import mxnet as mx  # isort: skip
from mxnet import gluon  # isort: skip

ranks = mxnet.start(SimpleNamespace(device="cpu"))
GPU = dataclasses.replace(Config(), device="gpu", layout="NHWC", precision="fp16")


def built(**changes):
    return model.build(resnet.config_of(Config, **changes))


@pytest.mark.parametrize("depth", resnet.PARAMETERS)
def test_size_of_the_network(depth):
    parameters = built(depth=depth, num_classes=1000).collect_params().values()
    assert sum(np.prod(p.shape) for p in parameters if p.grad_req != "null") == resnet.PARAMETERS[depth]


# The arguments of NVIDIA's operators, and of an MXNet without them
NGC = SimpleNamespace(
    BatchNorm=lambda data, act_type, axis, eps, momentum, fix_gamma: None,
    BatchNormAddRelu=lambda data, addend, axis, eps, momentum, fix_gamma: None,
)
OLD = SimpleNamespace(BatchNorm=lambda data, axis, eps, momentum, fix_gamma: None)


@pytest.mark.parametrize(
    ("config", "operators", "has"),
    [
        (GPU, NGC, True),
        (GPU, mx.sym, False),
        (GPU, OLD, False),
        (dataclasses.replace(GPU, precision="fp32"), NGC, False),
    ],
)
def test_fused_operators_are_found_by_asking(config, operators, has):
    assert model.fused_operators(config, operators) == model.FusedOperators(has, has)
    missing = "has no BatchNorm with act_type and BatchNormAddRelu: batch-norm, sum and ReLU run as separate, slower"
    assert (missing in model.missing_operators(config, operators)) != (has or config is not GPU)


def test_fused_operators_get_the_submitted_arguments():
    # As resnet-v1b-fl.py calls them; Gluon's other arguments are left out.
    calls, layers = [], model.Layers(GPU, model.FusedOperators(True, True))
    symbols = SimpleNamespace(**dict.fromkeys(vars(NGC), lambda **given: calls.append(given)))
    parameters = dict.fromkeys(("gamma", "beta", "running_mean", "running_var"))
    layers.norm_relu(8).hybrid_forward(symbols, None, **parameters)
    layers.norm_add_relu(8).hybrid_forward(symbols, None, None, **parameters)
    numbers = {"eps": GPU.batch_norm_epsilon, "momentum": GPU.batch_norm_momentum, "axis": 3, "fix_gamma": False}
    common = {**dict.fromkeys(("beta", "data", "gamma", "moving_mean", "moving_var")), "name": "fwd", **numbers}
    assert calls == [{**common, "act_type": "relu"}, {**common, "addend": None}]


def losses(training, count, skip=0):
    # Losses of steps on the same images at each call, at rates that change
    labels, shape = mx.nd.arange(training.config.batch_size) % 10, architecture.input_shape(training.config)
    steps = [(mx.nd.array(2 * waves(*shape, phase=step)), 0.1 * (step + 1)) for step in range(skip, count)]
    return [train.train_step(training, images, labels, rate).asscalar() for images, rate in steps]


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_a_warm_up_leaves_no_trace(name):
    config = resnet.config_of(Config, optimizer=name, learning_rate=0.3, warm_up_steps=3)
    expected = losses(train.build(config, ranks, {}), 4)
    training = train.build(config, ranks, {})
    train.warm_up(training)
    assert losses(training, 2) == expected[:2]
    resumed = train.build(config, ranks, train.state_dict(training))
    for each in (training, resumed):
        train.warm_up(each)
        assert losses(each, 4, skip=2) == expected[2:]


@pytest.mark.parametrize(("visible", "expected"), [(4, 3), (1, 0)])
def test_a_rank_takes_the_gpu_of_its_place(monkeypatch, visible, expected):
    monkeypatch.setattr(mxnet.hvd, "local_rank", lambda: 3)
    monkeypatch.setattr(mx.context, "num_gpus", lambda: visible)
    assert mxnet.start(SimpleNamespace(device="gpu")).context.device_id == expected


SHAPES = {"conv_weight": (8, 3, 3, 3), "bn_gamma": (8,), "bn_beta": (8,), "dense_weight": (10, 8), "dense_bias": (10,)}
RATES = [0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05]


# Norms and digests of the weights after 12 steps of NVIDIA's rules (v0.7, common/fit.py: SGDwFASTLARS, of which the
# first call of a step corrects the momentum, and mx.optimizer.SGD) in float64. The last update of fp16 weights is
# rounded from their fp32 masters: half a unit in 2 ** 11.
@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-5), ("fp16", 5e-4)])
@pytest.mark.parametrize(
    ("name", "undecayed", "norms", "digests"),
    [
        (
            "sgd",
            ("beta", "bias"),
            [100.36701, 16.156602426, 17.542697709, 64.008342608, 20.607438882],
            [3.7728440881, 3.0305255498, 2.9958877846, 4.242376241, 3.7634085512],
        ),
        (
            "lars",
            ("gamma", "beta"),
            [12.243337981, 17.542697709, 17.542697709, 7.5235805581, 19.173867506],
            [0.16395367346, 2.9958877846, 2.9958877846, 0.21464249005, 3.7451627314],
        ),
    ],
)
def test_optimizers_follow_the_submitted_rules(name, undecayed, norms, digests, precision, error):
    options = {"weight_decay": 0.01, "momentum": 0.9, "lars_eta": 0.1, "no_weight_decay": undecayed}
    config = dataclasses.replace(Config(), device="gpu", optimizer=name, precision=precision, **options)
    parameters = gluon.ParameterDict()
    for key, shape in SHAPES.items():
        kind = "float16" if precision == "fp16" and not key.startswith("bn") else "float32"
        parameters.get(key, shape=shape, dtype=kind, init=mx.init.Constant(mx.nd.array(np.float16(waves(*shape)))))
    parameters.initialize()
    trainer = optimizer.build_trainer(parameters, config)
    for step, rate in enumerate(RATES, start=1):
        trainer.set_learning_rate(rate)
        for parameter in parameters.values():
            parameter.grad()[:] = mx.nd.array(np.float16(8 * waves(*parameter.shape, phase=step)))
            parameter._data[0]._fresh_grad = True
        trainer.step(4, ignore_stale_grad=True)
    weights = [parameter.data().asnumpy().astype(float) for parameter in parameters.values()]
    assert list(map(np.linalg.norm, weights)) == pytest.approx(norms, rel=error)
    assert [digest(array)[1] for array in weights] == pytest.approx(digests, rel=error)


@pytest.mark.parametrize(
    ("epochs", "offset", "evaluated", "blocks"),
    [
        # NVIDIA's v0.7 DGX-1 log: evaluations after epochs 1, 5, 9, ... 37; blocks of 1, then 4 epochs.
        (37, 0, list(range(1, 38, 4)), [1, *[4] * 9]),
        # v0.5 DGX-1: offset 2, so epoch 63 counted from 1; the last epoch is always evaluated.
        (100, 2, [*range(3, 100, 4), 100], [3, *[4] * 24, 1]),
    ],
)
def test_evaluations_and_blocks_are_where_the_submissions_had_them(epochs, offset, evaluated, blocks):
    config = SimpleNamespace(epochs=epochs, eval_period=4, eval_offset=offset, checkpoint_interval=0)
    timeline = schedule.timeline(config, 10)
    assert [step // 10 for step in range(1, timeline.steps + 1) if timeline.evaluates_after(step)] == evaluated
    assert [timeline.block_epochs(first) for first in (0, *evaluated[:-1])] == blocks


def batches_of(digits, shard=0, shards=1, saved=None, **changes):
    config = resnet.config_of(Config, batch_size=50, dali_shuffle_buffer=100, **changes)
    return inputs.training_input(tensors, config, digits, Ranks(shard, shards, shard, shards, mx.cpu()), saved)


def test_shards_have_every_image_of_an_epoch(digits):
    seen = collections.Counter()
    for stream in (batches_of(digits, shard, 2) for shard in range(2)):
        for _ in range(1500 // 2 // 50):
            seen.update(stream.next()[1].asnumpy().astype(int).tolist())
    with (digits / "train.rec").open("rb") as file:
        offsets = [offset for _, offset in read_index(digits / "train.idx")]
        assert seen == collections.Counter(int(unpack(read_record(file, offset))[0]) for offset in offsets)


def test_training_input_resumes_exactly(digits):
    whole = batches_of(digits)
    for _ in range(40):
        whole.next()
    resumed = batches_of(digits, saved=whole.checkpoint())
    for _ in range(40):
        assert all(np.array_equal(*map(mx.nd.NDArray.asnumpy, pair)) for pair in zip(whole.next(), resumed.next()))
