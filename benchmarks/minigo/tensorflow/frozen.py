"""Frozen graphs of the submissions as networks that play: MLPerf's target models, and how a data set keeps one.

A graph comes as ``target.pb`` (v0.6, the graph alone) or as ``target.minigo.tf`` (v0.7, minigo_model.py: a header, a
line of JSON and the graph). A data set keeps it as ``target.npz``, an archive with the bytes of the graph and what
they describe. Its input is ``pos_tensor``, floats or booleans, its outputs are ``policy_output``, probabilities, and
``value_output`` from black's side (cc/dual_net/tf_dual_net.cc, v0.7). Networks here have logits and the value of the
side to move.
"""

from __future__ import annotations

import json
import struct
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from benchmarks.common.data.problem import Problem
from benchmarks.minigo.engine import FEATURES
from benchmarks.minigo.models import BLACK_TO_PLAY, HINT, check_board, read_bytes, unreadable
from benchmarks.minigo.tensorflow.config import Config

MAGIC = b"<minigo>"
HEADER = struct.Struct("<QQQ")  # Version, size of the file, size of the JSON; after MAGIC
GRAPH, ABOUT = "graph", "about"
INPUT = "pos_tensor"
OUTPUTS = ("policy_output", "value_output")


@dataclass(frozen=True)
class About:
    """What a graph takes."""

    board_size: int
    features: str
    layout: str  # ``nhwc`` or ``nchw``: where the planes are in its input


@dataclass(frozen=True)
class FrozenNetwork:
    """Called as model.Network is, but never trained."""

    config: Config
    shape: About
    forward: Callable[[tf.Tensor], Any]

    def __call__(self, planes: tf.Tensor, training: bool) -> Tuple[tf.Tensor, tf.Tensor]:
        # Logits (batch, moves) and values (batch,) of the side to move, of planes (batch, N, N, planes)
        policy, value = self.forward(planes)
        black = tf.cast(planes[:, 0, 0, BLACK_TO_PLAY[self.shape.features]], tf.float32)
        return tf.math.log(policy), tf.reshape(value, (-1,)) * (2.0 * black - 1.0)


def build(config: Config, about: About, graph: bytes) -> FrozenNetwork:
    """Return the network of a graph's bytes."""
    return FrozenNetwork(config, about, _imported(about, tf.compat.v1.GraphDef.FromString(graph)))


def unpacked(path: Path) -> Tuple[Dict[str, Any], bytes]:
    """Return what the header of a file says, which may be nothing, and the graph's bytes; Problem if it is cut off."""
    data = read_bytes(path)
    if not data.startswith(MAGIC):
        return {}, data
    begin = len(MAGIC) + HEADER.size
    if len(data) < begin:
        raise unreadable(path, "the file ends in its header")
    version, size, length = HEADER.unpack_from(data, len(MAGIC))
    if version != 1 or size != len(data):
        raise unreadable(path, f"version {version} with {len(data):,} of {size:,} bytes; version 1 is known")
    try:
        return json.loads(data[begin : begin + length].decode()), data[begin + length :]
    except ValueError as error:
        raise unreadable(path, str(error)) from None


def read(path: Path, board_size: int) -> Tuple[About, bytes]:
    """Return what a frozen graph takes, and its bytes.

    Raises:
        Problem: it is none, lacks an input or output of the reference's, or is for another board.
    """
    said, data = unpacked(path)
    try:
        graph = tf.compat.v1.GraphDef.FromString(data)
    except DecodeError:
        raise unreadable(path, "neither a NumPy archive nor a graph of TensorFlow") from None
    nodes = {node.name: node for node in graph.node}
    missing = [name for name in (INPUT, *OUTPUTS) if name not in nodes]
    if missing:
        raise unreadable(path, f"its graph of {len(nodes)} nodes has no {' and no '.join(missing)}")
    about = _about(path, nodes[INPUT], said)
    check_board(path, about.board_size, board_size)
    _check_outputs(path, about, graph)
    return about, data


def _about(path: Path, node: Any, said: Dict[str, Any]) -> About:
    shape: List[int] = [each.size for each in node.attr["shape"].shape.dim][1:] if "shape" in node.attr else []
    planes = {count: features for features, count in FEATURES.items()}
    layouts = {}
    if len(shape) == 3 and shape[0] == shape[1] and shape[2] in planes:
        layouts["nhwc"] = About(shape[0], planes[shape[2]], "nhwc")
    if len(shape) == 3 and shape[1] == shape[2] and shape[0] in planes:
        layouts["nchw"] = About(shape[1], planes[shape[0]], "nchw")
    if not layouts:
        found, wanted = f"{path}: {INPUT} has shape {shape}", "a board with 17 planes (v0.6) or 13 (v0.7)"
        raise Problem(found, wanted, HINT)
    # 13 planes on 13 x 13 are either; the header of v0.7 says which.
    return layouts.get(said.get("input_layout", ""), next(iter(layouts.values())))


def _check_outputs(path: Path, about: About, graph: Any) -> None:
    size, moves = about.board_size, about.board_size**2 + 1
    try:
        planes = tf.TensorSpec((None, size, size, FEATURES[about.features]), tf.uint8)
        outputs = tf.function(_imported(about, graph)).get_concrete_function(planes).outputs
    except (ValueError, tf.errors.OpError) as error:
        # Such as TRTEngineOp: a graph that was converted for TensorRT.
        raise unreadable(path, str(error).splitlines()[0]) from None
    if outputs[0].shape[-1] not in (None, moves):
        raise Problem(f"{path}: {OUTPUTS[0]} has {outputs[0].shape[-1]} moves", f"{moves}", HINT)


def _imported(about: About, graph: Any) -> Callable[[tf.Tensor], Any]:
    kind = tf.as_dtype(next(node for node in graph.node if node.name == INPUT).attr["dtype"].type)

    def forward(planes: tf.Tensor) -> Any:
        x = tf.cast(planes, kind)
        x = tf.transpose(x, (0, 3, 1, 2)) if about.layout == "nchw" else x
        wanted = [f"{name}:0" for name in OUTPUTS]
        return tf.graph_util.import_graph_def(graph, {f"{INPUT}:0": x}, wanted, name="")

    return forward


def save(path: Path, about: About, graph: bytes) -> None:
    """Write a graph as a data set keeps it."""
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
    """Read what ``save`` wrote; Problem if it is damaged or for another board."""
    try:
        with np.load(str(path)) as archive:
            about = About(**json.loads(archive[ABOUT].tobytes().decode()))
            graph = archive[GRAPH].tobytes()
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise unreadable(path, str(error)) from None
    check_board(path, about.board_size, board_size)
    return about, graph
