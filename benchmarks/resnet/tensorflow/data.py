"""TensorFlow's end of the input: batches of benchmarks/resnet/inputs.py as tensors."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Tuple

import numpy as np
import tensorflow as tf

from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet.architecture import input_shape
from benchmarks.resnet.tensorflow.config import Config

Batch = Tuple[tf.Tensor, tf.Tensor]
_reader = ThreadPoolExecutor(1, "copies")


def convert(config: Config, ranks: Ranks, images: Any, labels: Any) -> Batch:
    """Copy DALI's batch; on a GPU through DLPack, where copies are asynchronous, see ``copied``."""
    if config.device == "cpu":
        return tf.constant(images.as_array()), tf.constant(labels.as_array().reshape(-1).astype(np.int32))
    copies = [
        tf.raw_ops.DeepCopy(x=tf.experimental.dlpack.from_dlpack(_capsule(output.as_tensor())))
        for output in (images, labels)
    ]
    return copies[0], tf.cast(tf.reshape(copies[1], (-1,)), tf.int32)


def copied(config: Config, batch: Batch) -> Callable[[], Any]:
    """Return a function that waits for a batch's copies, to be called before DALI reuses the memory.

    TensorFlow exposes no events, but reading a tensor waits only for operations queued before the read. The read is
    started here in a thread before the batch's step is queued, so that the step runs while the next call waits.
    Synchronizing the device instead would leave it idle.
    """
    if config.device == "cpu":
        return lambda: None
    has_started = threading.Event()

    def read() -> None:
        has_started.set()
        batch[1].numpy()

    waiting = _reader.submit(read)
    has_started.wait()
    return waiting.result


# DLPack for DALI tensors: a standard method in new releases, a private one in older releases
def _capsule(tensor: Any) -> Any:
    return tensor.__dlpack__() if hasattr(tensor, "__dlpack__") else tensor._expose_dlpack_capsule()


def gpu(ranks: Ranks) -> int:
    """Every rank sees a single GPU, number 0 (benchmarks/common/frameworks/tensorflow.py)."""
    return 0


def synthetic_batch(config: Config, batch_size: int = 0) -> Batch:
    """Return noise with the types of real batches on the device, by default with the training batch size."""
    generator, count = np.random.RandomState(config.seed % 2**32), batch_size or config.batch_size
    images = generator.random_sample((count, *input_shape(config)[1:]))
    labels = generator.randint(0, config.num_classes, count)
    return tf.constant(images, tf.float16 if config.precision == "fp16" else tf.float32), tf.constant(labels, tf.int32)
