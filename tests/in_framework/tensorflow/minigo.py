"""Minigo's network and step in TensorFlow against their equations in NumPy and float64, and the files of models."""

import dataclasses
import hashlib
import json
from functools import partial

import numpy as np
import pytest

from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import tensorflow
from benchmarks.minigo import gtp, models, prepare, schedule
from benchmarks.minigo.tensorflow import model, networks
from benchmarks.minigo.tensorflow.data import synthetic_batch
from benchmarks.minigo.tensorflow.networks import Evaluator, load_evaluator
from benchmarks.minigo.tensorflow.train import build, train_step
from tests.in_framework.minigo import config_of, frozen_graph

import tensorflow as tf  # isort: skip

CONFIG = config_of(trunk_layers=2, batch_size=64)
RANKS_HERE = tensorflow.start(CONFIG)
BLOCKS, RATE = ("block0.1", "block0.2", "block1.1", "block1.2"), 0.01


@pytest.fixture
def generator():
    return np.random.RandomState(0)


@pytest.fixture
def training(generator):
    # A network whose weights, norms and statistics are all random
    training = build(CONFIG, RANKS_HERE, {})
    for variable in training.network.variables.values():
        variable.assign_add(tf.constant(np.abs(generator.standard_normal(variable.shape) * 0.1), tf.float32))
    return training


def values_of(network):
    return {name: variable.numpy().astype(np.float64) for name, variable in network.variables.items()}


# -- the equations ---------------------------------------------------------------------------------------


def conv(x, weight):
    # Convolution (batch, N, N, in) with zeros around, as sums over shifted boards
    edge, size = weight.shape[0] // 2, x.shape[1]
    padded = np.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
    places = [(i, j) for i in range(weight.shape[0]) for j in range(weight.shape[1])]
    return sum(padded[:, i : i + size, j : j + size] @ weight[i, j] for i, j in places)


def layer(weights, x, name, batch):
    # Convolution and batch-norm, by the batch or by the running statistics
    x = conv(x, weights[f"{name}.weight"])
    mean, variance = (weights[f"{name}.mean"], weights[f"{name}.variance"])
    mean, variance = (x.mean((0, 1, 2)), x.var((0, 1, 2))) if batch else (mean, variance)
    gamma, beta = weights.get(f"{name}.gamma", 1.0), weights.get(f"{name}.beta", 0.0)
    return (x - mean) / np.sqrt(variance + 1e-5) * gamma + beta


def equations(weights, planes, batch, channels_first=False):
    # Logits and values; the heads are flattened as rows, columns, channels, or as channels, rows, columns
    x = np.maximum(layer(weights, planes.astype(np.float64), "stem", batch), 0)
    for first, second in (BLOCKS[:2], BLOCKS[2:]):
        inner = np.maximum(layer(weights, x, first, batch), 0)
        x = np.maximum(x + layer(weights, inner, second, batch), 0)
    axes = (0, 3, 1, 2) if channels_first else (0, 1, 2, 3)
    policy, value = (
        np.maximum(layer(weights, x, head, batch), 0).transpose(axes).reshape(len(x), -1)
        for head in ("policy", "value")
    )
    logits = policy @ weights["policy_dense.weight"] + weights["policy_dense.bias"]
    hidden = np.maximum(value @ weights["value_hidden.weight"] + weights["value_hidden.bias"], 0)
    return logits, np.tanh(hidden @ weights["value_dense.weight"] + weights["value_dense.bias"])[:, 0]


def softmax(logits):
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def losses(weights, planes, policy, value):
    # Policy, value and L2 losses of a batch
    logits, expected = equations(weights, planes.numpy(), batch=True)
    regular = [w for name, w in weights.items() if not name.endswith(("bias", "beta", "mean", "variance"))]
    entropy = -(policy.numpy() * np.log(softmax(logits))).sum(1).mean()
    return entropy, ((expected - value.numpy()) ** 2).mean(), sum((w**2).sum() / 2 for w in regular)


def total(weights, batch):
    # The loss that a step differentiates
    policy, value, l2 = losses(weights, *batch)
    return policy + CONFIG.value_cost_weight * value + CONFIG.l2_strength * l2


