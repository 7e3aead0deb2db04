"""Common parts of plain TensorFlow networks: activation types, and batch norm with running statistics."""

from typing import Sequence

import tensorflow as tf

# Activation type for each ``precision``; weights, statistics and losses are always fp32.
DTYPES = {"fp32": tf.float32, "tf32": tf.float32, "bf16": tf.bfloat16, "fp16": tf.float16}


def batch_norm(
    x: tf.Tensor,
    scale: tf.Tensor,
    offset: tf.Tensor,
    statistics: Sequence[tf.Variable],
    *,
    momentum: float,
    epsilon: float,
    training: bool,
) -> tf.Tensor:
    """Batch norm of (batch, height, width, channels) with running mean and variance in ``statistics``.

    Training uses and accumulates the statistics of the batch; the variance is the unbiased one (divided by n - 1),
    as in cuDNN.
    """
    normalized, *batch_statistics = tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=scale,
        offset=offset,
        mean=tf.constant([]) if training else statistics[0],
        variance=tf.constant([]) if training else statistics[1],
        epsilon=epsilon,
        is_training=training,
    )
    if training:
        for running, new in zip(statistics, batch_statistics):
            running.assign_sub((1.0 - momentum) * (running - new))
    return normalized


def use_keras_policy(precision: str) -> None:
    """Let Keras's layers have activations of that type, and weights in fp32."""
    name = DTYPES[precision].name
    tf.keras.mixed_precision.set_global_policy(name if name == "float32" else f"mixed_{name}")
