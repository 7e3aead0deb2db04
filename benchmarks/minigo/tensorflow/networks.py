"""Network files: MLPerf's frozen graphs for playing, and MLPerf's checkpoints as initial weights for runs.

A graph is stored as ``target.pb`` (v0.6, only the graph) or ``target.minigo.tf`` (v0.7, minigo_model.py: header,
JSON line, graph). In a data set it is ``target.npz``, an archive with the graph's bytes and description. The input
is ``pos_tensor`` (float or bool), the outputs are ``policy_output`` (probabilities) and ``value_output`` for black
(cc/dual_net/tf_dual_net.cc, v0.7). Networks here return logits and the value for the player to move.

``model.ckpt-5672`` (v0.7, train.py) and ``model.ckpt-9383`` (v0.6, train.py) are TensorFlow 1 checkpoints, restored
completely by ``tf.train.Saver``: the learning rate continues at that step. Variables have the names of tf.layers in
the order of the network (model_inference_fn in dual_net.py), momenta have the suffix ``/Momentum``.
"""

import json
import struct
import zipfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple, Union

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from benchmarks.common.data.problem import Problem
from benchmarks.minigo import models
from benchmarks.minigo.engine import FEATURES
from benchmarks.minigo.models import BLACK_TO_PLAY, HINT, Shape, Start, check_board, read_bytes, unreadable
from benchmarks.minigo.tensorflow import model
from benchmarks.minigo.tensorflow.config import Config

PARTS = {
    "gamma": "gamma", "beta": "beta", "mean": "moving_mean", "variance": "moving_variance", "bias": "bias",
    "weight": "kernel",
}  # fmt: skip
# Features of the round with graphs that flatten the heads as channels, rows, columns (input_layout=nchw of v0.7)
CHANNELS_FIRST = ("mlperf07",)
MAGIC = b"<minigo>"
HEADER = struct.Struct("<QQQ")  # Version, size of the file, size of the JSON; after MAGIC
GRAPH, ABOUT = "graph", "about"
INPUT = "pos_tensor"
OUTPUTS = ("policy_output", "value_output")


@dataclass(frozen=True)
class About:
    """Graph input format."""

    board_size: int
    features: str
    layout: str  # ``nhwc`` or ``nchw``: axis of the planes


@dataclass(frozen=True)
class FrozenNetwork:
    config: Config
    shape: About
    forward: Callable[[tf.Tensor], Any]

    def __call__(self, planes: tf.Tensor, training: bool) -> Tuple[tf.Tensor, tf.Tensor]:
        """Return logits (batch, moves) and values (batch,) for the player to move; planes: (batch, N, N, planes)."""
        policy, value = self.forward(planes)
        black = tf.cast(planes[:, 0, 0, BLACK_TO_PLAY[self.shape.features]], tf.float32)
        return tf.math.log(policy), tf.reshape(value, (-1,)) * (2.0 * black - 1.0)


def unpack(path: Path) -> Tuple[Dict[str, Any], bytes]:
    """Return the file header (may be empty) and the graph's bytes; raises Problem if it is truncated."""
    data = read_bytes(path)
    if not data.startswith(MAGIC):
        return {}, data
    start = len(MAGIC) + HEADER.size
    if len(data) < start:
        raise unreadable(path, "the file ends in its header")
    version, size, length = HEADER.unpack_from(data, len(MAGIC))
    if version != 1 or size != len(data):
        raise unreadable(path, f"version {version} with {len(data):,} of {size:,} bytes; only version 1 is supported")
    try:
        return json.loads(data[start : start + length].decode()), data[start + length :]
    except ValueError as error:
        raise unreadable(path, str(error)) from None


