"""A frozen graph of the submissions as a network that plays: what MLPerf's target models are.

Its input is ``pos_tensor``, floats or booleans, its outputs are ``policy_output``, probabilities, and ``value_output``
from black's side (cc/dual_net/tf_dual_net.cc, v0.7). Networks here have logits and the value of the side to move.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import tensorflow as tf
from google.protobuf.message import DecodeError

from benchmarks.common.data.problem import Problem
from benchmarks.minigo import frozen
from benchmarks.minigo.engine import FEATURES
from benchmarks.minigo.frozen import About
from benchmarks.minigo.models import BLACK_TO_PLAY
from benchmarks.minigo.tensorflow.config import Config

INPUT = "pos_tensor"
OUTPUTS = ("policy_output", "value_output")


@dataclass(frozen=True)
class FrozenNetwork:
    """Called as model.Network is, but never trained."""

    config: Config
    shape: About
    forward: Callable[[tf.Tensor], Any]

    def __call__(self, planes: tf.Tensor, training: bool) -> Tuple[tf.Tensor, tf.Tensor]:
        """Return logits (batch, moves) and values (batch,) of the side to move, of planes (batch, N, N, planes)."""
        policy, value = self.forward(planes)
        black = tf.cast(planes[:, 0, 0, BLACK_TO_PLAY[self.shape.features]], tf.float32)
        return tf.math.log(policy), tf.reshape(value, (-1,)) * (2.0 * black - 1.0)


def build(config: Config, about: About, graph: bytes) -> FrozenNetwork:
    """Return the network of a graph's bytes."""
    return FrozenNetwork(config, about, _imported(about, tf.compat.v1.GraphDef.FromString(graph)))


def read(path: Path, board_size: int) -> Tuple[About, bytes]:
    """Return what a file's graph takes, and its bytes; see benchmarks/minigo/frozen.py."""
    said, data = frozen.unpacked(path)
    try:
        graph = tf.compat.v1.GraphDef.FromString(data)
    except DecodeError:
        raise frozen.unreadable(path, "neither a NumPy archive nor a graph of TensorFlow") from None
    nodes = {node.name: node for node in graph.node}
    missing = [name for name in (INPUT, *OUTPUTS) if name not in nodes]
    if missing:
        raise frozen.unreadable(path, f"its graph of {len(nodes)} nodes has no {' and no '.join(missing)}")
    about = _about(path, nodes[INPUT], said)
    frozen.check_board(path, about.board_size, board_size)
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
        raise Problem(found, wanted, frozen.REMEDY)
    # 13 planes on 13 x 13 are either; the header of v0.7 says which.
    return layouts.get(said.get("input_layout", ""), next(iter(layouts.values())))


def _check_outputs(path: Path, about: About, graph: Any) -> None:
    size, moves = about.board_size, about.board_size**2 + 1
    try:
        planes = tf.TensorSpec((None, size, size, FEATURES[about.features]), tf.uint8)
        outputs = tf.function(_imported(about, graph)).get_concrete_function(planes).outputs
    except (ValueError, tf.errors.OpError) as error:
        # Such as TRTEngineOp: a graph that was converted for TensorRT.
        raise frozen.unreadable(path, str(error).splitlines()[0]) from None
    if outputs[0].shape[-1] not in (None, moves):
        raise Problem(f"{path}: {OUTPUTS[0]} has {outputs[0].shape[-1]} moves", f"{moves}", frozen.REMEDY)


def _imported(about: About, graph: Any) -> Callable[[tf.Tensor], Any]:
    kind = tf.as_dtype(next(node for node in graph.node if node.name == INPUT).attr["dtype"].type)

    def forward(planes: tf.Tensor) -> Any:
        x = tf.cast(planes, kind)
        x = tf.transpose(x, (0, 3, 1, 2)) if about.layout == "nchw" else x
        wanted = [f"{name}:0" for name in OUTPUTS]
        return tf.graph_util.import_graph_def(graph, {f"{INPUT}:0": x}, wanted, name="")

    return forward
