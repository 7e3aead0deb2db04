"""Facts about this machine: processor, memory, GPUs, operating system. Never raises; unknown is None."""

import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

from encore.files import text_of

Value = TypeVar("Value")


# Why a GPU's clocks are lower than they could be (nvml.h, nvmlClocksEventReason); an idle one is not slowed.
THROTTLE = {
    0x04: "power cap", 0x08: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake",
}  # fmt: skip


@contextmanager
def devices() -> Iterator[list[Any]]:
    """Yield a handle of each GPU in the order of nvidia-smi; none where the library does not answer."""
    import pynvml

    def handles() -> list[Any]:
        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    try:
        yield known(handles) or []
    finally:
        known(pynvml.nvmlShutdown)


def known(read: Callable[[], Value]) -> Value | None:
    """Return what NVML answers; None where the driver or the GPU does not know."""
    import pynvml

    try:
        return read()
    except pynvml.NVMLError:
        return None


def condition(handle: Any) -> dict[str, Callable[[], int]]:
    """Return what to ask a GPU of its condition, by name.

    Reasons for lower clocks as a sum of THROTTLE's bits, and errors of its memory since the driver was loaded.
    """
    import pynvml

    # Drivers before R535 have it under its older name.
    name = "nvmlDeviceGetCurrentClocks{}Reasons"
    reasons = getattr(pynvml, name.format("Event"), None) or getattr(pynvml, name.format("Throttle"))
    return {
        "throttle": lambda: reasons(handle),
        "ecc_corrected": lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, 0, pynvml.NVML_VOLATILE_ECC),
        "ecc_uncorrected": lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, 1, pynvml.NVML_VOLATILE_ECC),
    }


def bus(handle: Any) -> str:
    import pynvml

    return text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()


def busses() -> list[str]:
    """Return the PCI address of each GPU; none where the library does not answer."""
    with devices() as handles:
        return known(lambda: [bus(handle) for handle in handles]) or []


def text(value: str | bytes) -> str:
    """Return a text of NVML, whose older versions give bytes."""
    return value.decode() if isinstance(value, bytes) else value


@dataclass(frozen=True, kw_only=True)
class Gpu:
    index: int
    name: str
    memory_gib: float  # 0 where the driver does not report it
    driver: str
    compute_capability: str | None  # Such as ``9.0``; None where the driver is too old to report it


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
    """Return GPUs of this machine as the driver reports them; often none."""
    with devices() as handles:
        return known(lambda: tuple(_gpu(index, handle) for index, handle in enumerate(handles))) or ()


def _gpu(index: int, handle: Any) -> Gpu:
    import pynvml

    capability = known(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    # A GPU that shares the memory of the CPU has none of its own to report.
    memory = known(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).total) or 0
    return Gpu(
        index=index,
        name=text(pynvml.nvmlDeviceGetName(handle)),
        memory_gib=round(memory / 2**30, 1),
        driver=text(pynvml.nvmlSystemGetDriverVersion()),
        compute_capability=".".join(map(str, capability)) if capability else None,
    )


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def name() -> str:
    """Return what Slurm calls this node, else its host name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def cores() -> int:
    return len(os.sched_getaffinity(0))


def this_node() -> Node:
    known = re.findall(r"^(model name|physical id)\s*: (.*?)\s*$", text_of("/proc/cpuinfo"), re.MULTILINE)
    models = [value for name, value in known if name == "model name"]
    return Node(
        hostname=platform.node(),
        operating_system=_operating_system(),
        kernel=platform.release(),
        cpu=models[0] if models else platform.processor(),
        sockets=len({value for name, value in known if name == "physical id"}) or None,
        cores=cores(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpus=gpus(),
    )
