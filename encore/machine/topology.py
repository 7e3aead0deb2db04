"""Reads where this machine's GPUs hang: from the kernel, from hwloc or from nvidia-smi, whichever knows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from encore.machine import binding
from encore.machine.binding import Binding, Near, Siblings

SYS = Path("/sys")
SECONDS = 20.0


def bindings(ranks: int, caller: Mapping[str, str] | None = None) -> tuple[Binding, ...]:
    """The binding of each of ``ranks`` local ranks on this machine."""
    allowed = os.sched_getaffinity(0)
    return binding.bind(ranks, near_gpus(caller or os.environ), sorted(allowed), siblings())


def near_gpus(caller: Mapping[str, str]) -> tuple[Near, ...]:
    """What is near each GPU that CUDA shows to a rank, in CUDA's order; empty where nothing is known.

    nvidia-smi comes last: it shows the CPUs that itself may use, not all that are near.
    """
    ids = bus_ids()
    if not ids:
        return ()
    near = (
        from_kernel(ids) or from_hwloc(ids) or binding.parse_nvidia_smi(_output("nvidia-smi", "topo", "-m"))
    )
    return visible(near, caller.get("CUDA_VISIBLE_DEVICES"))


def visible(near: tuple[Near, ...], chosen: str | None) -> tuple[Near, ...]:
    """The GPUs of CUDA_VISIBLE_DEVICES in its order; unknown ones make all unknown."""
    if chosen is None:
        return near
    numbers = [int(part) if part.strip().isdigit() else -1 for part in chosen.split(",")]
    return tuple(near[n] for n in numbers) if all(0 <= n < len(near) for n in numbers) else ()


def bus_ids() -> list[str]:
    """PCI addresses of the GPUs in the order of nvidia-smi and, with CUDA_DEVICE_ORDER=PCI_BUS_ID, of CUDA."""
    text = _output("nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader")
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if re.fullmatch(r"[0-9A-Fa-f:.]+", line)]


def from_kernel(ids: Sequence[str], root: Path = SYS) -> tuple[Near, ...]:
    """``numa_node`` and ``local_cpulist`` of the PCI devices; empty where the firmware does not tell them."""
    found = []
    for each in ids:
        folder = root / "bus" / "pci" / "devices" / binding.short_bus_id(each)
        node, cpus = _read(folder / "numa_node"), _read(folder / "local_cpulist")
        # -1: the firmware does not say, as in most virtual machines.
        if not node.isdigit():
            return ()
        found.append(Near(binding.parse_cpus(cpus), int(node)))
    return tuple(found)


def from_hwloc(ids: Sequence[str]) -> tuple[Near, ...]:
    """What ``lstopo`` tells, where it is installed."""
    return binding.parse_hwloc(_output("lstopo", "--of", "xml"), ids)


def siblings(root: Path = SYS) -> Siblings:
    """The hardware threads of each CPU's core."""
    found = {}
    for folder in (root / "devices" / "system" / "cpu").glob("cpu[0-9]*"):
        told = binding.parse_cpus(_read(folder / "topology" / "thread_siblings_list"))
        if told:
            found[int(folder.name[3:])] = told
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _output(*command: str) -> str:
    """What a program prints; empty where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
