"""torch.distributed: start-up by any launcher, small sums over all ranks that nobody waits for, an orderly end.

NCCL carries tensors between GPUs, Gloo between CPUs. The launcher tells each process its place as torchrun does
(RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT); under srun the place is Slurm's
own and the job gives MASTER_ADDR and MASTER_PORT. With none of them a process is alone.
"""

from __future__ import annotations

import datetime
import os
from collections import deque
from typing import Any, Deque, Iterable, List, Mapping, Optional, Tuple

import torch
import torch.distributed as dist

from benchmarks.common.ranks import Ranks

TIMEOUT = datetime.timedelta(minutes=10)
"""For one collective; the launcher's own watch for ranks that hang is shorter."""


def read_place(environment: Mapping[str, str]) -> Tuple[int, int, int, int]:
    """Rank, ranks, local rank and ranks on this node, from the variables of torchrun or of srun."""
    if "RANK" in environment:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK", rank))
        return rank, size, local_rank, int(environment.get("LOCAL_WORLD_SIZE", size))
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "MASTER_ADDR" in environment:
        size = int(environment["SLURM_NTASKS"])
        # 4(x2) means four tasks on each of two nodes.
        per_node = environment.get("SLURM_TASKS_PER_NODE", str(size)).split("(")[0].split(",")[0]
        return int(environment["SLURM_PROCID"]), size, int(environment["SLURM_LOCALID"]), int(per_node)
    return 0, 1, 0, 1


def start(device: str) -> Ranks:
    """Join the other ranks; each takes the GPU of its local rank ("gpu") or the CPU ("cpu").

    The ``context`` of the answer is a torch.device.
    """
    rank, size, local_rank, local_size = read_place(os.environ)
    context = torch.device("cpu")
    if device == "gpu":
        # One visible GPU a rank is how srun's --gpus-per-task hands them out.
        context = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(context)
    if size > 1:
        backend = "nccl" if device == "gpu" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=TIMEOUT)
    return Ranks(rank, size, local_rank, local_size, context)


def finish() -> None:
    """Wait for all work and leave the group."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if dist.is_initialized():
        barrier()
        dist.destroy_process_group()


def size() -> int:
    """Number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def total(values: torch.Tensor) -> List[float]:
    """Sum of ``values`` over all ranks; waits for it and leaves ``values`` as they are."""
    if size() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return [float(value) for value in values.reshape(-1).tolist()]


def broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Give all ranks the values that rank 0 has in ``tensors`` (parameters and buffers), in place."""
    if size() == 1:
        return
    with torch.no_grad():
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)


def barrier() -> None:
    """Wait until all ranks have come here."""
    if size() == 1:
        return
    # Not an all-reduce of a tensor made here: Gloo's thread may be the last to let go of it, and needs Python
    # for that, which kills a process that is just ending.
    if dist.get_backend() == "nccl":
        dist.barrier(device_ids=[torch.cuda.current_device()])
    else:
        dist.barrier()


class GradientBuffer:
    """One flat tensor that holds the gradients of all ``parameters``, so that one all-reduce sums them.

    Each parameter's ``grad`` is a view of it. Clear it with ``zero``; an optimizer's ``zero_grad`` would
    take the views away (call it with set_to_none=False if at all).
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        listed = [parameter for parameter in parameters if parameter.requires_grad]
        count = sum(parameter.numel() for parameter in listed)
        self.flat = torch.zeros(count, dtype=listed[0].dtype, device=listed[0].device)
        offset = 0
        for parameter in listed:
            parameter.grad = self.flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def zero(self) -> None:
        """Set all gradients to zero."""
        self.flat.zero_()

    def sum(self) -> None:
        """Replace the gradients by their sum over all ranks."""
        if size() > 1:
            dist.all_reduce(self.flat)

    def average(self) -> None:
        """Replace the gradients by their mean over all ranks."""
        self.sum()
        if size() > 1:
            self.flat.div_(size())


class LaggedSums:
    """Sums of a few numbers over all ranks, read ``lag`` steps after they were sent.

    Reading at once would stop the device at every step. The late reading also keeps Python from running
    ahead of the device by more than ``lag`` steps, and all ranks read the same sum at the same step, so
    that they can agree to stop.
    """

    def __init__(self, lag: int = 2) -> None:
        self._lag = lag
        self._waiting: Deque[Tuple[torch.Tensor, Any]] = deque()

    def send(self, values: torch.Tensor) -> Optional[List[float]]:
        """Send this step's ``values``, which become the sender's; sums of ``lag`` steps ago, None at first."""
        values = values.detach()
        work = dist.all_reduce(values, async_op=True) if size() > 1 else None
        if values.is_cuda:
            if work is not None:
                work.wait()  # makes the stream wait, not Python
            values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            work = torch.cuda.Event()
            work.record()
        self._waiting.append((values, work))
        return self._pop() if len(self._waiting) > self._lag else None

    def drain(self) -> List[List[float]]:
        """Wait for all sums that were not handed out yet."""
        return [self._pop() for _ in range(len(self._waiting))]

    def _pop(self) -> List[float]:
        values, work = self._waiting.popleft()
        if isinstance(work, torch.cuda.Event):
            work.synchronize()
        elif work is not None:
            work.wait()
        return [float(value) for value in values.reshape(-1).tolist()]
