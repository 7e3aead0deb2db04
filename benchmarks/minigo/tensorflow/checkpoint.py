"""A checkpoint of the submissions as what a run begins with: weights, momenta, and the step at which both were.

``model.ckpt-5672`` (v0.7, train.py) and ``model.ckpt-9383`` (v0.6, train.py) are of TensorFlow 1, restored whole by
``tf.train.Saver``: the learning rate continues at that step. The variables have the names that tf.layers gives in the
order of the network (model_inference_fn in dual_net.py); momenta are theirs with ``/Momentum``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator, Tuple

import numpy as np
import tensorflow as tf

from benchmarks.common.data.problem import Problem
from benchmarks.minigo import models
from benchmarks.minigo.models import Shape, Start
from benchmarks.minigo.tensorflow.config import Config

PARTS = {
    "gamma": "gamma", "beta": "beta", "mean": "moving_mean", "variance": "moving_variance", "bias": "bias",
    "weight": "kernel",
}  # fmt: skip
# Features of the round whose graph flattens the heads as channels, rows, columns (input_layout=nchw of v0.7)
CHANNELS_FIRST = ("mlperf07",)


def read_start(config: Config, path: Path) -> Start:
    """Return what ``initial_weights`` holds: a checkpoint by its ``.index`` file, or a model file of a run.

    Raises:
        Problem: it cannot be read, or is of another network.
    """
    if path.suffix != ".index":
        return models.load_start(path, config.board_size)
    # The value head of the submissions is black's.
    shape = Shape.of(config, black_value=True)
    try:
        reader = tf.train.load_checkpoint(str(path.with_suffix("")))
        arrays = {name: _read(reader, shape, name, theirs) for name, theirs in names(shape)}
        trained = {name: theirs for name, theirs in names(shape) if not name.endswith(("mean", "variance"))}
        momenta = {name: _read(reader, shape, name, f"{theirs}/Momentum") for name, theirs in trained.items()}
        return Start(shape, arrays, momenta, int(reader.get_tensor("global_step")))
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        found = f"{path} cannot be read as a checkpoint of this network: {str(error).splitlines()[0]}"
        wanted = "a checkpoint of TensorFlow 1 (.index and .data-00000-of-00001) with the configuration's network"
        raise Problem(found, wanted, "name model.ckpt-N.index of MLPerf's checkpoint, or a model of a run") from None


def names(shape: Shape) -> Iterator[Tuple[str, str]]:
    """Yield each array of the network with its name in a checkpoint: tf.layers counts the layers of each kind."""
    seen: Dict[str, Dict[str, int]] = {"conv2d": {}, "batch_normalization": {}, "dense": {}}
    for name in models.weight_shapes(shape):
        layer, part = name.rsplit(".", 1)
        dense = layer.endswith(("_dense", "_hidden"))
        kind = "dense" if dense else "conv2d" if part == "weight" else "batch_normalization"
        number = seen[kind].setdefault(layer, len(seen[kind]))
        yield name, f"{kind}_{number}/{PARTS[part]}" if number else f"{kind}/{PARTS[part]}"


def _read(reader: Any, shape: Shape, name: str, theirs: str) -> Any:
    found, wanted = reader.get_tensor(theirs), models.weight_shapes(shape)[name]
    if found.shape != wanted:
        raise ValueError(f"{theirs} has shape {found.shape}, not {wanted}")
    if shape.features in CHANNELS_FIRST and name in ("policy_dense.weight", "value_hidden.weight"):
        points = shape.board_size**2
        return np.ascontiguousarray(found.reshape(-1, points, wanted[1]).swapaxes(0, 1)).reshape(wanted)
    return found
