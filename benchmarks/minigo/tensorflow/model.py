"""Residual tower with policy and value head in TensorFlow, with the architecture in benchmarks/minigo/models.py.

As dual_net.py of the submissions (v0.6, v0.7; Silver et al. 2017, "Mastering the game of Go without human
knowledge"): batch-norm in the heads lacks scale and offset. Weights are fp32 variables; in fp16 and bf16, matrix
products and activations have that type, and batch-norm statistics, outputs of the heads and losses are fp32.
"""

from dataclasses import dataclass
from typing import Any, Dict, Mapping, Tuple

import tensorflow as tf

from benchmarks.common.tensorflow.layers import DTYPES, batch_norm
from benchmarks.minigo import models
from benchmarks.minigo.tensorflow.config import Config

NORM = {"momentum": 0.95, "epsilon": 1e-5}


@dataclass(frozen=True)
class Network:
    """Variables with the names in benchmarks/minigo/models.py, and the forward pass."""

    config: Config
    shape: models.Shape
    variables: Dict[str, tf.Variable]

    @property
    def trained(self) -> Dict[str, tf.Variable]:
        """Trained variables, in the order of the network."""
        return {name: variable for name, variable in self.variables.items() if not name.endswith(("mean", "variance"))}

    def __call__(self, planes: tf.Tensor, training: bool) -> Tuple[tf.Tensor, tf.Tensor]:
        """Return logits (batch, moves) and values (batch,) for the player to move, in fp32; planes: (batch, N, N,
        planes).

        ``training``: normalize with batch statistics and update running statistics.
        """
        x = tf.cast(planes, DTYPES[self.config.precision])
        x = tf.nn.relu(self._conv_norm(x, "stem", training))
        for block in range(self.shape.trunk_layers):
            inner = tf.nn.relu(self._conv_norm(x, f"block{block}.1", training))
            x = tf.nn.relu(x + self._conv_norm(inner, f"block{block}.2", training))
        logits = self._dense(tf.nn.relu(self._conv_norm(x, "policy", training)), "policy_dense")
        hidden = tf.nn.relu(self._dense(tf.nn.relu(self._conv_norm(x, "value", training)), "value_hidden"))
        value = tf.reshape(tf.tanh(self._dense(hidden, "value_dense")), (-1,))
        if self.shape.black_value:
            black = tf.cast(planes[:, 0, 0, models.BLACK_TO_PLAY[self.shape.features]], tf.float32)
            value *= 2.0 * black - 1.0
        return logits, value

    def values(self) -> models.Arrays:
        """Return weights and statistics by name."""
        return {name: variable.numpy() for name, variable in self.variables.items()}

    def assign(self, values: Mapping[str, Any]) -> None:
        """Assign the result of ``values``."""
        for name, variable in self.variables.items():
            variable.assign(values[name])

    def _conv_norm(self, x: tf.Tensor, name: str, training: bool) -> tf.Tensor:
        x = tf.nn.conv2d(x, tf.cast(self.variables[f"{name}.weight"], x.dtype), 1, "SAME")
        statistics = [self.variables[f"{name}.{part}"] for part in ("mean", "variance")]
        scale = self.variables.get(f"{name}.gamma", tf.ones_like(statistics[0]))
        offset = self.variables.get(f"{name}.beta", tf.zeros_like(statistics[0]))
        return batch_norm(x, scale, offset, statistics, **NORM, training=training)

    def _dense(self, x: tf.Tensor, name: str) -> tf.Tensor:
        kind = DTYPES[self.config.precision]
        weight = self.variables[f"{name}.weight"]
        x = tf.reshape(x, (-1, weight.shape[0]))
        product = tf.matmul(tf.cast(x, kind), tf.cast(weight, kind))
        return tf.cast(product, tf.float32) + self.variables[f"{name}.bias"]


def build(config: Config, shape: models.Shape, arrays: Mapping[str, Any]) -> Network:
    variables = {name: tf.Variable(array, name=name.replace(".", "_")) for name, array in arrays.items()}
    return Network(config, shape, variables)


def losses(
    network: Network, planes: tf.Tensor, policy: tf.Tensor, value: tf.Tensor
) -> Tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return mean losses: cross-entropy with the policy of the search, squared error of the value, and L2.

    L2 is half the sum of squares of all trained variables except biases and betas (model_fn in the submitted
    dual_net.py).
    """
    logits, expected = network(planes, training=True)
    policy_loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=policy, logits=logits))
    value_loss = tf.reduce_mean(tf.square(expected - value))
    regular = [tf.nn.l2_loss(v) for name, v in network.trained.items() if not name.endswith(("bias", "beta"))]
    return policy_loss, value_loss, tf.add_n(regular)
