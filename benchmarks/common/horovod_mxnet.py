"""Horovod for MXNet: start-up, small sums over all ranks that nobody waits for, and an orderly end."""

from __future__ import annotations

from collections import deque
from typing import Deque, List, Optional

import mxnet as mx
import nvidia.dali.plugin.mxnet  # noqa: F401
from mxnet.gluon.parameter import ParameterDict

from benchmarks.common.ranks import Ranks

# Horovod opens its library with global symbols. DALI carries a C++ runtime of its own: opened after
# Horovod, it takes some of Horovod's templates for its own and corrupts the heap. So import DALI first,
# and take hvd from here everywhere.
import horovod.mxnet as hvd  # isort: skip


def start(device: str) -> Ranks:
    """Initialize Horovod; each rank takes the GPU of its local rank, or the CPU."""
    hvd.init()
    context = mx.gpu(hvd.local_rank()) if device == "gpu" else mx.cpu()
    return Ranks(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), context)


def finish() -> None:
    """Wait for all work and leave Horovod; without it MXNet's exit hook raises."""
    mx.nd.waitall()
    hvd.shutdown()


def total(values: mx.nd.NDArray, name: str) -> List[float]:
    """Sum of ``values`` over all ranks; waits for it."""
    if hvd.size() > 1:
        values = hvd.allreduce(values, average=False, name=name)
    return [float(value) for value in values.asnumpy().reshape(-1)]


def broadcast_parameters(parameters: ParameterDict) -> None:
    """Give all ranks the parameters of rank 0, by a sum to which the others add zeros.

    Not by Horovod's broadcast: up to 0.28.1 it reads a tensor's name after the thread that sends the tensor
    may have freed it (EnqueueTensorBroadcast, horovod/common/operations.cc), which kills a rank now and then.
    """
    if hvd.size() == 1:
        return
    for name, parameter in sorted(parameters.items()):
        mine = parameter.data()
        sent = mine if hvd.rank() == 0 else mx.nd.zeros_like(mine)
        parameter.set_data(hvd.allreduce(sent, average=False, name=f"parameter.{name}"))


def barrier(name: str) -> None:
    """Wait until all ranks have come here."""
    total(mx.nd.zeros((1,)), name)


class LaggedSums:
    """Sums of a few numbers over all ranks, read ``lag`` steps after they were sent.

    Reading at once would stop the device at every step. The late reading also keeps Python from running
    ahead of the device by more than ``lag`` steps, and all ranks read the same sum at the same step, so
    that they can agree to stop.
    """

    def __init__(self, name: str, lag: int = 2) -> None:
        self._name = name
        self._lag = lag
        self._sent = 0
        self._waiting: Deque[mx.nd.NDArray] = deque()

    def send(self, values: mx.nd.NDArray) -> Optional[List[float]]:
        """Send this step's ``values``; return the sums of ``lag`` steps ago, or None in the first steps."""
        if hvd.size() > 1:
            # A name may be under way only once.
            name = f"{self._name}.{self._sent % (self._lag + 1)}"
            values = hvd.allreduce(values, average=False, name=name)
        self._sent += 1
        self._waiting.append(values)
        return self._pop() if len(self._waiting) > self._lag else None

    def drain(self) -> List[List[float]]:
        """Wait for all sums that were not handed out yet."""
        return [self._pop() for _ in range(len(self._waiting))]

    def _pop(self) -> List[float]:
        return [float(value) for value in self._waiting.popleft().asnumpy().reshape(-1)]
