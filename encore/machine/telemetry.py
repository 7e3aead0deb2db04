"""Telemetry next to the log: CPU, memory, disk, network, GPUs and links, once a second, one JSON object a line."""

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from encore.machine import node

INTERVAL_SECONDS = 1.0
ALL_LINKS = 0xFFFFFFFF  # As the scope of a field of NVLink, which is otherwise one link


def sample_gpu(handle: Any) -> dict[str, Any]:
    """Return one reading of a GPU, None for what it does not know.

    Percent, MiB, MHz, watts, degrees Celsius, KiB/s of PCIe, which NVML measures over 20 ms each, and KiB so far of
    all its NVLinks together.
    """
    import pynvml

    def nvlink(field: int) -> int | None:
        (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [(field, ALL_LINKS)])
        return int(value.value.ullVal) if value.nvmlReturn == pynvml.NVML_SUCCESS else None

    readings = {
        "use_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_mib": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used // 2**20,
        "sm_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "memory_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
        "power_watts": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_celsius": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "pcie_sent_kib_s": lambda: pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES),
        "pcie_received_kib_s": lambda: pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES),
        "nvlink_sent_kib": lambda: nvlink(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
        "nvlink_received_kib": lambda: nvlink(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
    }
    return {name: node.known(read) for name, read in readings.items()}


def sample_host() -> dict[str, Any]:
    """Return one reading of the machine; counters of bytes run since the machine started."""
    memory = psutil.virtual_memory()
    disk = psutil.disk_io_counters()
    network = psutil.net_io_counters()
    return {
        "time": round(time.time(), 3),
        "cpu_percent": psutil.cpu_percent(None),
        "memory_used_mib": (memory.total - memory.available) // 2**20,
        "disk_read_bytes": disk.read_bytes if disk else None,
        "disk_write_bytes": disk.write_bytes if disk else None,
        "network_received_bytes": network.bytes_recv if network else None,
        "network_sent_bytes": network.bytes_sent if network else None,
    }


class Telemetry:
    """Samples into ``path`` from a thread until ``stop``; a full disk ends it without harm."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        psutil.cpu_percent(None)
        next_time = time.monotonic()
        with contextlib.suppress(OSError), node.devices() as handles, self._path.open("a", encoding="utf-8") as file:
            while not self._ended.wait(max(0.0, next_time - time.monotonic())):
                file.write(json.dumps({**sample_host(), "gpus": [sample_gpu(handle) for handle in handles]}) + "\n")
                file.flush()
                next_time += INTERVAL_SECONDS