def read(path: Path, board_size: int) -> Tuple[About, bytes]:
    """Return a frozen graph's input format and bytes.

    Raises:
        Problem: the file is not a graph, lacks an input or output of the reference, or is for another board.
    """
    header, data = unpack(path)
    try:
        graph = tf.compat.v1.GraphDef.FromString(data)
    except DecodeError:
        raise unreadable(path, "neither a NumPy archive nor a graph of TensorFlow") from None
    nodes = {node.name: node for node in graph.node}
    missing = [name for name in (INPUT, *OUTPUTS) if name not in nodes]
    if missing:
        raise unreadable(path, f"its graph of {len(nodes)} nodes has no {' and no '.join(missing)}")
    attributes, features = nodes[INPUT].attr, {count: name for name, count in FEATURES.items()}
    shape: List[int] = (
        [dimension.size for dimension in attributes["shape"].shape.dim][1:] if "shape" in attributes else []
    )
    layouts = {}
    if len(shape) == 3:
        for layout, planes, sides in (("nhwc", shape[2], shape[:2]), ("nchw", shape[0], shape[1:])):
            if sides[0] == sides[1] and planes in features:
                layouts[layout] = About(sides[0], features[planes], layout)
    if not layouts:
        problem, expected = f"{path}: {INPUT} has shape {shape}", "a board with 17 planes (v0.6) or 13 (v0.7)"
        raise Problem(problem, expected, HINT)
    # 13 planes on 13 x 13 are ambiguous; the header of v0.7 is not.
    about = layouts.get(header.get("input_layout", ""), next(iter(layouts.values())))
    size, moves = about.board_size, about.board_size**2 + 1
    check_board(path, size, board_size)
    try:
        spec = tf.TensorSpec((None, size, size, FEATURES[about.features]), tf.uint8)
        outputs = tf.function(_import_graph(about, graph)).get_concrete_function(spec).outputs
    except (ValueError, tf.errors.OpError) as error:
        # Such as TRTEngineOp: a graph that was converted for TensorRT.
        raise unreadable(path, str(error).splitlines()[0]) from None
    if outputs[0].shape[-1] not in (None, moves):
        raise Problem(f"{path}: {OUTPUTS[0]} has {outputs[0].shape[-1]} moves", f"{moves}", HINT)
    return about, data


def _import_graph(about: About, graph: Any) -> Callable[[tf.Tensor], Any]:
    kind = tf.as_dtype(next(node for node in graph.node if node.name == INPUT).attr["dtype"].type)

    def forward(planes: tf.Tensor) -> Any:
        x = tf.cast(planes, kind)
        x = tf.transpose(x, (0, 3, 1, 2)) if about.layout == "nchw" else x
        tensor_names = [f"{name}:0" for name in OUTPUTS]
        return tf.graph_util.import_graph_def(graph, {f"{INPUT}:0": x}, tensor_names, name="")

    return forward


def save(path: Path, about: About, graph: bytes) -> None:
    text = np.frombuffer(json.dumps(asdict(about)).encode(), np.uint8)
    arrays: Dict[str, Any] = {ABOUT: text, GRAPH: np.frombuffer(graph, np.uint8)}
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def holds_graph(path: Path) -> bool:
    """Return whether a data set's target is a frozen graph; a file that cannot be read is none."""
    try:
        with zipfile.ZipFile(str(path)) as archive:
            return f"{GRAPH}.npy" in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def load(path: Path, board_size: int) -> Tuple[About, bytes]:
    """Read a file of ``save``; raises Problem if it is damaged or for another board."""
    try:
        with np.load(str(path)) as archive:
            about = About(**json.loads(archive[ABOUT].tobytes().decode()))
            graph = archive[GRAPH].tobytes()
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise unreadable(path, str(error)) from None
    check_board(path, about.board_size, board_size)
    return about, graph


# -- a network as the engine asks it ---------------------------------------------------------------------


