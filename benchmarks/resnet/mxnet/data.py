"""MXNet's end of the input: batches of benchmarks/resnet/inputs.py as NDArrays."""

from __future__ import annotations

from typing import Any, Tuple

import mxnet as mx
from nvidia.dali.plugin.mxnet import feed_ndarray

from benchmarks.common.ranks import Ranks
from benchmarks.resnet.mxnet.config import Config

Batch = Tuple[mx.nd.NDArray, mx.nd.NDArray]


def convert(config: Config, ranks: Ranks, images: Any, labels: Any) -> Batch:
    """Copy DALI's batch into MXNet's memory."""
    return _to_ndarray(ranks.context, images), _to_ndarray(ranks.context, labels).reshape((-1,))


def _to_ndarray(context: mx.Context, output: Any) -> mx.nd.NDArray:
    tensor = output.as_tensor()
    array = mx.nd.empty(tensor.shape(), context, tensor.dtype_name() if hasattr(tensor, "dtype_name") else None)
    feed_ndarray(tensor, array)
    return array


def gpu(ranks: Ranks) -> int:
    """Each rank sees all GPUs of its node (benchmarks/common/frameworks/mxnet.py)."""
    return ranks.local_rank
