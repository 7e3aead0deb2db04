"""TensorFlow's end of the input: batches of benchmarks/resnet/inputs.py as tensors."""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np
import tensorflow as tf

from benchmarks.common.ranks import Ranks
from benchmarks.resnet.tensorflow.config import Config

Batch = Tuple[tf.Tensor, tf.Tensor]


def convert(config: Config, ranks: Ranks, images: Any, labels: Any) -> Batch:
    """Copy DALI's batch; on a GPU through DLPack, where DALI may fill its memory again as soon as this returns.

    So there the copies must be done, and TensorFlow can only wait for all that is queued on the GPU.
    """
    if config.device == "cpu":
        return tf.constant(images.as_array()), tf.constant(labels.as_array().reshape(-1).astype(np.int32))
    copies = [
        tf.raw_ops.DeepCopy(x=tf.experimental.dlpack.from_dlpack(_capsule(output.as_tensor())))
        for output in (images, labels)
    ]
    tf.test.experimental.sync_devices()
    return copies[0], tf.cast(tf.reshape(copies[1], (-1,)), tf.int32)


def _capsule(tensor: Any) -> Any:
    """DLPack of a DALI tensor: newer releases have the standard method, older ones a private one."""
    return tensor.__dlpack__() if hasattr(tensor, "__dlpack__") else tensor._expose_dlpack_capsule()


def gpu(ranks: Ranks) -> int:
    """Each rank sees a single GPU, number 0 (benchmarks/common/frameworks/tensorflow.py)."""
    return 0
