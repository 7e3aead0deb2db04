"""Telemetry next to the log: CPU, memory, disk, network, GPUs and links, once a second, one JSON object a line."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

INTERVAL_SECONDS = 1.0
ALL_LINKS = 0xFFFFFFFF


class GpuSampler:
    """Reads use, memory, clocks, power, temperature and traffic of each GPU by NVML; no GPUs, no readings."""

    def __init__(self) -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._handles: list[Any] = []
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except pynvml.NVMLError:
            self._handles = []

    def sample(self) -> list[dict[str, Any]]:
        """Return one reading per GPU: percent, MiB, MHz, watts, degrees Celsius, KiB/s, KiB so far."""
        return [self._one(handle) for handle in self._handles]

    def _one(self, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        readings: dict[str, Callable[[], Any]] = {
            "use_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_mib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used // 2**20,
            "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
        values: dict[str, Any] = {}
        for name, read in (readings | self._traffic(handle)).items():
            try:
                values[name] = read()
            except nvml.NVMLError:
                values[name] = None
        return values

    def _traffic(self, handle: Any) -> dict[str, Callable[[], Any]]:
        """Return the readings of PCIe, which NVML measures over 20 ms each, and of all NVLinks together."""
        nvml = self._nvml
        sent, received = nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES
        return {
            "pcie_sent_kib_s": lambda: nvml.nvmlDeviceGetPcieThroughput(handle, sent),
            "pcie_received_kib_s": lambda: nvml.nvmlDeviceGetPcieThroughput(handle, received),
            "nvlink_sent_kib": lambda: self._counter(handle, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
            "nvlink_received_kib": lambda: self._counter(handle, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
        }

    def _counter(self, handle: Any, number: int) -> int | None:
        """Return a counter over all NVLinks of a GPU; None where it has none."""
        # The scope of a field of NVLink is a link; all ones are all of them.
        (value,) = self._nvml.nvmlDeviceGetFieldValues(handle, [(number, ALL_LINKS)])
        return int(value.value.ullVal) if value.nvmlReturn == self._nvml.NVML_SUCCESS else None


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
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """Take no more samples."""
        self._ended.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        sampler = GpuSampler()
        psutil.cpu_percent(None)
        next_time = time.monotonic()
        try:
            with self._path.open("a", encoding="utf-8") as file:
                while not self._ended.wait(max(0.0, next_time - time.monotonic())):
                    reading = sample_host()
                    reading["gpus"] = sampler.sample()
                    file.write(json.dumps(reading) + "\n")
                    file.flush()
                    next_time += INTERVAL_SECONDS
        except OSError:
            return
