"""Topology of a machine's GPUs, from ``nvidia-smi topo -m``.

    from encore.machine.links import parse_topology
    server = parse_topology(subprocess.check_output(["nvidia-smi", "topo", "-m"], text=True))
    print(server.link("GPU0", "GPU1"))

Link types are as in nvidia-smi: NV4 four NVLinks; PIX a single PCIe switch; PXB multiple PCIe switches; PHB a CPU's
host bridge; NODE multiple host bridges in a NUMA node; SYS the connection between NUMA nodes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import TypedDict

from encore.machine import node, processes

BY_SWITCH = ("PIX", "PXB")
# NCCL's bandwidth per NVLink and direction in GB/s, by compute capability (NVIDIA/nccl, src/graph/topo.h:
# SM60_NVLINK_BW and so on)
NVLINK_RATES = {"6.0": 18.0, "7.0": 20.0, "8.0": 20.0, "8.6": 12.0, "9.0": 20.6, "10.0": 40.1, "10.3": 40.1}
# NCCL's bandwidth in GB/s of PCIe 3.0 x16 and of the slowest CPU interconnect (topo.h: PCI_BW and BDW_QPI_BW). Newer
# hardware is faster, so the floor is conservative.
PCIE_RATE, CPU_RATE = 12.0, 6.0
# Bandwidth per PCIe lane and direction after encoding, GB/s, by generation (Linux, drivers/pci/pci.h:
# PCIE_SPEED2MBS_ENC)
PCIE_LANE_RATES = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 8.0}
FLOOR_SHARE = 0.5  # Minimum fraction of NCCL's bandwidth for an all-reduce of 256 MiB
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS|X")
_DEVICE = re.compile(r"[A-Za-z]\w*\d+(?:_\d+)?$")
_AFFINITY = re.compile(r"CPU[ _]Affinity|NUMA[ _]Affinity|GPU[ _]NUMA[ _]ID")


class Links(TypedDict):
    """GPUs, network adapters, and links of a machine."""

    name: str
    cpu: str
    sockets: int | None
    gpus: list[str]  # GPU0, GPU1 and so on
    gpu_model: str
    adapters: list[str]  # Network adapters
    links: dict[str, dict[str, str]]  # Link types by pair of devices, as in ``nvidia-smi topo -m``
    cpus: dict[str, str]  # CPU affinity per GPU, in the kernel's list format
    numa: dict[str, str]  # NUMA node per GPU
    kind: str  # Links for the all-reduce: NVLink or PCIe; empty for fewer than two GPUs


@dataclass(frozen=True, kw_only=True)
class Server:
    """Topology of a machine."""

    name: str = ""
    cpu: str = ""
    sockets: int | None = None
    gpus: tuple[str, ...] = ()  # GPU0, GPU1 and so on
    gpu_model: str = ""
    adapters: tuple[str, ...] = ()  # Network adapters
    links: Mapping[tuple[str, str], str] = field(default_factory=dict)  # By pair of devices, in both orders
    # CPU affinity per GPU, in the kernel's list format; empty if unknown
    cpus: Mapping[str, str] = field(default_factory=dict)
    numa: Mapping[str, str] = field(default_factory=dict)

    def link(self, device: str, peer: str) -> str:
        return self.links.get((device, peer), "")

    @property
    def near(self) -> tuple[tuple[str, ...], ...]:
        """GPUs grouped by NUMA node and CPU affinity."""
        grouped: dict[str, list[str]] = {}
        for gpu in self.gpus:
            grouped.setdefault(self.numa.get(gpu, "") + "/" + self.cpus.get(gpu, ""), []).append(gpu)
        return tuple(map(tuple, grouped.values()))

    @property
    def switches(self) -> tuple[tuple[str, ...], ...]:
        """GPUs and adapters grouped by PCIe switch. Adapters may reveal a path between GPUs that NVLink hides."""
        remaining = [*self.gpus, *self.adapters]
        groups = []
        while remaining:
            group, grown = {remaining[0]}, True
            while grown:
                reachable = {
                    b for b in remaining if b not in group and any(self.link(a, b) in BY_SWITCH for a in group)
                }
                group, grown = group | reachable, bool(reachable)
            remaining = [device for device in remaining if device not in group]
            if len(group) > 1:
                groups.append(tuple(device for device in (*self.gpus, *self.adapters) if device in group))
        return tuple(groups)

    @property
    def nvlinks(self) -> dict[tuple[str, str], int]:
        pairs = [(a, b) for i, a in enumerate(self.gpus) for b in self.gpus[i + 1 :]]
        return {pair: int(self.link(*pair)[2:]) for pair in pairs if self.link(*pair).startswith("NV")}

    @property
    def has_nvswitch(self) -> bool:
        """Whether all pairs have the same number of NVLinks, which needs a switch for four or more GPUs."""
        pairs = len(self.gpus) * (len(self.gpus) - 1) // 2
        return len(self.gpus) > 3 and len(self.nvlinks) == pairs and len(set(self.nvlinks.values())) == 1

    @property
    def kind(self) -> str:
        """Links for the all-reduce: NVLink or PCIe; empty for fewer than two GPUs."""
        if len(self.gpus) < 2:
            return ""
        return "NVLink" if self.nvlinks else "PCIe"

    def as_json(self) -> Links:
        rows = {
            device: {peer: self.link(device, peer) for peer in (*self.gpus, *self.adapters)} for device in self.gpus
        }
        rows |= {device: {peer: self.link(device, peer) for peer in self.gpus} for device in self.adapters}
        return {
            "name": self.name, "cpu": self.cpu, "sockets": self.sockets, "gpus": list(self.gpus),
            "gpu_model": self.gpu_model, "adapters": list(self.adapters), "links": rows, "cpus": dict(self.cpus),
            "numa": dict(self.numa), "kind": self.kind,
        }  # fmt: skip


def from_json(content: Mapping[str, Any]) -> Server:
    links = {(a, b): word for a, row in content["links"].items() for b, word in row.items() if word}
    return Server(
        name=content["name"], cpu=content["cpu"], sockets=content["sockets"], gpus=tuple(content["gpus"]),
        gpu_model=content["gpu_model"], adapters=tuple(content["adapters"]), links=links, cpus=content["cpus"],
        numa=content["numa"],
    )  # fmt: skip


def all_reduce_floor(server: Server, capability: str | None) -> tuple[float, str] | None:
    """Return the minimum bus bandwidth for an all-reduce over all GPUs (bytes/s) and its source; None if unknown.

    ``capability`` is the compute capability. NVLink counts only if each GPU has NVLinks to two peers or to all.
    """
    pairs = [(a, b) for i, a in enumerate(server.gpus) for b in server.gpus[i + 1 :]]
    if not pairs or not all(server.link(*pair) for pair in pairs):
        return None
    counts = server.nvlinks
    rate = NVLINK_RATES.get(capability or "")
    if len(counts) == len(pairs):
        links = min(counts.values())
    else:
        of_each = [[count for pair, count in counts.items() if gpu in pair] for gpu in server.gpus]
        links = min(map(sum, of_each)) if min(map(len, of_each)) > 1 else 0
    if links:
        source = f"{links} NVLinks of compute capability {capability}"
        return (FLOOR_SHARE * links * rate * 1e9, source) if rate else None
    by_switch = all(server.link(*pair) in BY_SWITCH or pair in counts for pair in pairs)
    rate, source = (PCIE_RATE, "PCIe through a single switch") if by_switch else (CPU_RATE, "PCIe through the CPUs")
    return FLOOR_SHARE * rate * 1e9, source


def pair_floor(word: str, nvlink_rate: float | None) -> float | None:
    """Return the minimum copy bandwidth between two GPUs (bytes/s) by link type; None if unknown."""
    if word.startswith("NV"):
        return FLOOR_SHARE * int(word[2:]) * nvlink_rate * 1e9 if nvlink_rate else None
    return FLOOR_SHARE * (CPU_RATE if word == "SYS" else PCIE_RATE) * 1e9


def parse_topology(text: str) -> Server:
    """Parse the output of ``nvidia-smi topo -m``; returns an empty server without a matrix."""
    plain = _AFFINITY.sub(lambda match: match[0].replace(" ", "_"), _ESCAPE.sub("", text))
    lines = [line.split() for line in plain.splitlines() if line.strip()]
    header = next((line for line in lines if line and line[0] == "GPU0" and line[1:2] != ["X"]), None)
    if header is None:
        return Server()
    affinities = [cell for cell in header if _AFFINITY.fullmatch(cell)]
    devices = [cell for cell in header if cell not in affinities and _DEVICE.fullmatch(cell)]
    links, near = {}, {}
    for name, *cells in (line for line in lines if line[0] in devices and line is not header):
        row = cells[: len(devices)]
        if len(row) < len(devices) or not all(map(_LINK.fullmatch, row)):
            continue
        links.update({(name, other): word for other, word in zip(devices, row, strict=True)})
        near[name] = dict(zip(affinities, cells[len(devices) :], strict=False))
    gpus = tuple(device for device in devices if re.fullmatch(r"GPU\d+", device))
    return Server(
        gpus=gpus,
        adapters=tuple(device for device in devices if device not in gpus),
        links=links,
        cpus={gpu: near.get(gpu, {}).get("CPU_Affinity", "") for gpu in gpus},
        numa={gpu: near.get(gpu, {}).get("NUMA_Affinity", "") for gpu in gpus},
    )


def this_server(machine: node.Node) -> Server:
    """Return the topology of this machine from nvidia-smi; no GPUs without it."""
    server = parse_topology(processes.output_of("nvidia-smi", "topo", "-m")) if machine.gpus else Server()
    # nvidia-smi also lists GPUs that CUDA_VISIBLE_DEVICES hides.
    visible = [f"GPU{gpu.index}" for gpu in machine.gpus]
    return replace(
        server,
        name=machine.hostname,
        cpu=machine.cpu,
        sockets=machine.sockets,
        gpu_model=machine.gpus[0].name if machine.gpus else "",
        gpus=tuple(name for name in visible if name in server.gpus),
    )
