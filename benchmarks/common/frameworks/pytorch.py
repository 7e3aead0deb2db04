"""PyTorch with torch.distributed: startup by any launcher, asynchronous sums, precision, checkpoint files.

NCCL between GPUs, Gloo between CPUs. Ranks come from torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), or under srun from Slurm's, with MASTER_ADDR and MASTER_PORT set by the
job. Without either there is a single process.
"""

import copy
import datetime
import inspect
import itertools
import math
import os
import random
import sys
import tempfile
import weakref
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from typing import (
    Any,
    Callable,
    ContextManager,
    Deque,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    MutableMapping,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

import torch
import torch.distributed as dist

from benchmarks.common.data.files import in_one_step
from benchmarks.common.run import caches
from benchmarks.common.run.ranks import CONNECTING, Lagged, Ranks
from benchmarks.common.run.timing import InputWait

T = TypeVar("T")
# Per collective: longer than the launcher's hang detection, which reports the rank, waits for starting ranks (30
# minutes: WARM_UP_FACTOR of encore/run/supervise.py).
TIMEOUT = datetime.timedelta(minutes=40)
# Activation type for each ``precision``; weights and optimizer state are always fp32.
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_groups: List[Any] = [None]  # groups of this rank; None is the default group
_eager: List[Any] = []  # group for collectives outside of CUDA graphs, if graphs are used
_graphs: "weakref.WeakSet[Any]" = weakref.WeakSet()


def read_place(environment: Mapping[str, str]) -> Tuple[int, int, int, int]:
    """Return (rank, world size, local rank, local world size) from the environment of torchrun or srun."""
    if "RANK" in environment:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK", rank))
        return rank, size, local_rank, int(environment.get("LOCAL_WORLD_SIZE", size))
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "MASTER_ADDR" in environment:
        size, rank = int(environment["SLURM_NTASKS"]), int(environment["SLURM_PROCID"])
        counts = _tasks_per_node(environment.get("SLURM_TASKS_PER_NODE", str(size)))
        # Without SLURM_NODEID, ranks fill the nodes in order (srun's default, --distribution=block).
        ends = itertools.accumulate(counts)
        node = int(environment.get("SLURM_NODEID") or next(i for i, end in enumerate(ends) if rank < end))
        return rank, size, int(environment["SLURM_LOCALID"]), counts[node]
    return 0, 1, 0, 1


def _tasks_per_node(text: str) -> List[int]:
    # "2(x3),1" is two tasks on each of three nodes and one on the fourth (srun(1), SLURM_TASKS_PER_NODE)
    counts: List[int] = []
    for part in text.split(","):
        tasks, _, repeat = part.partition("(x")
        counts += [int(tasks)] * int(repeat.rstrip(")") or 1)
    return counts


def start(config: Any) -> Ranks:
    """Join the other ranks; each uses the GPU with its local rank, or the CPU. The context is a torch.device."""
    rank, size, local_rank, local_size = read_place(os.environ)
    # TF32 for fp32 GEMMs and convolutions, before the first one.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.precision != "fp32"
    torch.backends.cudnn.benchmark = True
    context = torch.device("cpu")
    if config.device == "gpu":
        # With srun --gpus-per-task, each rank sees a single GPU.
        context = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(context)
        if getattr(config, "cuda_graph", False):
            # NCCL's watchdog would query the device during a capture, which invalidates it (PyTorch, CUDA graphs with
            # DistributedDataParallel). Hangs in collectives are detected by the launcher instead.
            os.environ.setdefault(error_handling(torch.__version__), "0")
    set_caches(os.environ)
    if size > 1:
        # NCCL requires one GPU per rank. With Gloo, ranks can share a GPU for checks on small machines.
        backend = os.environ.get("ENCORE_BACKEND") or ("nccl" if config.device == "gpu" else "gloo")
        options = group_options(context) if backend == "nccl" else {}
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=TIMEOUT, **options)
        if getattr(config, "cuda_graph", False):
            # A graph's collectives are not ordered with others, and NCCL requires the same order on all ranks in a
            # communicator (NCCL user guide, "Using NCCL with CUDA Graphs").
            _eager.append(new_group(range(size)))
    return Ranks(rank, size, local_rank, local_size, context)


