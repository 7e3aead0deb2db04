"""MXNet with Horovod: startup, asynchronous sums over ranks, checkpoint files, shutdown."""

from typing import Any, Callable, Dict, List, Optional

import mxnet as mx
import nvidia.dali.plugin.mxnet  # noqa: F401
from mxnet.gluon.parameter import ParameterDict

from benchmarks.common.run.checkpoints import load_arrays, save_arrays
from benchmarks.common.run.ranks import CONNECTING, Lagged, Ranks, no_compiled_code, unlimited_memory
from benchmarks.common.run.timing import InputWait

# Horovod opens its library with global symbols. DALI contains a separate C++ runtime: if loaded after Horovod, it binds
# to some of Horovod's templates and corrupts the heap. Import DALI first, and import hvd from this module only.
import horovod.mxnet as hvd  # isort: skip

__all__ = [
    "LaggedSums",
    "arithmetic",
    "barrier",
    "broadcast",
    "connect",
    "finish",
    "hvd",
    "input_wait",
    "load",
    "memory",
    "save",
    "start",
    "summing",
    "synchronize",
    "total",
]

save, load = save_arrays, load_arrays
memory, load_compiled, save_compiled = unlimited_memory, no_compiled_code, no_compiled_code


def start(config: Any) -> Ranks:
    """Initialize Horovod; each rank uses the GPU with its local rank, or the CPU."""
    hvd.init()
    context = mx.cpu()
    if config.device == "gpu":
        # With srun --gpus-per-task, each rank sees a single GPU.
        context = mx.gpu(hvd.local_rank() if mx.context.num_gpus() > 1 else 0)
    return Ranks(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), context)


def connect(ranks: Ranks) -> None:
    """Open the connections between the ranks' devices by a small and a large sum."""
    for count in CONNECTING if ranks.context.device_type == "gpu" else CONNECTING[:1]:
        _sum(mx.nd.zeros((count,), ctx=ranks.context), f"connect.{count}").wait_to_read()


def arithmetic(ranks: Ranks) -> Dict[str, Any]:
    """Return {}: MXNet does not report whether fp32 is TF32. The variables that control it are recorded elsewhere."""
    return {}


def finish() -> None:
    """Wait for all work and leave Horovod; without it MXNet's exit hook raises."""
    mx.nd.waitall()
    hvd.shutdown()


def synchronize() -> None:
    mx.nd.waitall()


def input_wait(ranks: Ranks) -> InputWait:
    """Return the timer for data waits: on any device, the engine computes while a batch is fetched."""
    return InputWait(mx.nd.waitall)


def total(values: Any) -> List[float]:
    array = _sum(mx.nd.array(values), "total")
    return [float(value) for value in array.asnumpy().reshape(-1)]


def barrier() -> None:
    total([0.0])


def summing(ranks: Ranks, count: int) -> Callable[[], Any]:
    array = mx.nd.zeros(count, ctx=ranks.context)
    return lambda: _sum(array, "array").wait_to_read()


def broadcast(parameters: ParameterDict) -> None:
    """Send the parameters of rank 0 to all ranks, as a sum to which the others add zeros.

    Horovod's broadcast is avoided: up to 0.28.1 it reads a tensor's name after the sending thread may have freed it
    (EnqueueTensorBroadcast, horovod/common/operations.cc), which occasionally crashes a rank.
    """
    if hvd.size() == 1:
        return
    for name, parameter in sorted(parameters.items()):
        local = parameter.data()
        sent = local if hvd.rank() == 0 else mx.nd.zeros_like(local)
        parameter.set_data(_sum(sent, f"parameter.{name}"))


class LaggedSums:
    def __init__(self, ranks: Ranks, name: str) -> None:
        self._lagged = Lagged()
        self._name = name
        self._sent = 0
        self._first, self._second = (mx.nd.array(pair, ctx=ranks.context) for pair in ([1, 0], [0, 1]))
        self.drain = self._lagged.drain

    def send(self, loss: Optional[mx.nd.NDArray], stop: bool) -> Optional[List[float]]:
        # Not concat: Horovod cannot send its oneDNN layout from a CPU.
        pair = self._first * (0.0 if loss is None else loss)
        # A name may be in flight only once.
        name = f"{self._name}.{self._sent % (self._lagged.lag + 1)}"
        self._sent += 1
        sums = _sum(pair + self._second if stop else pair, name)
        return self._lagged.send(lambda: [float(value) for value in sums.asnumpy()])


def _sum(values: mx.nd.NDArray, name: str) -> mx.nd.NDArray:
    return values if hvd.size() == 1 else hvd.allreduce(values, average=False, name=name)
