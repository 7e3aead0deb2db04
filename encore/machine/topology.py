"""Read which cores and memory are near each GPU of this machine: from the kernel, else from NVML."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from encore.machine import binding, nvml
from encore.machine.binding import Binding, Near, Siblings

SYS = Path("/sys")
WORD = 64
"""Bits of NVML's words."""


def bindings(ranks: int, caller: Mapping[str, str] | None = None) -> tuple[Binding, ...]:
    """Return the binding of each of ``ranks`` local ranks on this machine."""
    allowed = os.sched_getaffinity(0)
    return binding.bind(ranks, near_gpus(caller or os.environ), sorted(allowed), siblings())


def near_gpus(caller: Mapping[str, str]) -> tuple[Near, ...]:
    """Return what is near each GPU that CUDA shows to a rank, in CUDA's order; empty where nothing is known.

    CUDA numbers GPUs as NVML does where CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    import pynvml

    try:
        with nvml.devices() as handles:
            ids = [nvml.text(pynvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
            near = from_kernel(ids) or tuple(map(from_nvml, handles))
    except pynvml.NVMLError:
        return ()
    return visible(near, caller.get("CUDA_VISIBLE_DEVICES"))


def visible(near: tuple[Near, ...], chosen: str | None) -> tuple[Near, ...]:
    """Return the GPUs of CUDA_VISIBLE_DEVICES in its order; unknown ones make all unknown."""
    if chosen is None:
        return near
    numbers = [int(part) if part.strip().isdigit() else -1 for part in chosen.split(",")]
    return tuple(near[n] for n in numbers) if all(0 <= n < len(near) for n in numbers) else ()


def from_kernel(ids: Sequence[str], root: Path = SYS) -> tuple[Near, ...]:
    """Return ``numa_node`` and ``local_cpulist`` of the PCI devices; empty where the firmware does not report them."""
    found = []
    for each in ids:
        # The kernel writes a PCI domain with four digits, NVML with eight.
        folder = root / "bus" / "pci" / "devices" / each.lower()[-len("0000:07:00.0") :]
        node, cpus = _read(folder / "numa_node"), _read(folder / "local_cpulist")
        # -1: the firmware does not say, as in most virtual machines.
        if not node.isdigit():
            return ()
        found.append(Near(binding.parse_cpus(cpus), int(node)))
    return tuple(found)


def from_nvml(handle: Any) -> Near:
    """Return the CPU and memory affinity that the driver gives a GPU."""
    import pynvml

    words = os.sysconf("SC_NPROCESSORS_CONF") // WORD + 1
    cpus = _bits(pynvml.nvmlDeviceGetCpuAffinity(handle, words))
    try:
        nodes = _bits(pynvml.nvmlDeviceGetMemoryAffinity(handle, words, pynvml.NVML_AFFINITY_SCOPE_NODE))
    except pynvml.NVMLError:
        # Drivers before 450 do not say.
        nodes = ()
    return Near(cpus, nodes[0] if len(nodes) == 1 else None)


def _bits(words: Sequence[int]) -> tuple[int, ...]:
    """Return the positions of the bits that are set, in words of which the lowest comes first."""
    return tuple(WORD * number + bit for number, word in enumerate(words) for bit in range(WORD) if word >> bit & 1)


def siblings(root: Path = SYS) -> Siblings:
    """Return the hardware threads of each CPU's core."""
    found = {}
    for folder in (root / "devices" / "system" / "cpu").glob("cpu[0-9]*"):
        threads = binding.parse_cpus(_read(folder / "topology" / "thread_siblings_list"))
        if threads:
            found[int(folder.name[3:])] = threads
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
