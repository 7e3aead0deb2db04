"""Facts about this machine: processor, memory, GPUs, operating system. Never raises; unknown is None."""

import os
import platform
import re
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from encore.files import text_of
from encore.machine import nvml


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as the driver reports it."""

    index: int
    name: str
    memory_gib: float  # 0 where the driver does not report it
    driver: str
    compute_capability: str | None  # Such as ``9.0``; None where the driver is too old to report it


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine."""

    hostname: str
    operating_system: str
    kernel: str
    cpu: str
    sockets: int | None
    cores: int  # Cores that this process may use
    memory_gib: float
    gpus: tuple[Gpu, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the plain data for the passport."""
        return asdict(self)


def gpus() -> tuple[Gpu, ...]:
    """Return GPUs of this machine as the driver reports them; often none."""
    with nvml.devices() as handles:
        return nvml.known(lambda: tuple(_gpu(index, handle) for index, handle in enumerate(handles))) or ()


def _gpu(index: int, handle: Any) -> Gpu:
    import pynvml

    capability = nvml.known(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    # A GPU that shares the memory of the CPU has none of its own to report.
    memory = nvml.known(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).total) or 0
    return Gpu(
        index=index,
        name=nvml.text(pynvml.nvmlDeviceGetName(handle)),
        memory_gib=round(memory / 2**30, 1),
        driver=nvml.text(pynvml.nvmlSystemGetDriverVersion()),
        compute_capability=".".join(map(str, capability)) if capability else None,
    )


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def cores() -> int:
    """Return cores that this process may use."""
    return len(os.sched_getaffinity(0))


def this_node() -> Node:
    """Return everything about this machine."""
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
