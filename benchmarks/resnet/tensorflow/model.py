"""ResNet v1.5 in TensorFlow without Keras, with the architecture in benchmarks/resnet/architecture.py.

Weights are fp32 variables. In fp16 and bf16, convolutions and activations have that type; batch-norm statistics,
logits and loss are fp32.
"""

from dataclasses import dataclass
from typing import Dict, List, Tuple

import numpy as np
import tensorflow as tf

from benchmarks.common.tensorflow.layers import DTYPES, batch_norm
from benchmarks.resnet import architecture
from benchmarks.resnet.tensorflow.config import Config


@dataclass(frozen=True)
class Network:
    """Variables with the names in benchmarks/resnet/architecture.py, and the forward pass.

    Convolutions have TensorFlow's axes (height, width, in, out), the dense layer (channels, classes).
    """

    config: Config
    variables: Dict[str, tf.Variable]

    @property
    def trained(self) -> Dict[str, tf.Variable]:
        return {name: self.variables[name] for name in architecture.trained_names(self.config)}

    @property
    def statistics(self) -> List[tf.Variable]:
        return [variable for name, variable in self.variables.items() if name.endswith(("mean", "variance"))]

    def __call__(self, images: tf.Tensor, training: bool) -> tf.Tensor:
        """Logits (batch, num_classes) in fp32 of images (batch, height, width, channels).

        ``training`` normalizes by the batch and moves the running statistics.
        """
        x = self._stem(images, training)
        for block in architecture.residual_blocks(self.config):
            x = self._block(block, x, training)
        return self._classifier(x)

    def _stem(self, images: tf.Tensor, training: bool) -> tf.Tensor:
        x = tf.cast(images, DTYPES[self.config.precision])
        x = tf.nn.relu(self._conv_norm(x, architecture.stem(self.config), "stem", "", training))
        # After ReLU a border of zeros changes no maximum.
        return tf.nn.max_pool2d(tf.pad(x, _both_sides(1)), 3, 2, "VALID")

    def _classifier(self, x: tf.Tensor) -> tf.Tensor:
        x = tf.reduce_mean(tf.cast(x, tf.float32), axis=(1, 2))
        x = tf.matmul(tf.cast(x, DTYPES[self.config.precision]), self._weight("dense.weight"))
        return tf.cast(x, tf.float32) + self.variables["dense.bias"]

    def _block(self, block: architecture.Block, x: tf.Tensor, training: bool) -> tf.Tensor:
        prefix, shortcut = f"{block.stage}.{block.name}", x
        if block.project:
            shortcut = self._conv_norm(x, block.project, f"{prefix}.project", "", training)
        for number, conv in enumerate(block.convs, 1):
            x = self._conv_norm(x, conv, prefix, str(number), training)
            if number < len(block.convs):
                x = tf.nn.relu(x)
        return tf.nn.relu(x + shortcut)

    def _weight(self, name: str) -> tf.Tensor:
        return tf.cast(self.variables[name], DTYPES[self.config.precision])

    def _conv_norm(self, x: tf.Tensor, conv: architecture.Conv, prefix: str, number: str, training: bool) -> tf.Tensor:
        padding, edge = "SAME", conv.kernel // 2
        if conv.stride > 1 and edge > 0:
            # With stride 2, "SAME" pads only one side, other frameworks pad both.
            x, padding = tf.pad(x, _both_sides(edge)), "VALID"
        weight = self._weight(f"{prefix}.conv{number}.weight")
        if x.shape[1] == x.shape[2] == 1:
            # Only the center of the kernel contributes to a 1 x 1 image, as in the last stage on toy images, where
            # oneDNN's gradient of the full kernel took two thirds of a step.
            weight = weight[edge : edge + 1, edge : edge + 1]
        x = tf.nn.conv2d(x, weight, conv.stride, padding)
        gamma, beta, *statistics = (self.variables[f"{prefix}.norm{number}.{part}"] for part in architecture.NORM)
        options = {"momentum": self.config.batch_norm_momentum, "epsilon": self.config.batch_norm_epsilon}
        return batch_norm(x, gamma, beta, statistics, **options, training=training)


# Padding of ``edge`` pixels on all four sides; oneDNN knows no convolution with explicit padding.
def _both_sides(edge: int) -> List[List[int]]:
    return [[0, 0], [edge, edge], [edge, edge], [0, 0]]


def build(config: Config) -> Network:
    """The network of ``config`` with weights initialized from config.seed, the same on every rank."""
    generator = np.random.RandomState(config.seed)
    arrays = {name: _initial(generator, name, shape) for name, shape in architecture.shapes(config).items()}
    if config.zero_init_residual:
        # Names of stem and shortcut are without a number after "norm".
        last = f"norm{len(next(architecture.residual_blocks(config)).convs)}.gamma"
        arrays.update({name: np.zeros_like(a) for name, a in arrays.items() if name.endswith(last)})
    variables = {
        name: tf.Variable(to_tensorflow(name, array), trainable=True, name=name.replace(".", "_"))
        for name, array in arrays.items()
    }
    return Network(config, variables)


# He et al. 2015 (arXiv 1502.01852) for convolutions, as MXNet's model has it; N(0, 0.01) for dense.
def _initial(generator: np.random.RandomState, name: str, shape: Tuple[int, ...]) -> np.ndarray:
    if name.endswith(("gamma", "variance")):
        return np.ones(shape, "float32")
    if not name.endswith("weight"):
        return np.zeros(shape, "float32")
    deviation = 0.01 if name.startswith("dense") else np.sqrt(2.0 / np.prod(shape[1:]))
    return (generator.standard_normal(shape) * deviation).astype("float32")


def to_tensorflow(name: str, array: np.ndarray) -> np.ndarray:
    """The array called ``name`` in benchmarks/resnet/architecture.py, with TensorFlow's axes."""
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    return array.T if name == "dense.weight" else array


def smoothed_loss(logits: tf.Tensor, labels: tf.Tensor, smoothing: float) -> tf.Tensor:
    """Cross-entropy with label smoothing, in fp32: logits (batch, classes), labels (batch,) to (batch,)."""
    logits = tf.cast(logits, tf.float32)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    if smoothing == 0.0:
        return loss
    uniform = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
    return (1.0 - smoothing) * loss + smoothing * uniform