class Evaluator:
    """Network with a fixed batch size for the engine: XLA compiles, and cuDNN tunes, for a single size."""

    def __init__(self, network: Union[model.Network, FrozenNetwork], batch: int) -> None:
        size, planes = network.shape.board_size, models.PLANES[network.shape.features]
        if isinstance(network, model.Network) and network.config.inference_precision != "same":
            # The same variables with a different precision
            other = replace(network.config, precision=network.config.inference_precision)
            network = replace(network, config=other)
        self._filled = np.zeros((batch, size, size, planes), np.uint8)

        def evaluate(planes: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
            logits, value = network(planes, training=False)
            return tf.nn.softmax(logits), value

        self._pass = tf.function(evaluate, autograph=False, jit_compile=network.config.compiles)

    def __call__(self, planes: Any) -> Tuple[Any, Any]:
        """Return policies (batch, moves) and values (batch,) for planes (batch, N, N, planes), up to the fixed batch
        size.
        """
        count = len(planes)
        if count == 0:
            return np.zeros((0, self._filled.shape[1] ** 2 + 1), np.float32), np.zeros(0, np.float32)
        if count < len(self._filled):
            self._filled[:count] = planes
            planes = self._filled
        policy, value = self._pass(tf.constant(planes))
        return policy.numpy()[:count], value.numpy()[:count]


def load_evaluator(path: Path, config: Config) -> Evaluator:
    """Return the evaluator for a model file, or for a frozen graph in a data set.

    Raises:
        Problem: the file is invalid, for another board, or has other input planes than the configuration.
    """
    network: Union[model.Network, FrozenNetwork]
    if holds_graph(path):
        about, graph = load(path, config.board_size)
        network = FrozenNetwork(config, about, _import_graph(about, tf.compat.v1.GraphDef.FromString(graph)))
    else:
        network = model.build(config, *models.load(path, config.board_size))
    check_planes(path, network.shape, config)
    return Evaluator(network, config.inference_batch)


def check_planes(path: Path, shape: Union[models.Shape, About], config: Config) -> None:
    """Raise Problem if the input planes of the model in ``path`` differ from ``config``."""
    if shape.features != config.features:
        problem, hint = f"{path} sees the planes of {shape.features}", "name another model, or set features"
        raise Problem(problem, f"those of {config.features}", hint)


# -- what a run begins with ------------------------------------------------------------------------------


def read_start(config: Config, path: Path) -> Start:
    """Return the start for ``initial_weights``: a checkpoint given by its ``.index`` file, or a run's model file.

    Raises:
        Problem: the file cannot be read, or is for another network.
    """
    if path.suffix != ".index":
        return models.load_start(path, config.board_size)
    # The value head of the submissions is black's.
    shape = Shape.of(config, black_value=True)
    try:
        reader = tf.train.load_checkpoint(str(path.with_suffix("")))
        arrays = {name: _tensor(reader, shape, name, variable_name) for name, variable_name in names(shape)}
        trained = {
            name: variable_name for name, variable_name in names(shape) if not name.endswith(("mean", "variance"))
        }
        momenta = {
            name: _tensor(reader, shape, name, f"{variable_name}/Momentum") for name, variable_name in trained.items()
        }
        return Start(shape, arrays, momenta, int(reader.get_tensor("global_step")))
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        raise Problem(
            f"{path} cannot be read as a checkpoint of this network: {str(error).splitlines()[0]}",
            "a checkpoint of TensorFlow 1 (.index and .data-00000-of-00001) with the configuration's network",
            "pass model.ckpt-N.index of MLPerf's checkpoint, or a model of a run",
        ) from None


def names(shape: Shape) -> Iterator[Tuple[str, str]]:
    """Yield the arrays of the network with their checkpoint names: tf.layers numbers layers by kind."""
    counts: Dict[str, Dict[str, int]] = {"conv2d": {}, "batch_normalization": {}, "dense": {}}
    for name in models.weight_shapes(shape):
        layer, part = name.rsplit(".", 1)
        dense = layer.endswith(("_dense", "_hidden"))
        kind = "dense" if dense else "conv2d" if part == "weight" else "batch_normalization"
        number = counts[kind].setdefault(layer, len(counts[kind]))
        yield name, f"{kind}_{number}/{PARTS[part]}" if number else f"{kind}/{PARTS[part]}"


def _tensor(reader: Any, shape: Shape, name: str, variable_name: str) -> Any:
    tensor, shape_expected = reader.get_tensor(variable_name), models.weight_shapes(shape)[name]
    if tensor.shape != shape_expected:
        raise ValueError(f"{variable_name} has shape {tensor.shape}, not {shape_expected}")
    if shape.features in CHANNELS_FIRST and name in ("policy_dense.weight", "value_hidden.weight"):
        points = shape.board_size**2
        return np.ascontiguousarray(tensor.reshape(-1, points, shape_expected[1]).swapaxes(0, 1)).reshape(
            shape_expected
        )
    return tensor
