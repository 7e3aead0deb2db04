"""Node probe before a job: hardware facts and quick benchmarks, printed as JSON in lines that srun keeps intact.

    $ srun --ntasks-per-node=1 python -m encore.machine.health '{"disks": ["/results"], "clock": "n1:20000"}'

:mod:`encore.machine.node_checks` evaluates the answers. The probe takes about five seconds without a framework;
``python`` names an interpreter whose PyTorch also measures GEMMs, copies and collectives.
"""

import ctypes
import hashlib
import json
import os
import re
import shutil
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from encore import paths
from encore.files import existing, text_of
from encore.machine import links, network, node

SECONDS = 0.2  # Duration per CPU or memory benchmark
REPEATS = 5
COPIED = 1 << 26  # Bytes per copy, far above a thread's share of the cache
HASHED = 1 << 20
WRITTEN = 1 << 26  # Bytes of the file that a disk writes and reads
FRAMEWORK_SECONDS = 150.0
PINGS = 8
NVIDIA = "0x10de"
XID_SECONDS = 86400.0  # Older errors were reviewed before; they stay in the log after a reset


def probe(question: dict[str, Any]) -> dict[str, Any]:
    """Run all probes. ``disks``: folders to write to; ``clock``: HOST:PORT; ``python``: interpreter of the framework.

    ``named``: whether missing folders are an error. A run would create them.
    """
    machine = node.this_node()
    psutil.cpu_percent(None)
    time.sleep(0.5)
    busy = psutil.cpu_percent(None) / 100
    cards = gpus()
    governors = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    return {
        "node": node.name(),
        **{name: getattr(machine, name) for name in ("kernel", "cpu", "sockets", "cores", "memory_gib")},
        "busy": busy,
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "governors": sorted({text_of(path).strip() for path in governors} - {""}),
        "shared_memory_mib": shutil.disk_usage("/dev/shm").total >> 20 if Path("/dev/shm").is_dir() else 0,
        "pci_gpus": pci_gpus(),
        "gpus": cards,
        "xids": xids(),
        **_interfaces(),
        "cpu_rate": on_all_cores(lambda: partial(hashlib.sha256, bytes(HASHED)), HASHED),
        "memory_rate": on_all_cores(copy, 2 * COPIED),
        "disks": {folder: disk(Path(folder), question.get("named", False)) for folder in question.get("disks", ())},
        **(connections() if cards else {"links": [], "floor": None, "nvlink_rate": None}),
        "clock_offset": clock_offset(question.get("clock", "")),
        "framework": framework(question.get("python", ""), len(cards)),
    }


# -- facts -----------------------------------------------------------------------------------------------


def _interfaces() -> dict[str, Any]:
    interfaces = network.read()
    best = network.best_interface(interfaces.interfaces)
    return {
        "interface": best,
        "megabits": next((port.megabits for port in interfaces.interfaces if port.name == best), 0),
        "ports": {str(port): port.gigabits for port in network.best_ports(interfaces.ports)},
    }


def pci_gpus() -> int:
    """Count NVIDIA GPUs on the PCI bus, including GPUs that the driver does not see."""
    # Class 0x0300 is a VGA controller, 0x0302 a 3D controller.
    return sum(
        text_of(device / "vendor").strip() == NVIDIA and text_of(device / "class").startswith(("0x0300", "0x0302"))
        for device in Path("/sys/bus/pci/devices").glob("*")
    )


def gpus() -> list[dict[str, Any]]:
    """Return NVML's readings per GPU, in MHz, watts, and counts; None for unsupported readings."""
    with node.devices() as handles:
        return [_gpu(handle) for handle in handles]