def error_handling(version: str) -> str:
    """Return the variable that disables NCCL's watchdog; it was renamed in PyTorch 2.2 (pytorch#114077)."""
    is_old = tuple(int(part) for part in version.split(".")[:2]) < (2, 2)
    return "NCCL_ASYNC_ERROR_HANDLING" if is_old else "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def set_caches(environment: MutableMapping[str, str]) -> None:
    """Share compiler caches between a node's ranks, in a local folder.

    By default, Triton uses a folder in HOME, which nodes may share, and TorchInductor one Triton folder per GPU.
    """
    folder = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    folder = Path(environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder)))
    for path in (folder, Path(environment.setdefault("TRITON_CACHE_DIR", str(folder / "triton")))):
        caches.private_folder(path)


def load_compiled(path: Path, ranks: Ranks) -> None:
    """Load an earlier run's compiler cache into this node's caches, if available; since PyTorch 2.6.

    Inductor reuses entries with the same code, sizes, device and release, and compiles the rest. One rank per node
    loads it before any rank compiles (capabilities.compile_in_turns).
    """
    load = getattr(getattr(torch, "compiler", None), "load_cache_artifacts", None)
    if load is not None and ranks.local_rank == 0 and path.is_file():
        with _only_saves_time("the compiler cache of an earlier run cannot be loaded"):
            load(path.read_bytes())


def save_compiled(path: Path, ranks: Ranks) -> None:
    """Save what torch.compile compiled or loaded from a cache in this process, if it was used."""
    save = getattr(getattr(torch, "compiler", None), "save_cache_artifacts", None)
    # Otherwise the call would import the compiler.
    if save is None or ranks.rank != 0 or "torch._inductor.compile_fx" not in sys.modules:
        return
    with _only_saves_time("the compiler cache cannot be saved"):
        artifacts = save()
        if artifacts is not None:
            with in_one_step(path) as file:
                file.write(artifacts[0])


@contextmanager
def _only_saves_time(problem: str) -> Iterator[None]:
    # A full disk, a damaged file and a different PyTorch release raise different errors; none may stop the run.
    try:
        yield
    except Exception as error:
        print(f"warning: {problem}: {error!r}", file=sys.stderr, flush=True)


def new_group(ranks: Sequence[int]) -> Any:
    """Return the group of some ranks, which ``connect`` opens; all ranks call this together."""
    group = dist.new_group(list(ranks), timeout=TIMEOUT)
    if dist.get_rank() in ranks:
        _groups.append(group)
    return group


def eager() -> Any:
    """Return the group for collectives outside of CUDA graphs: counts, votes, evaluations."""
    return _eager[0] if _eager else None


def register(captured: Any) -> None:
    _graphs.add(captured)


