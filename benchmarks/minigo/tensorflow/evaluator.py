"""A network as the engine asks it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Tuple, Union

import numpy as np
import tensorflow as tf

from benchmarks.common.data.problem import Problem
from benchmarks.minigo import models
from benchmarks.minigo.tensorflow import frozen, model
from benchmarks.minigo.tensorflow.config import Config
from benchmarks.minigo.tensorflow.frozen import FrozenNetwork

Array = Any


class Evaluator:
    """A network as the engine asks it, in passes of one size: XLA compiles, and cuDNN chooses, for one only."""

    def __init__(self, network: Union[model.Network, FrozenNetwork], batch: int) -> None:
        size, planes = network.shape.board_size, models.PLANES[network.shape.features]
        self._filled = np.zeros((batch, size, size, planes), np.uint8)
        self._pass = tf.function(partial(_evaluate, network), jit_compile=network.config.compiles)

    def __call__(self, planes: Array) -> Tuple[Array, Array]:
        # Policies (batch, moves) and values (batch,) of planes (batch, N, N, planes), at most one pass
        count = len(planes)
        if count == 0:
            return np.zeros((0, self._filled.shape[1] ** 2 + 1), np.float32), np.zeros(0, np.float32)
        if count < len(self._filled):
            self._filled[:count] = planes
            planes = self._filled
        policy, value = self._pass(tf.constant(planes))
        return policy.numpy()[:count], value.numpy()[:count]


def _evaluate(network: Union[model.Network, FrozenNetwork], planes: tf.Tensor) -> Tuple[tf.Tensor, tf.Tensor]:
    logits, value = network(planes, training=False)
    return tf.nn.softmax(logits), value


def load_evaluator(path: Path, config: Config) -> Evaluator:
    """Return the evaluator of a model file, or of a frozen graph that a data set keeps.

    Raises:
        Problem: it is none, is for another board, or sees other planes than the games here fill.
    """
    network: Union[model.Network, FrozenNetwork]
    if frozen.holds_graph(path):
        network = frozen.build(config, *frozen.load(path, config.board_size))
    else:
        network = model.build(config, *models.load(path, config.board_size))
    check_planes(path, network.shape, config)
    return Evaluator(network, config.inference_batch)


def check_planes(path: Path, shape: Union[models.Shape, frozen.About], config: Config) -> None:
    """Raise Problem where the model of ``path`` sees other planes than those of ``config``."""
    if shape.features != config.features:
        found, hint = f"{path} sees the planes of {shape.features}", "name another model, or set features"
        raise Problem(found, f"those of {config.features}", hint)
