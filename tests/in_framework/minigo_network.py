"""Minigo's network and step in TensorFlow against their equations in NumPy and float64."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.data.problem import Problem
from benchmarks.common.frameworks import tensorflow
from benchmarks.common.run import configuration
from benchmarks.minigo import frozen, models, schedule
from benchmarks.minigo.tensorflow import model
from benchmarks.minigo.tensorflow.config import Config
from benchmarks.minigo.tensorflow.data import synthetic_batch
from benchmarks.minigo.tensorflow.evaluator import Evaluator, load_evaluator
from benchmarks.minigo.tensorflow.train import build, train_step

import tensorflow as tf  # isort: skip

config = configuration.load(Config, Path(sys.argv[1]))
ranks = tensorflow.start(config)
training = build(config, ranks, {})
network = training.network
generator = np.random.RandomState(0)
for variable in network.variables.values():
    noise = generator.standard_normal(variable.shape) * 0.1
    variable.assign(variable + tf.constant(np.abs(noise), tf.float32))
weights = {name: variable.numpy().astype(np.float64) for name, variable in network.variables.items()}
planes, policy, value = synthetic_batch(config)


def conv(x: Any, weight: Any) -> Any:
    """Convolution (batch, N, N, in) with zeros around, as sums over shifted boards."""
    edge, size = weight.shape[0] // 2, x.shape[1]
    padded = np.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
    places = [(i, j) for i in range(weight.shape[0]) for j in range(weight.shape[1])]
    return sum(padded[:, i : i + size, j : j + size] @ weight[i, j] for i, j in places)


def layer(x: Any, name: str, batch: bool) -> Any:
    """Convolution and batch-norm, by the batch or by the running statistics."""
    x = conv(x, weights[f"{name}.weight"])
    mean, variance = (x.mean((0, 1, 2)), x.var((0, 1, 2))) if batch else (weights[f"{name}.mean"], None)
    variance = weights[f"{name}.variance"] if variance is None else variance
    gamma, beta = weights.get(f"{name}.gamma", 1.0), weights.get(f"{name}.beta", 0.0)
    return (x - mean) / np.sqrt(variance + 1e-5) * gamma + beta


def equations(x: Any, batch: bool, channels_first: bool = False) -> Any:
    """Logits and values; the heads are flattened as rows, columns, channels, or as channels, rows, columns."""
    x = np.maximum(layer(x, "stem", batch), 0)
    for block in range(config.trunk_layers):
        inner = np.maximum(layer(x, f"block{block}.1", batch), 0)
        x = np.maximum(x + layer(inner, f"block{block}.2", batch), 0)
    flat, axes = (len(x), -1), (0, 3, 1, 2) if channels_first else (0, 1, 2, 3)
    heads = {head: np.maximum(layer(x, head, batch), 0).transpose(axes).reshape(flat) for head in ("policy", "value")}
    logits = heads["policy"] @ weights["policy_dense.weight"] + weights["policy_dense.bias"]
    hidden = np.maximum(heads["value"] @ weights["value_hidden.weight"] + weights["value_hidden.bias"], 0)
    return logits, np.tanh(hidden @ weights["value_dense.weight"] + weights["value_dense.bias"])[:, 0]


def losses() -> Any:
    """Policy, value and L2 losses of the batch."""
    logits, expected = equations(planes.numpy().astype(np.float64), batch=True)
    logs = logits - logits.max(1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(1, keepdims=True))
    regular = [w for name, w in weights.items() if not name.endswith(("bias", "beta", "mean", "variance"))]
    l2 = sum((w**2).sum() / 2 for w in regular)
    return -(policy.numpy() * logs).sum(1).mean(), ((expected - value.numpy()) ** 2).mean(), l2


def total() -> float:
    """The loss that the step differentiates."""
    found = losses()
    return float(found[0] + config.value_cost_weight * found[1] + config.l2_strength * found[2])


def refused(call: Any) -> str:
    try:
        call()
    except Problem as problem:
        return str(problem)
    return ""


evaluator = Evaluator(network, 48)
seen = evaluator(planes.numpy()[:40])
wanted = equations(planes.numpy()[:40].astype(np.float64), batch=False)
shares = np.exp(wanted[0] - wanted[0].max(1, keepdims=True))
shares /= shares.sum(1, keepdims=True)
report = {"inference": [float(np.abs(seen[0] - shares).max()), float(np.abs(seen[1] - wanted[1]).max())]}
before = {name: variable.numpy() for name, variable in network.trained.items()}
wanted_losses, rate = losses(), 0.01
derivatives, changed = {}, {}
for name in ("stem.weight", "block0.2.gamma", "policy_dense.weight", "value_hidden.bias"):
    index = tuple(np.zeros(weights[name].ndim, int))
    kept, sides = weights[name][index], []
    for shift in (1e-5, -1e-5):
        weights[name][index] = kept + shift
        sides.append(total())
    weights[name][index] = kept
    derivatives[name] = (sides[0] - sides[1]) / 2e-5
found = [float(each) for each in tf.function(partial(train_step, training))(planes, policy, value, tf.constant(rate))]
report["losses"] = [abs(mine - float(theirs)) for mine, theirs in zip(found, wanted_losses, strict=True)]
for name, derivative in derivatives.items():
    index = tuple(np.zeros(weights[name].ndim, int))
    step = (before[name][index] - network.trained[name].numpy()[index]) / rate
    changed[name] = abs(float(step) - derivative)
report["first update"] = changed
folder = Path(sys.argv[2])
training.save_model(folder / "model.npz")
again = load_evaluator(folder / "model.npz", config)(planes.numpy()[:40])
report["model file"] = float(np.abs(again[0] - Evaluator(network, 40)(planes.numpy()[:40])[0]).max())
other = models.Shape(9, "agz", 8, 1, 8)
models.save(folder / "nine.npz", other, models.initial_weights(other, 0))
(folder / "broken.npz").write_bytes((folder / "nine.npz").read_bytes()[:-100])
report["nine"] = refused(lambda: load_evaluator(folder / "nine.npz", config))
report["broken"] = refused(lambda: load_evaluator(folder / "broken.npz", config))
report["missing"] = refused(lambda: load_evaluator(folder / "none.npz", config))
report["precisions"] = {}
for precision in ("fp32", "bf16"):
    values = {**json.loads(Path(sys.argv[1]).read_text()), "precision": precision}
    low = Config(**{key: tuple(each) if isinstance(each, list) else each for key, each in values.items()})
    arrays = {name: variable.numpy() for name, variable in network.variables.items()}
    report["precisions"][precision] = [
        float(each) for each in model.losses(model.build(low, network.shape, arrays), planes, policy, value)
    ]


# -- frozen graphs -----------------------------------------------------------------------------------------


def frozen_graph(layout: str, kind: Any, outputs: Any = ("policy_output", "value_output")) -> Any:
    """A graph whose weights are constants, with the names of the submissions' and the value of black's side."""
    graph, (height, width) = tf.Graph(), (5, 5)
    with graph.as_default():
        shape = (None, height, width, 17) if layout == "nhwc" else (None, 17, height, width)
        x = tf.cast(tf.compat.v1.placeholder(kind, shape, name="pos_tensor"), tf.float32)
        x = x if layout == "nhwc" else tf.transpose(x, (0, 2, 3, 1))
        found = tf.matmul(tf.reshape(x, (-1, 425)), tf.constant(frozen_weights, tf.float32))
        tf.nn.softmax(found[:, :26], name=outputs[0])
        tf.tanh(found[:, 26], name=outputs[1])
    return graph.as_graph_def().SerializeToString()


def as_minigo(graph: bytes, **about: Any) -> bytes:
    """The file of v0.7: magic, version, size of the file, size of the JSON, the JSON and the graph."""
    text = json.dumps({"engine": "tf", "board_size": 5, **about}).encode()
    return b"<minigo>" + frozen.HEADER.pack(1, 32 + len(text) + len(graph), len(text)) + text + graph


frozen_weights = generator.standard_normal((425, 27)) * 0.2
small = planes.numpy()[:40]
small[:, :, :, 16] = generator.randint(0, 2, (40, 1, 1))
linear = small.reshape(40, -1) @ frozen_weights
policies = np.exp(linear[:, :26]) / np.exp(linear[:, :26]).sum(1, keepdims=True)
values = np.tanh(linear[:, 26]) * np.where(small[:, 0, 0, 16], 1, -1)
files = {
    "target.pb": frozen_graph("nhwc", tf.float32),
    "target.minigo.tf": as_minigo(frozen_graph("nchw", tf.bool), input_layout="nchw"),
}
report["frozen"] = {}
for name, content in files.items():
    (folder / name).write_bytes(content)
    frozen.save(folder / "target.npz", *frozen.read(folder / name, 5))
    seen = load_evaluator(folder / "target.npz", config)(small)
    report["frozen"][name] = [float(np.abs(seen[0] - policies).max()), float(np.abs(seen[1] - values).max())]
(folder / "cut.minigo.tf").write_bytes(files["target.minigo.tf"][:-9])
(folder / "text.pb").write_bytes(b"no graph at all")
(folder / "names.pb").write_bytes(frozen_graph("nhwc", tf.float32, ("policy", "value")))
report["frozen refused"] = [
    refused(lambda: frozen.read(folder / "cut.minigo.tf", 5)),
    refused(lambda: frozen.read(folder / "text.pb", 5)),
    refused(lambda: frozen.read(folder / "names.pb", 5)),
    refused(lambda: frozen.read(folder / "target.pb", 9)),
    refused(lambda: load_evaluator(folder / "target.npz", dataclasses.replace(config, features="mlperf07"))),
    refused(lambda: frozen.read(folder / "none.pb", 5)),
]


# -- what a run begins with ------------------------------------------------------------------------------------

# By tf.layers in the order of dual_net.py's model_inference_fn, with trunk_layers=2.
LAYERS = ("stem", "block0.1", "block0.2", "block1.1", "block1.2", "policy", "value")
DENSE = ("policy_dense", "value_hidden", "value_dense")


def numbered(kind: str, number: int) -> str:
    return f"{kind}_{number}" if number else kind


def write_checkpoint(prefix: str, arrays: Any, momenta: Any, step: int) -> None:
    """A file as tf.train.Saver of the submissions writes it."""
    tensors = {"global_step": np.int64(step)}
    for number, name in enumerate(LAYERS):
        parts = {"gamma": "gamma", "beta": "beta", "mean": "moving_mean", "variance": "moving_variance"}
        ours = {"weight": f"{numbered('conv2d', number)}/kernel"}
        ours.update({mine: f"{numbered('batch_normalization', number)}/{their}" for mine, their in parts.items()})
        for mine, their in ours.items():
            if f"{name}.{mine}" in arrays:
                tensors[their] = arrays[f"{name}.{mine}"]
            if f"{name}.{mine}" in momenta:
                tensors[f"{their}/Momentum"] = momenta[f"{name}.{mine}"]
    for number, name in enumerate(DENSE):
        for mine, their in (("weight", "kernel"), ("bias", "bias")):
            tensors[f"{numbered('dense', number)}/{their}"] = arrays[f"{name}.{mine}"]
            tensors[f"{numbered('dense', number)}/{their}/Momentum"] = momenta[f"{name}.{mine}"]
    names = sorted(tensors)
    values = [tf.constant(tensors[name]) for name in names]
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), tensors=values)


def started(changes: Any, **weights_of: str) -> Any:
    values = {**json.loads(Path(sys.argv[1]).read_text()), **changes, **weights_of}
    other = Config(**{key: tuple(each) if isinstance(each, list) else each for key, each in values.items()})
    return build(other, ranks, {}, folder)


report["start"] = {}
for features, step in (("mlperf07", 5672), ("agz", 9383)):
    shape = models.Shape(5, features, config.conv_width, 2, config.fc_width)
    sizes = models.weight_shapes(shape)
    arrays = {name: (generator.standard_normal(size) * 0.2).astype(np.float32) for name, size in sizes.items()}
    arrays.update({name: np.abs(array) + 1 for name, array in arrays.items() if name.endswith("variance")})
    momenta = {name: array * 3 for name, array in arrays.items() if not name.endswith(("mean", "variance"))}
    write_checkpoint(str(folder / f"model.ckpt-{step}"), arrays, momenta, step)
    begun = started({"features": features}, initial_weights=f"model.ckpt-{step}.index")
    seen_planes = generator.randint(0, 2, (40, 5, 5, models.PLANES[features])).astype(np.uint8)
    black = models.BLACK_TO_PLAY[features]
    seen_planes[..., black] = generator.randint(0, 2, (40, 1, 1))
    weights = {name: array.astype(np.float64) for name, array in arrays.items()}
    logits, values = equations(seen_planes.astype(np.float64), batch=False, channels_first=features == "mlperf07")
    found = begun.network(tf.constant(seen_planes), training=False)
    values *= np.where(seen_planes[:, 0, 0, black], 1, -1)
    moved = {name: float(np.abs(begun.momenta[name].numpy() - begun.network.variables[name].numpy() * 3).max())
             for name in momenta}  # fmt: skip
    assert 0.01 < np.abs(values).mean() < 0.99, "values that say something"
    report["start"][features] = {
        "steps": begun.steps,
        "rate": schedule.learning_rate(begun.config, begun.steps),
        "differences": [
            float(np.abs(found[0].numpy() - logits).max()),
            float(np.abs(found[1].numpy() - values).max()),
            max(moved.values()),
        ],
    }
    begun.save_model(folder / f"{features}.npz")
    again = started({"features": features}, initial_weights=f"{features}.npz")
    same = again.network(tf.constant(seen_planes), training=False)[1].numpy() - found[1].numpy()
    report["start"][features]["again"] = [again.steps, float(np.abs(same).max()), float(
        np.abs(again.momenta["stem.weight"].numpy() - begun.momenta["stem.weight"].numpy()).max())]  # fmt: skip
report["start refused"] = [
    refused(lambda: started({"features": "agz", "conv_width": 8}, initial_weights="model.ckpt-9383.index")),
    refused(lambda: started({"features": "agz"}, initial_weights="model.ckpt-1.index")),
    refused(lambda: started({"features": "agz"}, initial_weights="mlperf07.npz")),
]
report["folder"] = str(folder)
print(json.dumps(report))