def connect(ranks: Ranks) -> None:
    """Open all groups' connections with small and large collectives of all kinds; a collective call."""
    if ranks.size == 1:
        return
    by_nccl = dist.get_backend() == "nccl"
    # Gloo connects processes, and supports few collectives on GPU tensors.
    device = ranks.context if by_nccl else torch.device("cpu")
    for group in _groups:
        size = dist.get_world_size(group)
        for elements in CONNECTING if by_nccl else CONNECTING[:1]:
            count = -(-elements // size)
            values = torch.zeros(count * size, device=device)
            dist.all_reduce(values, group=group)
            dist.all_gather(list(torch.empty_like(values).chunk(size)), values[:count].clone(), group=group)
            dist.all_to_all_single(torch.empty_like(values), values, group=group)
            if by_nccl and hasattr(dist, "reduce_scatter_tensor"):  # since PyTorch 1.13
                dist.reduce_scatter_tensor(values[:count].clone(), values, group=group)
                dist.all_gather_into_tensor(torch.empty_like(values), values[:count].clone(), group=group)
    broadcast([torch.zeros(1, device=device)])


def group_options(context: torch.device) -> Dict[str, torch.device]:
    """Bind NCCL to the rank's GPU, so that it connects immediately and does not guess the GPU; since PyTorch 2.3."""
    parameters = inspect.signature(dist.init_process_group).parameters
    return {"device_id": context} if context.type == "cuda" and "device_id" in parameters else {}


def memory(context: torch.device) -> float:
    """Return the memory of this rank's GPU in bytes; infinity for a CPU, whose memory is shared by the ranks."""
    return float(torch.cuda.get_device_properties(context).total_memory) if context.type == "cuda" else math.inf


def arithmetic(ranks: Ranks) -> Dict[str, Any]:
    """Return whether fp32 is TF32 on this GPU, for cuBLAS GEMMs and cuDNN; {} on a CPU.

    TF32 requires compute capability 8.0; NVIDIA_TF32_OVERRIDE=0 disables it in NVIDIA's libraries.
    """
    if ranks.context.type != "cuda":
        return {}
    off = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0" or torch.cuda.get_device_capability(ranks.context) < (8, 0)
    kinds = {"matmul": torch.backends.cuda.matmul, "cudnn": torch.backends.cudnn}
    return {"tf32": {name: bool(backend.allow_tf32) and not off for name, backend in kinds.items()}}


def finish() -> None:
    """Wait for all work, release the CUDA graphs and leave the group.

    The order matters: since 2.26, destroying an NCCL communicator waits forever for graphs that contain its kernels
    (pytorch#115388).
    """
    synchronize()
    for captured in list(_graphs):
        captured.reset()
    _graphs.clear()
    # CUDA notifies NCCL that a graph was destroyed when the device reaches that point.
    synchronize()
    if dist.is_initialized():
        barrier()
        dist.destroy_process_group()
        _groups[:], _eager[:] = [None], []


def synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def input_wait(ranks: Ranks) -> Any:
    """Return the timer for data waits: a CPU step is complete when it returns, a GPU step is queued."""
    return StreamWait() if ranks.context.type == "cuda" else InputWait()


class StreamWait:
    """InputWait for a CUDA stream, with events before and after each fetch."""

    def __init__(self) -> None:
        self._fetches: Deque[Tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._milliseconds = 0.0
        self.total = 0.0  # seconds of all fetches with completed events

    def fetch(self, call: Callable[[], T]) -> T:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        fetched = call()
        end.record()
        self._fetches.append((start, end))
        while self._fetches and self._fetches[0][1].query():
            self._count()
        return fetched

    def take(self) -> float:
        while self._fetches:
            self._fetches[0][1].synchronize()
            self._count()
        seconds, self._milliseconds = self._milliseconds / 1000, 0.0
        return seconds

    def _count(self) -> None:
        start, end = self._fetches.popleft()
        milliseconds = start.elapsed_time(end)
        self._milliseconds += milliseconds
        self.total += milliseconds / 1000


def autocast(device: torch.device, precision: str) -> ContextManager[Any]:
    dtype = DTYPES[precision]
    if dtype is torch.float32:
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, dtype=dtype)


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def total(values: Any) -> List[float]:
    """Sum ``values`` over all ranks and wait for it; leaves ``values`` as they are."""
    tensor = torch.as_tensor(values, dtype=None if torch.is_tensor(values) else torch.float64)
    if size() > 1:
        # NCCL does not support CPU tensors.
        tensor = tensor.cuda() if dist.get_backend() == "nccl" and not tensor.is_cuda else tensor.clone()
        dist.all_reduce(tensor, group=eager())
    return [float(value) for value in tensor.reshape(-1).tolist()]


def broadcast(tensors: Iterable[torch.Tensor]) -> None:
    if size() == 1:
        return
    with torch.no_grad():
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0, group=eager())


def barrier() -> None:
    if size() == 1:
        return
    # Not an all-reduce on a temporary tensor: Gloo's thread may be the last to release it and then needs Python, which
    # crashes a process that is just exiting.
    if dist.get_backend() == "nccl":
        dist.barrier(group=eager(), device_ids=[torch.cuda.current_device()])
        torch.cuda.synchronize()
    else:
        dist.barrier(group=eager())


def summing(ranks: Ranks, count: int) -> Callable[[], Any]:
    array = torch.zeros(count, device=ranks.context)
    return lambda: dist.all_reduce(array)


def agreed(reason: str) -> str:
    """Return ``reason``, or the fact that another rank has one; empty on all ranks if none has one."""
    failing = total([float(bool(reason))])[0]
    return reason or ("not on every rank" if failing else "")


def everywhere(here: Iterable[str], candidates: Iterable[str]) -> List[str]:
    """Return the ``candidates`` that every rank has ``here``; all ranks call this with the same ``candidates``."""
    available, names = set(here), sorted(candidates)
    missing = total([float(name not in available) for name in names])
    return [name for name, ranks in zip(names, missing) if not ranks]


def average_tensors(tensors: List[torch.Tensor]) -> None:
    """Average each tensor over all ranks with a single all-reduce."""
    if size() == 1:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=eager())
    flat /= size()
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(mean.view_as(tensor))