def _gpu(handle: Any) -> dict[str, Any]:
    import pynvml

    readings: dict[str, Callable[[], Any]] = {
        "name": lambda: pynvml.nvmlDeviceGetName(handle),
        "driver": lambda: pynvml.nvmlSystemGetDriverVersion(),
        "vbios": lambda: pynvml.nvmlDeviceGetVbiosVersion(handle),
        "compute_capability": lambda: ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(handle))),
        **node.condition(handle),
        # Rows remapped after correctable and uncorrectable errors, reset pending, remapping failed.
        "remapped": lambda: [int(count) for count in pynvml.nvmlDeviceGetRemappedRows(handle)],
        "sm_mhz_max": lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "power_limit": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        "power_limit_default": lambda: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000,
        "temperature": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "pcie_width": lambda: pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "pcie_width_max": lambda: pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
        "pcie_generation_max": lambda: pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        "nvlinks": lambda: sum(
            node.query(lambda number=number: pynvml.nvmlDeviceGetNvLinkState(handle, number)) or 0  # type: ignore[misc]
            for number in range(pynvml.NVML_NVLINK_MAX_LINKS)
        ),
    }
    return {key: node.query(read) for key, read in readings.items()}


def xids(log: str | None = None, uptime: float | None = None) -> list[int] | None:
    """Return the Xids of the last day in the kernel log; None if the log is not readable.

    Lines without a timestamp count as recent.
    """
    if log is None:
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=10, check=False, errors="replace")
            log = done.stdout if done.returncode == 0 else None
    now = uptime if uptime is not None else time.clock_gettime(time.CLOCK_BOOTTIME)
    events = re.findall(r"^(?:\[ *([\d.]+)\])?.*NVRM: Xid \([^)]*\): (\d+)", log or "", re.MULTILINE)
    return None if log is None else [int(xid) for when, xid in events if now - float(when or now) < XID_SECONDS]


# -- how fast it is -----------------------------------------------------------------------------------------


def on_all_cores(prepare: Callable[[], Callable[[], object]], size: int) -> float:
    """Run a function on one thread per core. Return the bytes per second of the fastest repetition.

    ``prepare`` returns a function per thread, which processes ``size`` bytes and must release the GIL.
    """
    calls = [prepare() for _ in range(node.cores())]
    return size * max(_calls_per_second(calls) for _ in range(REPEATS))


def _calls_per_second(calls: Sequence[Callable[[], object]]) -> float:
    began = time.perf_counter()

    def repeat(call: Callable[[], object]) -> int:
        count = 0
        while time.perf_counter() < began + SECONDS:
            call()
            count += 1
        return count

    with ThreadPoolExecutor(len(calls)) as pool:
        return sum(pool.map(repeat, calls)) / (time.perf_counter() - began)


def copy() -> Callable[[], object]:
    source, target = (ctypes.create_string_buffer(COPIED) for _ in range(2))
    return partial(ctypes.memmove, target, source, COPIED)


def disk(folder: Path, must_exist: bool = False) -> dict[str, Any]:
    """Measure a disk's write and read bandwidth (bytes/s) and free space; on errors, the problem."""
    directory = existing(folder)
    stats: dict[str, Any] = {
        "free_gib": round(shutil.disk_usage(directory).free / 2**30, 2),
        "mounted": _mounted(directory),
    }
    if must_exist and not folder.is_dir():
        # An unmounted disk would be measured as its parent file system.
        return {**stats, "problem": "it does not exist"}
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            data, began = os.urandom(WRITTEN), time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            stats["write_rate"] = WRITTEN / (time.perf_counter() - began)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            began = time.perf_counter()
            file.read()
            stats["read_rate"] = WRITTEN / (time.perf_counter() - began)
    except OSError as error:
        stats["problem"] = error.strerror or str(error)
    return stats


def _mounted(folder: Path) -> str:
    # File system type of the deepest mount point that contains the folder
    real = folder.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if real.is_relative_to(mount.mountpoint)]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""


