"""What networks in plain TensorFlow have in common: types of activations, and batch-norm with running statistics."""

from typing import Sequence

import tensorflow as tf

# Type of activations for each ``precision`` of a configuration; weights, statistics and losses stay in fp32.
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
    """Normalize (batch, height, width, channels) by the running mean and variance in ``statistics``.

    In training by those of the batch, which move the running ones; the variance is that of a sample (divided by n - 1),
    as cuDNN's.
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
