"""TensorFlow with Horovod: start-up, averages of gradients, small sums over all ranks, checkpoint files, an end."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Optional, Sequence

# Before the import: TensorFlow reports every library that it finds or misses otherwise.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# oneDNN on every CPU: by default TensorFlow uses it only with AVX-512, and on AVX2 its other convolution of 512
# channels was 4 times slower.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

# DALI first, see frameworks/mxnet.py; import hvd from this module only.
import nvidia.dali.types  # noqa: F401  # isort: skip
import horovod.tensorflow as hvd  # isort: skip
import tensorflow as tf

from benchmarks.common.run.checkpoints import load_arrays, save_arrays
from benchmarks.common.run.ranks import CONNECTING, Lagged, Ranks, no_compiled_code, unlimited_memory
from benchmarks.common.run.timing import InputWait

save, load = save_arrays, load_arrays
memory, load_compiled, save_compiled = unlimited_memory, no_compiled_code, no_compiled_code

# Serializes all sums outside a graph: TensorFlow's Horovod operators are blocking and share one kernel, under the
# name of the first, which Horovod rejects if it is in flight twice.
_sender = ThreadPoolExecutor(1, "sums")


_process_sets: List[Any] = []  # process sets of this rank, except the one of all ranks


def start(config: Any) -> Ranks:
    """Initialize Horovod; each rank sees only the GPU with its local rank, or part of the CPU cores."""
    hvd.init()
    if config.device == "gpu":
        _show_one_gpu(hvd.local_rank())
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)
    else:
        tf.config.set_visible_devices([], "GPU")
        threads = int(os.environ.get("OMP_NUM_THREADS", "0"))  # 0: all cores
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    tf.config.experimental.enable_tensor_float_32_execution(config.precision == "tf32")
    context = "/GPU:0" if config.device == "gpu" else "/CPU:0"
    return Ranks(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), context)


# Hide the other GPUs from CUDA: DLPack assumes that DALI and TensorFlow use the same device numbers.
def _show_one_gpu(local_rank: int) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else []
    if len(devices) == 1:
        return  # set by Slurm's --gpus-per-task
    if devices and local_rank >= len(devices):
        raise SystemExit(f"local rank {local_rank}, but CUDA_VISIBLE_DEVICES={visible}: start fewer ranks")
    os.environ["CUDA_VISIBLE_DEVICES"] = devices[local_rank] if devices else str(local_rank)


def process_set(ranks: Sequence[int]) -> Any:
    """Return the process set of some ranks, which ``connect`` opens; all ranks call this together."""
    group = hvd.add_process_set(list(ranks))
    if hvd.rank() in ranks:
        _process_sets.append(group)
    return group


def connect(ranks: Ranks) -> None:
    """Open the connections between the ranks' devices, with a small and a large sum in each process set."""
    with tf.device(ranks.context):
        for count in CONNECTING if "GPU" in ranks.context else CONNECTING[:1]:
            _summed(tf.zeros(count), f"connect.{count}").result()
            for number, group in enumerate(_process_sets):
                hvd.allreduce(tf.zeros(count), op=hvd.Sum, name=f"connect.{number}.{count}", process_set=group)


def arithmetic(ranks: Ranks) -> Dict[str, Any]:
    """Return whether fp32 is TF32 on a GPU that supports it; {} on a CPU."""
    if "GPU" not in ranks.context:
        return {}
    off = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"
    return {"tf32": tf.config.experimental.tensor_float_32_execution_enabled() and not off}


def finish() -> None:
    _sender.shutdown()
    hvd.shutdown()


def synchronize() -> None:
    tf.test.experimental.sync_devices()


def input_wait(ranks: Ranks) -> InputWait:
    """Return the timer for data waits: a CPU step is complete when it returns, a GPU step is queued."""
    return InputWait(_finish_queued if "GPU" in ranks.context else None)


# Wait for queued GPU work of TensorFlow; unlike ``synchronize``, not for DALI's.
def _finish_queued() -> None:
    tf.square(1.0).numpy()


def average(gradients: Sequence[tf.Tensor], groups: int) -> List[tf.Tensor]:
    """Average all gradients over the ranks, for use in a tf.function.

    ``groups`` above 0 sends them in that many groups; otherwise each gradient is sent when ready and Horovod fuses by
    size.
    """
    if hvd.size() == 1:
        return list(gradients)
    if groups == 0:
        return [hvd.allreduce(g, op=hvd.Average, name=f"gradient.{n}") for n, g in enumerate(gradients)]
    averaged: List[tf.Tensor] = []
    size = -(-len(gradients) // groups)
    for first in range(0, len(gradients), size):
        lot = list(gradients[first : first + size])
        averaged += hvd.grouped_allreduce(lot, op=hvd.Average, name=f"gradients.{first}")
    return averaged


def total(values: Any) -> List[float]:
    return [float(value) for value in _summed(tf.constant(values, tf.float32), "total").result()]


def barrier() -> None:
    total([0.0])


def summing(ranks: Ranks, count: int) -> Callable[[], Any]:
    with tf.device(ranks.context):
        array = tf.zeros([count])
    return lambda: _sum(array, "array")


def broadcast(variables: Sequence[tf.Variable]) -> None:
    """Send the values of rank 0 to all ranks, as one sum to which the others add zeros (see frameworks/mxnet.py)."""
    if hvd.size() == 1:
        return
    sent = [variable.read_value() if hvd.rank() == 0 else tf.zeros_like(variable) for variable in variables]
    for variable, value in zip(variables, hvd.grouped_allreduce(sent, op=hvd.Sum, name="variables")):
        variable.assign(value)


def average_variables(variables: Sequence[tf.Variable], name: str) -> None:
    if hvd.size() == 1:
        return
    means = hvd.grouped_allreduce([variable.read_value() for variable in variables], op=hvd.Average, name=name)
    for variable, mean in zip(variables, means):
        variable.assign(mean)


class LaggedSums:
    def __init__(self, ranks: Ranks, name: str) -> None:
        self._lagged = Lagged()
        self._name = name
        self.drain = self._lagged.drain

    def send(self, loss: Optional[tf.Tensor], stop: bool) -> Optional[List[float]]:
        values = tf.stack([0.0 if loss is None else loss, float(stop)])
        return self._lagged.send(_summed(values, self._name).result)


def _summed(values: tf.Tensor, name: str) -> "Future[List[float]]":
    return _sender.submit(lambda: _sum(values, name).numpy().tolist())


def _sum(values: tf.Tensor, name: str) -> tf.Tensor:
    return values if hvd.size() == 1 else hvd.allreduce(values, op=hvd.Sum, name=name)
