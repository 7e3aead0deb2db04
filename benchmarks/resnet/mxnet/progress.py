"""MXNet's end of step reports and checkpoints; the rest is in benchmarks/common/progress.py."""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional

import mxnet as mx
from mxnet.gluon.parameter import ParameterDict

from benchmarks.common import horovod_mxnet
from benchmarks.common.horovod_mxnet import LaggedSums, hvd


class LossSums:
    """[loss, stop] summed over all ranks, for StepReports."""

    def __init__(self) -> None:
        self._sums = LaggedSums("step")
        self._first: Optional[mx.nd.NDArray] = None

    def send(self, loss: mx.nd.NDArray, stop: bool) -> Optional[List[float]]:
        """Send without waiting; no concat, whose oneDNN layout Horovod cannot send from a CPU."""
        if self._first is None:
            self._first = mx.nd.array([1.0, 0.0], ctx=loss.context)
            self._second = mx.nd.array([0.0, 1.0], ctx=loss.context)
        pair = self._first * loss
        return self._sums.send(pair + self._second if stop else pair)

    def drain(self) -> List[List[float]]:
        """Wait for the sums that were not handed out yet."""
        return self._sums.drain()


def restore_or_broadcast(
    checkpoint: Optional[Path], parameters: ParameterDict, trainer: hvd.DistributedTrainer
) -> None:
    """Load weights and momentum, or send rank 0's fresh weights to all ranks."""
    if checkpoint is None:
        horovod_mxnet.broadcast_parameters(parameters)
        return
    for name, value in mx.nd.load(str(checkpoint / "weights.params")).items():
        parameters[name].set_data(value)
    trainer.load_states(str(checkpoint / "trainer.states"))


def save(folder: Path, parameters: ParameterDict, trainer: hvd.DistributedTrainer) -> None:
    """Write weights and momentum into ``folder``."""
    mx.nd.save(str(folder / "weights.params"), {n: p.data() for n, p in parameters.items()})
    trainer.save_states(str(folder / "trainer.states"))