def test_inference_is_the_equations_in_passes_of_one_size(training, tmp_path):
    planes = synthetic_batch(CONFIG)[0].numpy()[:40]
    logits, values = equations(values_of(training.network), planes, batch=False)
    training.save_model(tmp_path / "model.npz")
    player, rules = gtp.evaluator_of(str(tmp_path / "model.npz"), 5, "benchmarks.minigo.tensorflow", 48)
    assert (rules.size, rules.features) == (5, CONFIG.features)
    for evaluator in (Evaluator(training.network, 48), load_evaluator(tmp_path / "model.npz", CONFIG), player):
        found = evaluator(planes)
        assert np.abs(found[0] - softmax(logits)).max() < 1e-5 and np.abs(found[1] - values).max() < 1e-5


def test_a_network_plays_in_another_precision_than_it_trains_in(training):
    other = dataclasses.replace(CONFIG, inference_precision="bf16")
    network = dataclasses.replace(training.network, config=other)
    evaluator, planes = Evaluator(network, 48), synthetic_batch(CONFIG)[0].numpy()[:40]
    for _ in range(2):
        weights = values_of(training.network)
        logits, values = equations(weights, planes, batch=False)
        errors = [np.abs(a - b).max() for a, b in zip(evaluator(planes), (softmax(logits), values), strict=True)]
        assert 1e-5 < max(errors) < 0.05, "rounded, and of the weights of the moment"
        training.network.variables["policy_dense.weight"].assign_add(weights["policy_dense.weight"].astype(np.float32))
    assert network(planes[:1], training=False)[0].dtype == tf.float32 and training.network.config == CONFIG
    with pytest.raises(ValueError, match="set inference_precision=same"):
        dataclasses.replace(CONFIG, inference_precision="fp16")


def test_a_step_is_momentum_on_the_losses_gradient(training):
    batch, weights = synthetic_batch(CONFIG), values_of(training.network)
    wanted = losses(weights, *batch)
    found = tf.function(partial(train_step, training))(*batch, tf.constant(RATE))
    assert [float(each) for each in found] == pytest.approx(wanted, abs=1e-3)
    for name in ("stem.weight", "block0.2.gamma", "policy_dense.weight", "value_hidden.bias"):
        place = np.zeros_like(weights[name])
        place.flat[0] = 1e-5
        sides = [total({**weights, name: weights[name] + sign * place}, batch) for sign in (1, -1)]
        step = (weights[name].flat[0] - training.network.trained[name].numpy().flat[0]) / RATE
        assert step == pytest.approx((sides[0] - sides[1]) / 2e-5, abs=2e-3), "momentum's first step is the gradient"


def test_precisions_agree(training):
    arrays = {name: variable.numpy() for name, variable in training.network.variables.items()}
    found = []
    for precision in ("fp32", "bf16"):
        network = model.build(dataclasses.replace(CONFIG, precision=precision), training.network.shape, arrays)
        found.append([float(each) for each in model.losses(network, *synthetic_batch(CONFIG))])
    assert found[1] == pytest.approx(found[0], rel=0.05)


# -- files of models ---------------------------------------------------------------------------------------


def as_minigo(graph, **about):
    # The file of v0.7: magic, version, size of the file, size of the JSON, the JSON and the graph
    text = json.dumps({"engine": "tf", "board_size": 5, **about}).encode()
    return b"<minigo>" + networks.HEADER.pack(1, 32 + len(text) + len(graph), len(text)) + text + graph


def test_frozen_graphs_of_both_rounds_play_and_others_are_refused(generator, tmp_path):
    weights = generator.standard_normal((425, 27)) * 0.2
    planes = synthetic_batch(CONFIG)[0].numpy()[:40]
    planes[:, :, :, 16] = generator.randint(0, 2, (40, 1, 1))
    linear = planes.reshape(40, -1) @ weights
    of_v07 = as_minigo(frozen_graph(weights, "nchw", tf.bool), input_layout="nchw")
    path, kept = tmp_path / "target", tmp_path / "target.npz"
    for content in (of_v07, frozen_graph(weights, "nhwc", tf.float32)):
        path.write_bytes(content)
        networks.save(kept, *networks.read(path, 5))
        policies, values = load_evaluator(kept, CONFIG)(planes)
        assert np.abs(policies - softmax(linear[:, :26])).max() < 1e-5
        assert np.abs(values - np.tanh(linear[:, 26]) * np.where(planes[:, 0, 0, 16], 1, -1)).max() < 1e-5
    with pytest.raises(Problem, match="sees the planes of agz"):
        load_evaluator(kept, dataclasses.replace(CONFIG, features="mlperf07"))
    assert prepare.main(["-o", str(tmp_path / "data"), "--target", str(path)]) == 0
    assert (tmp_path / "data" / "target.npz").read_bytes() == kept.read_bytes()
    passport = json.loads((tmp_path / "data" / "dataset.json").read_text())
    assert passport["how"]["target"] == hashlib.sha256(path.read_bytes()).hexdigest()
    for content, size, words in (
        (of_v07[:-9], 5, "bytes; version 1 is known"),
        (b"no graph at all", 5, "neither a NumPy archive nor a graph"),
        (frozen_graph(weights, "nhwc", tf.float32, ("policy", "value")), 5, "no policy_output and no value_output"),
        (of_v07, 9, "for 5 x 5"),
    ):
        path.write_bytes(content)
        with pytest.raises(Problem, match=words):
            networks.read(path, size)


