"""MXNet's end of the input: batches of benchmarks/resnet/inputs.py as NDArrays."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Optional, Tuple

import mxnet as mx
from nvidia.dali.plugin.mxnet import feed_ndarray

from benchmarks.common.ranks import Ranks
from benchmarks.resnet import inputs
from benchmarks.resnet.mxnet.config import Config

Batch = Tuple[mx.nd.NDArray, mx.nd.NDArray]


def _to_ndarray(context: mx.Context, output: Any) -> mx.nd.NDArray:
    tensor = output.as_tensor()
    array = mx.nd.empty(tensor.shape(), context, tensor.dtype_name() if hasattr(tensor, "dtype_name") else None)
    feed_ndarray(tensor, array)
    return array


def _to_ndarrays(context: mx.Context, images: Any, labels: Any) -> Batch:
    return _to_ndarray(context, images), _to_ndarray(context, labels).reshape((-1,))


def training_input(
    config: Config, data: Path, ranks: Ranks, checkpoint: Optional[bytes] = None
) -> inputs.TrainingInput:
    """Training batches on this rank's device, from the beginning or exactly on from ``checkpoint``."""
    return inputs.TrainingInput(config, data, ranks, partial(_to_ndarrays, ranks.context), checkpoint)


def evaluation_input(config: Config, data: Path, ranks: Ranks) -> inputs.EvaluationInput:
    """This rank's share of the validation images."""
    return inputs.EvaluationInput(config, data, ranks, partial(_to_ndarrays, ranks.context))
