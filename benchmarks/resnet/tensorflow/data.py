"""TensorFlow's end of the input: batches of benchmarks/resnet/inputs.py as tensors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Optional, Tuple

import numpy as np
import tensorflow as tf

from benchmarks.common.ranks import Ranks
from benchmarks.resnet import inputs
from benchmarks.resnet.tensorflow.config import Config

Batch = Tuple[tf.Tensor, tf.Tensor]


def _from_cpu(images: Any, labels: Any) -> Batch:
    return tf.constant(images.as_array()), tf.constant(labels.as_array().reshape(-1).astype(np.int32))


def _from_gpu(images: Any, labels: Any) -> Batch:
    """Copies on the device, through DLPack; DALI may fill its memory again as soon as this returns."""
    copies = [
        tf.raw_ops.DeepCopy(x=tf.experimental.dlpack.from_dlpack(_capsule(output.as_tensor())))
        for output in (images, labels)
    ]
    tf.test.experimental.sync_devices()
    return copies[0], tf.cast(tf.reshape(copies[1], (-1,)), tf.int32)


def _capsule(tensor: Any) -> Any:
    """DLPack of a DALI tensor: newer releases have the standard method, older ones a private one."""
    return tensor.__dlpack__() if hasattr(tensor, "__dlpack__") else tensor._expose_dlpack_capsule()


def training_input(
    config: Config, data: Path, ranks: Ranks, checkpoint: Optional[bytes] = None
) -> inputs.TrainingInput:
    """Training batches on this rank's device, from the beginning or exactly on from ``checkpoint``."""
    return inputs.TrainingInput(config, data, _seen_by_dali(ranks), _convert(config), checkpoint)


def evaluation_input(config: Config, data: Path, ranks: Ranks) -> inputs.EvaluationInput:
    """This rank's share of the validation images."""
    return inputs.EvaluationInput(config, data, _seen_by_dali(ranks), _convert(config))


def _seen_by_dali(ranks: Ranks) -> Ranks:
    """Each rank sees a single GPU, number 0 (benchmarks/common/frameworks/tensorflow.py)."""
    return dataclasses.replace(ranks, local_rank=0)


def _convert(config: Config) -> inputs.Convert:
    return _from_gpu if config.device == "gpu" else _from_cpu
