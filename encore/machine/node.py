"""Facts about this machine: CPUs, memory, GPUs, operating system. Errors are not raised; unknown values are None."""

import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import psutil

from encore.files import text_of

Value = TypeVar("Value")


@contextmanager
def devices() -> Iterator[list[Any]]:
    """Yield the NVML handles of the GPUs visible to CUDA programs (CUDA_VISIBLE_DEVICES), in CUDA's order.

    Empty without a driver. If the machine has different GPUs, set CUDA_DEVICE_ORDER=PCI_BUS_ID: by default the
    orders of CUDA and NVML differ.
    """
    import pynvml

    def handles() -> list[Any]:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return visible_handles(handles, os.environ.get("CUDA_VISIBLE_DEVICES"))

    try:
        yield query(handles) or []
    finally:
        query(pynvml.nvmlShutdown)


def visible_handles(handles: Sequence[Any], visible: str | None) -> list[Any]:
    """Return the GPUs of ``visible``: indices, UUIDs or unique prefixes, and MIG UUIDs; None: all GPUs.

    The list is cut at the first invalid or repeated entry, such as -1 (CUDA C++ Programming Guide, "CUDA Environment
    Variables").
    """
    if visible is None:
        return list(handles)
    selected: list[Any] = []
    for entry in visible.split(","):
        handle = _handle_of(entry.strip(), handles)
        if handle is None or any(handle is other for other in selected):
            break
        selected.append(handle)
    return selected


def _handle_of(entry: str, handles: Sequence[Any]) -> Any:
    import pynvml

    if entry.isdecimal():
        return handles[int(entry)] if int(entry) < len(handles) else None
    if entry.startswith("MIG-"):
        return query(lambda: pynvml.nvmlDeviceGetHandleByUUID(entry))
    uuids = [query(partial(pynvml.nvmlDeviceGetUUID, handle)) or "" for handle in handles]
    matches = [
        handle
        for handle, uuid in zip(handles, uuids, strict=True)
        if entry.startswith("GPU") and uuid.startswith(entry)
    ]
    return matches[0] if len(matches) == 1 else None


def query(read: Callable[[], Value]) -> Value | None:
    """Call a function of NVML; None if the driver or the GPU does not support it."""
    import pynvml

    try:
        return read()
    except pynvml.NVMLError:
        return None


def condition(handle: Any) -> dict[str, Callable[[], int]]:
    """Return functions that query a GPU's condition, by name.

    Throttle reasons are a sum of the bits in ``telemetry.THROTTLE``; memory errors are counted since the driver was
    loaded.
    """
    import pynvml

    # Old name in drivers before R535.
    name = "nvmlDeviceGetCurrentClocks{}Reasons"
    reasons = getattr(pynvml, name.format("Event"), None) or getattr(pynvml, name.format("Throttle"))
    return {
        "throttle": lambda: reasons(handle),
        "ecc_corrected": lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, 0, pynvml.NVML_VOLATILE_ECC),
        "ecc_uncorrected": lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, 1, pynvml.NVML_VOLATILE_ECC),
    }


def bus(handle: Any) -> str:
    """Return a GPU's PCI address; for a MIG instance, the address of its GPU."""
    import pynvml

    handle = query(lambda: pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)) or handle
    return str(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()


def busses() -> list[str]:
    """Return the PCI addresses of the visible GPUs; empty without a driver."""
    with devices() as handles:
        return query(lambda: [bus(handle) for handle in handles]) or []


@dataclass(frozen=True, kw_only=True)
class Gpu:
    index: int  # As in nvidia-smi; CUDA's index may differ due to CUDA_VISIBLE_DEVICES
    name: str
    memory_gib: float  # 0 where the driver does not report it
    driver: str
    compute_capability: str | None  # Such as ``9.0``; None if the driver is too old to report it


@dataclass(frozen=True, kw_only=True)
class Node:
    hostname: str
    operating_system: str
    kernel: str
    cpu: str
    sockets: int | None
    cores: int  # Cores that this process may use
    memory_gib: float
    gpus: tuple[Gpu, ...]


def gpus() -> tuple[Gpu, ...]:
    """Return the visible GPUs of this machine, in CUDA's order."""
    with devices() as handles:
        return query(lambda: tuple(_gpu(position, handle) for position, handle in enumerate(handles))) or ()


def _gpu(position: int, handle: Any) -> Gpu:
    import pynvml

    # MIG instances do not have an index.
    index = query(lambda: pynvml.nvmlDeviceGetIndex(handle))
    capability = query(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    # GPUs that share the CPU's memory do not report a size.
    memory = query(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).total) or 0
    return Gpu(
        index=position if index is None else int(index),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_gib=round(memory / 2**30, 1),
        driver=pynvml.nvmlSystemGetDriverVersion(),
        compute_capability=".".join(map(str, capability)) if capability else None,
    )


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def name() -> str:
    """Return Slurm's name of this node, else its host name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def cores() -> int:
    return len(os.sched_getaffinity(0))


def this_node() -> Node:
    cpuinfo = re.findall(r"^(model name|physical id)\s*: (.*?)\s*$", text_of("/proc/cpuinfo"), re.MULTILINE)
    models = [value for name, value in cpuinfo if name == "model name"]
    return Node(
        hostname=platform.node(),
        operating_system=_operating_system(),
        kernel=platform.release(),
        cpu=models[0] if models else platform.processor(),
        sockets=len({value for name, value in cpuinfo if name == "physical id"}) or None,
        cores=cores(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpus=gpus(),
    )