def flat_gradients(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Return one flat gradient tensor for all ``parameters``, for a single all-reduce.

    Each ``grad`` is a view of it. Clear it with ``zero_``; an optimizer's ``zero_grad`` would drop the views unless
    set_to_none=False.
    """
    listed = list(parameters)
    sizes = [parameter.numel() for parameter in listed]
    flat = torch.zeros(sum(sizes), dtype=listed[0].dtype, device=listed[0].device)
    for parameter, part in zip(listed, flat.split(sizes)):
        parameter.grad = part.view_as(parameter)
    return flat


class LaggedSums:
    """Sums of [loss, stop] and more over all ranks, read some steps after they were sent."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._lagged = Lagged()
        self._votes = torch.tensor([[0.0], [1.0]], device=ranks.context)
        self.drain = self._lagged.drain

    def send(self, loss: Optional[torch.Tensor], stop: bool, *scalars: torch.Tensor) -> Optional[List[float]]:
        """Send asynchronously; return the sums from an earlier step, or None.

        Loss and ``scalars`` are copied, so that their memory can be reused.
        """
        mean = self._votes[0] if loss is None else loss.detach().float().reshape(1)
        values = torch.cat((mean, self._votes[int(stop)], *(scalar.float().reshape(1) for scalar in scalars)))
        work = dist.all_reduce(values, group=eager(), async_op=True) if size() > 1 else None
        if not values.is_cuda:
            return self._lagged.send(lambda: _read(values, work))
        if work is not None:
            work.wait()  # makes the stream wait, not Python
        copied = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return self._lagged.send(lambda: _read(copied, event))


def _read(values: torch.Tensor, work: Any) -> List[float]:
    if isinstance(work, torch.cuda.Event):
        work.synchronize()
    elif work is not None:
        work.wait()
    return [float(value) for value in values.tolist()]


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` (tensors, state_dicts, bytes) and the states of this rank's random generators."""
    write(path, _packed(content))


def write(path: Path, packed: Mapping[str, Any]) -> None:
    """Write a ``snapshot``."""
    torch.save(packed, str(path))


def snapshot(content: Mapping[str, Any], previous: Any = None) -> Mapping[str, Any]:
    """Copy to host memory what ``save`` would write; reuse the memory of the ``previous`` snapshot.

    Copies from a GPU are asynchronous, to pinned memory.
    """
    snapshot: Mapping[str, Any] = _copy(_packed(content), previous)
    synchronize()
    return snapshot


def _copy(value: Any, previous: Any) -> Any:
    if isinstance(value, torch.Tensor):
        fits = isinstance(previous, torch.Tensor) and (previous.shape, previous.dtype) == (value.shape, value.dtype)
        to = previous if fits else torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return to.copy_(value.detach(), non_blocking=True)
    if isinstance(value, Mapping):
        previous_items = previous if isinstance(previous, Mapping) else {}
        return {key: _copy(item, previous_items.get(key)) for key, item in value.items()}
    return copy.deepcopy(value)


def _packed(content: Mapping[str, Any]) -> Dict[str, Any]:
    # torch.load(weights_only=True) accepts tensors and plain values only
    raw = {
        name: torch.frombuffer(bytearray(value), dtype=torch.uint8)
        for name, value in content.items()
        if isinstance(value, bytes)
    }
    plain = {name: value for name, value in content.items() if name not in raw}
    generators: Dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators["cuda"] = torch.cuda.get_rng_state()
    return {"content": plain, "bytes": raw, "generators": generators}


def load(path: Path, in_parts: bool = False) -> Dict[str, Any]:
    """Return the content that ``save`` wrote; ``in_parts`` maps the file (PyTorch 2.1) and reads only used parts."""
    maps = in_parts and "mmap" in inspect.signature(torch.load).parameters
    # Requires PyTorch 1.13: older versions can only execute the file
    saved = torch.load(str(path), map_location="cpu", weights_only=True, **({"mmap": True} if maps else {}))
    generators = saved["generators"]
    random.setstate(generators["python"])
    torch.set_rng_state(generators["cpu"])
    if "cuda" in generators:
        torch.cuda.set_rng_state(generators["cuda"])
    return {**saved["content"], **{name: bytes(raw.numpy()) for name, raw in saved["bytes"].items()}}
