"""The largest batch that fits: doubled until the device, or on a CPU the limit of the study, says no."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Dict

import mxnet as mx

from benchmarks.study.mxnet import memory
from benchmarks.study.mxnet.training import Batch, Training, synthetic

_MOST = 1 << 16
_FULL = ("out of memory", "memalloc failed", "alloc failed")
"""What MXNet's allocators write into the error."""


def largest_batch(training: Training, step: Callable[[Training, Batch], None]) -> Dict[str, Any]:
    """Return the largest batch of a device that trains a step, and the one that does not (None: none was tried)."""
    config, fits = training.config, 0
    batch = config.batch_size
    while batch <= _MOST:
        if not _fits(training, batch, step):
            return {"fits": fits, "does_not": batch}
        fits, batch = batch, 2 * batch
    return {"fits": fits, "does_not": None}


def _fits(training: Training, batch: int, step: Callable[[Training, Batch], None]) -> bool:
    config = training.config
    resized = replace(config, batch_size=batch)
    try:
        for _ in range(2):
            step(training._replace(config=resized), synthetic(resized, training.place))
        mx.nd.waitall()
    except mx.base.MXNetError as error:
        if any(each in str(error).lower() for each in _FULL):
            return False
        raise
    return config.device == "gpu" or memory.resident_mib() <= config.memory_limit_mib