# -- what a run begins with --------------------------------------------------------------------------------


def checkpoint_names():
    # Our name of each array with its name by tf.layers in the order of dual_net.py's model_inference_fn
    parts = {"gamma": "gamma", "beta": "beta", "mean": "moving_mean", "variance": "moving_variance"}
    found = {}
    for number, name in enumerate(("stem", *BLOCKS, "policy", "value")):
        end = f"_{number}" if number else ""
        found[f"{name}.weight"] = f"conv2d{end}/kernel"
        found.update({f"{name}.{mine}": f"batch_normalization{end}/{theirs}" for mine, theirs in parts.items()})
    for number, name in enumerate(("policy_dense", "value_hidden", "value_dense")):
        end = f"_{number}" if number else ""
        found.update({f"{name}.weight": f"dense{end}/kernel", f"{name}.bias": f"dense{end}/bias"})
    return found


@pytest.mark.parametrize(("features", "step"), [("mlperf07", 5672), ("agz", 9383)])
def test_a_run_begins_where_the_submissions_checkpoint_is(features, step, generator, tmp_path):
    # Step, momenta, the order of the heads' weights and whose outcome the value is; and from a model file
    shape = models.Shape(5, features, CONFIG.conv_width, 2, CONFIG.fc_width)
    sizes, theirs = models.weight_shapes(shape), checkpoint_names()
    arrays = {name: (generator.standard_normal(size) * 0.2).astype(np.float32) for name, size in sizes.items()}
    arrays.update({name: np.abs(array) + 1 for name, array in arrays.items() if name.endswith("variance")})
    tensors = {theirs[name]: array for name, array in arrays.items()} | {"global_step": np.int64(step)}
    tensors |= {
        f"{theirs[name]}/Momentum": array * 3
        for name, array in arrays.items()
        if not name.endswith(("mean", "variance"))
    }
    saved = [tf.constant(tensors[name]) for name in sorted(tensors)]
    prefix, slices = str(tmp_path / "model.ckpt"), [""] * len(saved)
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=sorted(tensors), shape_and_slices=slices, tensors=saved)

    def started(path, **changes):
        changes = {"trunk_layers": 2, "batch_size": 64, "features": features, **changes}
        return build(config_of(**changes, initial_weights=path), RANKS_HERE, {}, tmp_path)

    planes = generator.randint(0, 2, (40, 5, 5, models.PLANES[features])).astype(np.uint8)
    black = models.BLACK_TO_PLAY[features]
    planes[..., black] = generator.randint(0, 2, (40, 1, 1))
    weights = {name: array.astype(np.float64) for name, array in arrays.items()}
    logits, values = equations(weights, planes, batch=False, channels_first=features == "mlperf07")
    values *= np.where(planes[:, 0, 0, black], 1, -1)
    assert 0.01 < np.abs(values).mean() < 0.99, "values that say something"
    begun = started("model.ckpt.index")
    found = begun.network(tf.constant(planes), training=False)
    assert np.abs(found[0].numpy() - logits).max() < 1e-4 and np.abs(found[1].numpy() - values).max() < 1e-4
    begun.save_model(tmp_path / "model.npz")
    for training in (begun, started("model.npz")):
        assert (training.steps, schedule.learning_rate(training.config, training.steps)) == (step, 0.005)
        for name, momentum in training.momenta.items():
            assert np.abs(momentum.numpy() - training.network.variables[name].numpy() * 3).max() < 1e-4
        assert np.array_equal(training.network(tf.constant(planes), training=False)[1], found[1])
    other = "agz" if features == "mlperf07" else "mlperf07"
    for path, changes, words in (
        ("model.ckpt.index", {"conv_width": 8}, "has shape"),
        ("model.ckpt-1.index", {}, "model.ckpt-1"),
        ("model.npz", {"features": other}, "sees the planes"),
    ):
        with pytest.raises(Problem, match=words):
            started(path, **changes)
