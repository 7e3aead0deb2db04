"""Run telemetry: CPU, memory, disk, network, GPUs and links, once per second as JSON lines.

    $ srun --nodes=1 --nodelist=n2 python -m encore.machine.telemetry RUN/experiment_0/telemetry.jsonl

On the first node a thread of ``encore run`` samples. On other nodes this module runs until its stdin closes and adds
the node's name to the file name.
"""

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from encore import paths
from encore.files import text_of
from encore.machine import node, openmetrics

INTERVAL_SECONDS = 1.0
END_SECONDS = 10.0  # That the samplers of other nodes get to end
ALL_LINKS = 0xFFFFFFFF  # Scope for an NVLink field: all links, not a single one


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """Sample of a GPU; null if the driver does not provide a value."""

    use_percent: int | None
    memory_mib: int | None
    sm_mhz: int | None
    memory_mhz: int | None
    power_watts: float | None
    temperature_celsius: int | None
    pcie_sent_kib_s: int | None  # Over 20 ms
    pcie_received_kib_s: int | None  # Over 20 ms
    nvlink_sent_kib: int | None  # NVLink counter over all links: take differences
    nvlink_received_kib: int | None  # NVLink counter over all links: take differences
    throttle: int | None  # Sum of the bits of `nvmlClocksEventReason*` in `nvml.h`
    ecc_corrected: int | None  # Since the driver was loaded
    ecc_uncorrected: int | None  # Since the driver was loaded


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Sample of a node, one line per second; null if the kernel does not provide a value."""

    time: float  # Unix seconds
    node: str  # Slurm's node name, else the host name
    cores: int | None  # Number of CPUs of the machine, as reported by the kernel
    cpu_percent: float  # Use of all cores together, 0 to 100
    memory_used_mib: int  # Total minus available
    disk_read_bytes: int | None  # Counter of the machine since boot: take differences
    disk_write_bytes: int | None  # Counter of the machine since boot
    network_received_bytes: int | None  # Counter of the machine since boot
    network_sent_bytes: int | None  # Counter of the machine since boot
    cpu_stall_us: int | None  # Microseconds since boot in which a process waited for a core (`/proc/pressure`)
    io_stall_us: int | None  # The same of disks
    memory_stall_us: int | None  # The same of memory
    gpus: list[GpuSample]  # Empty without GPUs
    xids: list[list[int]]  # Critical errors of the driver since the last sample: GPU and number of the Xid


def sample_gpu(handle: Any) -> dict[str, Any]:
    """Return a GPU's sample with the fields of ``GpuSample``."""
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
        **node.condition(handle),
    }
    return {name: node.query(read) for name, read in readings.items()}


def sample_host() -> dict[str, Any]:
    """Return a sample of the machine. Byte and stall counters start at boot.

    Stall time is time in which a runnable process waited for a core, the disk or memory (the kernel's PSI).
    """
    memory = psutil.virtual_memory()
    disk = psutil.disk_io_counters()
    network = psutil.net_io_counters()
    return {
        "time": round(time.time(), 3),
        "node": node.name(),
        "cores": psutil.cpu_count(),
        "cpu_percent": psutil.cpu_percent(None),
        "memory_used_mib": (memory.total - memory.available) // 2**20,
        "disk_read_bytes": disk.read_bytes if disk else None,
        "disk_write_bytes": disk.write_bytes if disk else None,
        "network_received_bytes": network.bytes_recv if network else None,
        "network_sent_bytes": network.bytes_sent if network else None,
        **{f"{name}_stall_us": _stalled(text_of(f"/proc/pressure/{name}")) for name in ("cpu", "io", "memory")},
    }


def _stalled(pressure: str) -> int | None:
    total = re.search(r"^some .*total=(\d+)", pressure)
    return int(total[1]) if total else None


@contextlib.contextmanager
def xid_events(handles: Sequence[Any]) -> Iterator[Callable[[], list[list[int]]]]:
    """Yield a function that returns new Xid errors as [index in ``handles``, Xid]."""
    import pynvml

    def index_of(handle: Any) -> int | None:
        return node.query(lambda: pynvml.nvmlDeviceGetIndex(handle))

    positions = {index_of(handle): position for position, handle in enumerate(handles)}
    events = node.query(pynvml.nvmlEventSetCreate) if handles else None
    for handle in handles if events else ():
        node.query(lambda handle=handle: pynvml.nvmlDeviceRegisterEvents(  # type: ignore[misc]
            handle, pynvml.nvmlEventTypeXidCriticalError, events))  # fmt: skip

    def read() -> list[list[int]]:
        errors: list[list[int]] = []
        # Without an event it raises a time-out immediately.
        while events and (event := node.query(lambda: pynvml.nvmlEventSetWait(events, 0))) is not None:
            errors.append([positions.get(index_of(event.device), 0), int(event.eventData)])
        return errors

    try:
        yield read
    finally:
        if events:
            node.query(lambda: pynvml.nvmlEventSetFree(events))


def _sample(path: Path, ended: threading.Event) -> None:
    psutil.cpu_percent(None)
    next_time = time.monotonic()
    # Sampling ends silently if the disk is full.
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        handles = stack.enter_context(node.devices())
        xids = stack.enter_context(xid_events(handles))
        file = stack.enter_context(path.open("a", encoding="utf-8"))
        textfile = openmetrics.Textfile(path.parent)
        stack.callback(textfile.remove)
        while not ended.wait(max(0.0, next_time - time.monotonic())):
            gpus = [GpuSample(**sample_gpu(handle)) for handle in handles]
            reading = asdict(Sample(**sample_host(), gpus=gpus, xids=xids()))
            file.write(json.dumps(reading) + "\n")
            file.flush()
            textfile.write(reading)
            next_time += INTERVAL_SECONDS


@contextlib.contextmanager
def sample_nodes(path: Path, elsewhere: Sequence[Sequence[str]] = ()) -> Iterator[list[int]]:
    """Sample this machine into ``path`` and other nodes through commands that exit when stdin closes; yield their PIDs.

    Command output goes to a file in the same folder: missing telemetry from a node must not end a run.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_sample, args=(path, ended), name="telemetry", daemon=True)
    with contextlib.ExitStack() as stack:
        children = []
        for argv in elsewhere:
            output = stack.enter_context(path.with_name("telemetry.txt").open("ab"))
            with contextlib.suppress(OSError):
                child = psutil.Popen(
                    argv, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=paths.ROOT, start_new_session=True
                )
                children.append(child)
        thread.start()
        try:
            yield [child.pid for child in children]
        finally:
            ended.set()
            thread.join(timeout=5)
            _end(children)


def _end(children: Sequence[psutil.Popen]) -> None:
    for child in children:
        with contextlib.suppress(OSError):
            child.stdin.close()
    _, running = psutil.wait_procs(children, timeout=END_SECONDS)
    for process in running:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    first = Path(sys.argv[1])
    with sample_nodes(first.with_name(f"{first.stem}.{node.name()}{first.suffix}")):
        while sys.stdin.buffer.read(4096):
            pass
