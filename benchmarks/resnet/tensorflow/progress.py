"""TensorFlow's end of step reports and checkpoints; the rest is in benchmarks/common/progress.py."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Optional

import numpy as np
import tensorflow as tf

from benchmarks.common import horovod_tensorflow
from benchmarks.common.horovod_tensorflow import LaggedSums


class LossSums:
    """[loss, stop] summed over all ranks, for StepReports."""

    def __init__(self) -> None:
        self._sums = LaggedSums("step")

    def send(self, loss: tf.Tensor, stop: bool) -> Optional[List[float]]:
        """Send without waiting for the loss."""
        return self._sums.send(tf.stack([loss, float(stop)]))

    def drain(self) -> List[List[float]]:
        """Wait for the sums that were not handed out yet."""
        return self._sums.drain()


def restore_or_broadcast(
    checkpoint: Optional[Path], variables: Dict[str, tf.Variable], momenta: Dict[str, tf.Variable]
) -> None:
    """Load weights and momentum, or send rank 0's fresh weights to all ranks."""
    if checkpoint is None:
        horovod_tensorflow.broadcast_variables(list(variables.values()))
        return
    for file, targets in (("weights.npz", variables), ("momenta.npz", momenta)):
        with np.load(str(checkpoint / file)) as arrays:
            for name, variable in targets.items():
                variable.assign(arrays[name])


def save(folder: Path, variables: Dict[str, tf.Variable], momenta: Dict[str, tf.Variable]) -> None:
    """Write weights and momentum into ``folder``."""
    for file, values in (("weights.npz", variables), ("momenta.npz", momenta)):
        np.savez(str(folder / file), **{name: variable.numpy() for name, variable in values.items()})
