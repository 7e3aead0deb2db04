"""Minigo's network and step in TensorFlow against recorded values of their equations, and model files."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import tensorflow
from benchmarks.minigo import gtp, models, prepare
from benchmarks.minigo.tensorflow import data, model, networks, train
from tests.in_framework.minigo import config_of, frozen_graph
from tests.in_framework.waves import digest, waves

import tensorflow as tf  # isort: skip

CONFIG = config_of(trunk_layers=2, batch_size=64)
RANKS_HERE = tensorflow.start(CONFIG)
BLOCKS = ("block0.1", "block0.2", "block1.1", "block1.2")


def weights_of(shape):
    # float32 arrays by name; gammas and variances are near 1
    return {name: np.float32(0.3 * waves(*size, phase=phase) + name.endswith(("gamma", "variance")))
            for phase, (name, size) in enumerate(models.weight_shapes(shape).items(), start=1)}  # fmt: skip


@pytest.fixture
def training():
    training = train.build(CONFIG, RANKS_HERE, {})
    for name, weight in weights_of(training.network.shape).items():
        training.network.variables[name].assign(weight)
    return training


# -- network and step -------------------------------------------------------------------------------------


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def planes_of(features="agz"):
    # uint8 (40, 5, 5, planes): the plane of the player is the same on all points
    planes = (waves(40, 5, 5, models.PLANES[features], phase=5) > 0.3).astype(np.uint8)
    planes[..., models.BLACK_TO_PLAY[features]] = np.arange(40)[:, None, None] % 2
    return planes


def test_inference_in_batches_of_one_size(training, tmp_path):
    # Recorded from the network's equations in NumPy and float64: probabilities in percent, and values
    training.save_model(tmp_path / "model.npz")
    player, rules = gtp.evaluator_of(str(tmp_path / "model.npz"), 5, "benchmarks.minigo.tensorflow", 48)
    assert (rules.size, rules.features) == (5, CONFIG.features)
    for evaluator in (
        networks.Evaluator(training.network, 48),
        networks.load_evaluator(tmp_path / "model.npz", CONFIG),
        player,
    ):
        policies, values = evaluator(planes_of())
        assert [*digest(policies * 100), *digest(values)] == pytest.approx(
            [3.8461538, -0.94590754, -0.27623776, -0.028045386], abs=1e-5
        )


def test_other_precisions_agree(training):
    network = dataclasses.replace(training.network, config=dataclasses.replace(CONFIG, inference_precision="bf16"))
    evaluators = [networks.Evaluator(each, 48) for each in (network, training.network)]
    weight = training.network.variables["policy_dense.weight"]
    for _ in range(2):
        rounded, exact = (np.concatenate(evaluator(planes_of()), axis=None) for evaluator in evaluators)
        assert 1e-5 < np.abs(rounded - exact).max() < 0.2, "rounded, and with the current weights"
        weight.assign_add(weight)
    rounded = dataclasses.replace(training.network, config=dataclasses.replace(CONFIG, precision="bf16"))
    in_bf16, in_fp32 = (
        np.array(model.losses(each, *data.synthetic_batch(CONFIG))) for each in (rounded, training.network)
    )
    assert in_bf16 == pytest.approx(in_fp32, rel=0.05)


def test_first_step(training):
    # Policy, value and L2 losses, and the first value of a gradient: by central differences of the equations in float64
    batch = (
        np.concatenate((planes_of(), planes_of()))[:64],
        softmax(waves(64, 26, phase=6)),
        np.sign(waves(64, phase=7)),
    )
    names = ("stem.weight", "block0.2.gamma", "policy_dense.weight", "value_hidden.bias")
    before = np.array([training.network.trained[name].numpy().flat[0] for name in names])
    tensors = (
        tf.constant(values, kind) for values, kind in zip(batch, (tf.uint8, tf.float32, tf.float32), strict=True)
    )
    losses = tf.function(partial(train.train_step, training))(*tensors, tf.constant(0.01))
    assert [float(loss) for loss in losses] == pytest.approx([3.8120784, 1.2726836, 352.45603], rel=1e-5)
    after = np.array([training.network.trained[name].numpy().flat[0] for name in names])
    assert (before - after) / 0.01 == pytest.approx(
        [0.024980128, -0.027089131, -0.0073219455, 0.05298662], rel=1e-2, abs=1e-4
    ), "momentum starts at 0"


# -- model files --------------------------------------------------------------------------------------------


def as_minigo(graph, **about):
    # The file of v0.7: magic, version, size of the file, size of the JSON, the JSON and the graph
    text = json.dumps({"engine": "tf", "board_size": 5, **about}).encode()
    return b"<minigo>" + networks.HEADER.pack(1, 32 + len(text) + len(graph), len(text)) + text + graph


def test_frozen_graphs_of_both_rounds_play_and_others_are_rejected(tmp_path):
    weights, planes = 0.3 * waves(425, 27), planes_of()
    linear = planes.reshape(40, -1) @ weights
    v07 = as_minigo(frozen_graph(weights, "nchw", tf.bool), input_layout="nchw")
    path, converted = tmp_path / "target", tmp_path / "target.npz"
    for content in (v07, frozen_graph(weights, "nhwc", tf.float32)):
        path.write_bytes(content)
        networks.save(converted, *networks.read(path, 5))
        policies, values = networks.load_evaluator(converted, CONFIG)(planes)
        assert policies == pytest.approx(softmax(linear[:, :26]), abs=1e-5)
        assert values == pytest.approx(np.tanh(linear[:, 26]) * np.where(planes[:, 0, 0, 16], 1, -1), abs=1e-5)
    assert prepare.main(["-o", str(tmp_path / "data"), "--target", str(path)]) == 0
    assert (tmp_path / "data" / "target.npz").read_bytes() == converted.read_bytes()
    for content, size, words in (
        (v07[:-9], 5, "bytes; only version 1 is supported"),
        (b"no graph at all", 5, "neither a NumPy archive nor a graph"),
        (frozen_graph(weights, "nhwc", tf.float32, ("policy", "value")), 5, "no policy_output and no value_output"),
        (v07, 9, "for 5 x 5"),
    ):
        path.write_bytes(content)
        with pytest.raises(Problem, match=words):
            networks.read(path, size)


# -- initial weights ---------------------------------------------------------------------------------------


def checkpoint_names():
    # Name by tf.layers of each array in the order of dual_net.py's model_inference_fn
    kinds = {
        "conv2d": {"weight": "kernel"},
        "batch_normalization": {
            "gamma": "gamma", "beta": "beta", "mean": "moving_mean", "variance": "moving_variance"
        },
        "dense": {"weight": "kernel", "bias": "bias"},
    }  # fmt: skip
    convolutions, dense = ("stem", *BLOCKS, "policy", "value"), ("policy_dense", "value_hidden", "value_dense")
    return {
        f"{name}.{ours}": f"{kind}{f'_{number}' if number else ''}/{theirs}"
        for kind, parts in kinds.items()
        for number, name in enumerate(dense if kind == "dense" else convolutions)
        for ours, theirs in parts.items()
    }


# Logits and values recorded from the equations in NumPy and float64: the heads are flattened as channels, rows, columns
# in v0.7, as rows, columns, channels before; values are of the player
@pytest.mark.parametrize(
    ("features", "step", "outputs"),
    [
        ("mlperf07", 5672, [3.7086607, -0.56479694, 0.085042791, 0.047927105]),
        ("agz", 9383, [2.7747179, -0.69199014, -0.05371069, -0.043480342]),
    ],
)
def test_a_run_starts_from_the_checkpoint_of_a_submission(features, step, outputs, tmp_path):
    shape, names = models.Shape(5, features, CONFIG.conv_width, 2, CONFIG.fc_width), checkpoint_names()
    weights = weights_of(shape)
    tensors = {"global_step": np.int64(step), **{names[name]: array for name, array in weights.items()}}
    tensors.update({f"{names[name]}/Momentum": array * 3 for name, array in weights.items()
                    if not name.endswith(("mean", "variance"))})  # fmt: skip
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "model.ckpt"), tensor_names=list(tensors), shape_and_slices=[""] * len(tensors),
        tensors=list(map(tf.constant, tensors.values())),
    )  # fmt: skip

    def start(path, **changes):
        changes = {"trunk_layers": 2, "batch_size": 64, "features": features, "initial_weights": path, **changes}
        return train.build(config_of(**changes), RANKS_HERE, {}, tmp_path)

    started, planes = start("model.ckpt.index"), tf.constant(planes_of(features))
    logits, values = (tensor.numpy() for tensor in started.network(planes, training=False))
    assert [*digest(logits), *digest(values)] == pytest.approx(outputs, abs=1e-4)
    started.save_model(tmp_path / "model.npz")
    for training in (started, start("model.npz")):
        assert training.steps == step and np.array_equal(training.network(planes, training=False)[1], values)
        for name, momentum in training.momenta.items():
            assert momentum.numpy() == pytest.approx(training.network.variables[name].numpy() * 3, abs=1e-4), name
    for path, changes, words in (
        ("model.ckpt.index", {"conv_width": 8}, "has shape"),
        ("model.ckpt-1.index", {}, "model.ckpt-1"),
        ("model.npz", {"features": "agz" if features == "mlperf07" else "mlperf07"}, "sees the planes"),
    ):
        with pytest.raises(Problem, match=words):
            start(path, **changes)