def framework(python: str, cards: int) -> dict[str, Any]:
    """Run benchmarks/common/checks/link_speeds.py; return its result or the problem. Empty without ``python``."""
    if not python:
        return {}
    ranks, device = (cards, "gpu") if cards else (2, "cpu")
    variables = {**os.environ, "PYTHONPATH": str(paths.ROOT), **({} if cards else {"OMP_NUM_THREADS": "1"})}
    for name in [name for name in variables if name.startswith(("SLURM_", "MASTER_", "PMI"))]:
        del variables[name]
    with tempfile.TemporaryDirectory(prefix="encore-health-") as folder:
        result = Path(folder) / "speeds.json"
        argv = [
            python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python", python,
            "-m", "benchmarks.common.checks.link_speeds", "--device", device, "--output", str(result), "--peaks",
            *(() if cards else ("--most-bytes", str(1 << 22))),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                argv, cwd=paths.ROOT, env=variables, capture_output=True, text=True, timeout=FRAMEWORK_SECONDS,
                check=False,
            )  # fmt: skip
            if done.returncode != 0:
                messages = [line for line in done.stderr.splitlines() if line.strip()]
                return {"problem": messages[-1] if messages else f"exit code {done.returncode}"}
            measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            return {"problem": str(error)}
    return measured


def connections() -> dict[str, Any]:
    """Return the link types between the GPUs of this node, and the minimum all-reduce bandwidth (bytes/s)."""
    machine = node.this_node()
    server = links.this_server(machine)
    capability = machine.gpus[0].compute_capability if machine.gpus else None
    least = links.all_reduce_floor(server, capability)
    kinds = [[server.link(gpu, peer) for peer in server.gpus] for gpu in server.gpus]
    rate = links.NVLINK_RATES.get(capability or "")
    return {"links": kinds, "floor": least[0] if least else None, "nvlink_rate": rate}


# -- clock ----------------------------------------------------------------------------------------------


class _Clock(socketserver.DatagramRequestHandler):
    # Answers a question with the question and the time.
    def handle(self) -> None:
        self.wfile.write(self.rfile.read() + f" {time.time():.6f}".encode())


@contextmanager
def serve_clock() -> Iterator[int]:
    """Answer the questions for the time on a port, which is given, while entered."""
    with socketserver.UDPServer(("", 0), _Clock) as server:
        threading.Thread(target=server.serve_forever, args=(0.2,), daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def clock_offset(server: str) -> float | None:
    """Return the offset of this clock to HOST:PORT in seconds, from the answer with the lowest latency.

    None without answers. The error is up to half the round-trip time, as in NTP.
    """
    host, _, port = server.rpartition(":")
    offsets = []
    with suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(0.5)
        for number in range(PINGS if host else 0):
            sent = time.time()
            client.sendto(str(number).encode(), (host, int(port)))
            answered, _ = client.recvfrom(64)
            came = time.time()
            mark, _, remote_time = answered.decode().partition(" ")
            if mark == str(number):
                offsets.append((came - sent, (sent + came) / 2 - float(remote_time)))
    return round(min(offsets)[1], 6) if offsets else None


# -- output ---------------------------------------------------------------------------------------------

# srun splits longer lines and may interleave lines of other nodes.
PIECE = 600


def lines_of(answer: dict[str, Any]) -> list[str]:
    """Split an answer into lines of node name, index, number of lines, and chunk."""
    text = json.dumps(answer)
    pieces = [text[offset : offset + PIECE] for offset in range(0, len(text), PIECE)]
    return [f"{answer['node']} {number} {len(pieces)} {piece}" for number, piece in enumerate(pieces)]


def parse_answers(output: str) -> dict[str, dict[str, Any]]:
    """Parse the complete answers of nodes in an output, by node."""
    pieces: dict[str, dict[int, str]] = {}
    for match in re.finditer(r"^(\S+) (\d+) (\d+) (.*)$", output, re.MULTILINE):
        pieces.setdefault(match[1], {-1: match[3]})[int(match[2])] = match[4]
    facts_by_node = {}
    for name, chunks in pieces.items():
        with suppress(ValueError, KeyError):
            facts_by_node[name] = json.loads("".join(chunks[number] for number in range(int(chunks[-1]))))
    return facts_by_node


if __name__ == "__main__":
    print("\n".join(lines_of(probe(json.loads(sys.argv[1])))))
