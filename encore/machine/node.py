"""Facts about this machine: processor, memory, GPUs, operating system. Never raises; unknown is None."""

from __future__ import annotations

import csv
import io
import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from encore.machine import nvml


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as the driver reports it."""

    index: int
    name: str
    memory_gib: float
    driver: str
    compute_capability: str | None
    """Such as ``9.0``; None where the driver is too old to report it."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine."""

    hostname: str
    operating_system: str
    kernel: str
    cpu: str
    sockets: int | None
    cores: int
    """Cores that this process may use."""
    memory_gib: float
    gpus: tuple[Gpu, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the plain data for the passport."""
        return asdict(self)


def gpus() -> tuple[Gpu, ...]:
    """Return GPUs of this machine by NVML, or by nvidia-smi where the library does not answer; often none."""
    return _gpus_by_nvml() or _gpus_by_nvidia_smi()


def _gpus_by_nvml() -> tuple[Gpu, ...]:
    import pynvml

    try:
        with nvml.devices() as handles:
            driver = nvml.text(pynvml.nvmlSystemGetDriverVersion()) if handles else ""
            return tuple(_gpu_by_nvml(index, handle, driver) for index, handle in enumerate(handles))
    except pynvml.NVMLError:
        return ()


def _gpu_by_nvml(index: int, handle: Any, driver: str) -> Gpu:
    import pynvml

    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability: str | None = f"{major}.{minor}"
    except pynvml.NVMLError:
        capability = None
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30
    return Gpu(
        index=index,
        name=nvml.text(pynvml.nvmlDeviceGetName(handle)),
        memory_gib=round(memory, 1),
        driver=driver,
        compute_capability=capability,
    )


NVIDIA_SMI_FIELDS = "index,name,memory.total,driver_version,compute_cap"


def _gpus_by_nvidia_smi() -> tuple[Gpu, ...]:
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", f"--query-gpu={NVIDIA_SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_nvidia_smi(done.stdout) if done.returncode == 0 else ()


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Return GPUs from ``nvidia-smi --query-gpu=index,name,memory.total,driver_version,compute_cap`` in CSV."""
    found = []
    for row in csv.reader(io.StringIO(text), skipinitialspace=True):
        if len(row) != 5 or not row[0].isdigit():
            continue
        index, name, memory, driver, capability = row
        gib = float(memory) / 1024 if memory.replace(".", "", 1).isdigit() else 0.0
        known = capability if capability[:1].isdigit() else None
        found.append(
            Gpu(index=int(index), name=name, memory_gib=round(gib, 1), driver=driver, compute_capability=known)
        )
    return tuple(found)


def _cpu_info() -> tuple[str, int | None]:
    """Return the model name and the number of sockets."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor(), None
    models = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    sockets = {line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("physical id")}
    return (models[0] if models else platform.processor()), (len(sockets) or None)


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def cores() -> int:
    """Return cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def this_node() -> Node:
    """Return everything about this machine."""
    cpu, sockets = _cpu_info()
    return Node(
        hostname=platform.node(),
        operating_system=_operating_system(),
        kernel=platform.release(),
        cpu=cpu,
        sockets=sockets,
        cores=cores(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpus=gpus(),
    )
