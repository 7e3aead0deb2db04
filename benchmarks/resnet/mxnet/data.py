"""MXNet's end of the input: batches of benchmarks/resnet/inputs.py as NDArrays."""

import ctypes
from typing import Any, Tuple

import mxnet as mx
from nvidia.dali import types

from benchmarks.common.run.ranks import Ranks
from benchmarks.resnet.mxnet.config import Config

Batch = Tuple[mx.nd.NDArray, mx.nd.NDArray]
TYPES = {types.FLOAT16: "float16", types.FLOAT: "float32"}


def convert(config: Config, ranks: Ranks, images: Any, labels: Any) -> Batch:
    """Copy DALI's batch into MXNet's memory."""
    return _to_ndarray(ranks.context, images), _to_ndarray(ranks.context, labels).reshape((-1,))


def _to_ndarray(context: mx.Context, output: Any) -> mx.nd.NDArray:
    tensor = output.as_tensor()
    array, address = mx.nd.empty(tensor.shape(), context, TYPES[tensor.dtype]), ctypes.c_void_p()
    # MXNet's engine does not track the copy, so it must be complete before the array is returned, and feed_ndarray of
    # DALI does not wait for it on a GPU. Steps queued on the GPU continue in the meantime.
    mx.base.check_call(mx.base._LIB.MXNDArrayWaitToWrite(array.handle))
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    tensor.copy_to_external(address)
    return array


def gpu(ranks: Ranks) -> int:
    """DALI and MXNet count the GPUs that this process sees in the same order."""
    return ranks.context.device_id
