"""Detection of the network interfaces for communication between ranks, without assumptions about names."""

import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from encore.files import text_of

ROOT = Path("/")
ETHERNET, INFINIBAND = 1, 32  # ARPHRD_ETHER and ARPHRD_INFINIBAND (linux/if_arp.h)
# Prefixes of interfaces that are local or belong to containers
LOCAL_ONLY = re.compile(r"(lo|docker|veth|virbr|vnet|br-|cni|flannel|cali|lxc|ifb|dummy|tun|tap|sit|kube)")


@dataclass(frozen=True)
class Interface:
    """A network interface that has an address and is up."""

    name: str
    type: int  # ETHERNET, INFINIBAND (IP over InfiniBand), or a different ARP hardware type
    megabits: int  # 0 if the driver does not report it, as in most virtual machines
    is_default: bool  # Whether the default route leaves through it


@dataclass(frozen=True)
class Port:
    """Active port of an InfiniBand or RoCE (Ethernet link layer) adapter."""

    adapter: str
    number: int
    layer: str  # ``InfiniBand`` or ``Ethernet``
    gigabits: float

    def __str__(self) -> str:
        return f"{self.adapter}:{self.number}"


@dataclass(frozen=True)
class Network:
    interfaces: tuple[Interface, ...]
    ports: tuple[Port, ...]


# -- choice ------------------------------------------------------------------------------------------------


def best_interface(interfaces: Iterable[Interface]) -> str:
    """Select the interface for TCP: IP over InfiniBand, else the default route's, else the fastest.

    Empty without a usable interface.
    """
    best = min(interfaces, key=lambda i: (i.type != INFINIBAND, not i.is_default, -i.megabits, i.name), default=None)
    return best.name if best else ""


def best_ports(ports: Iterable[Port]) -> tuple[Port, ...]:
    """Return the InfiniBand ports, else the RoCE ports; only the fastest, because slower ports are for storage."""
    all_ports = tuple(ports)
    layer = "InfiniBand" if any(port.layer == "InfiniBand" for port in all_ports) else "Ethernet"
    same = [port for port in all_ports if port.layer == layer]
    fastest = max((port.gigabits for port in same), default=0.0)
    return tuple(port for port in same if port.gigabits == fastest)


def variables(network: Network, nodes: int) -> dict[str, str]:
    """Return settings of NCCL, Gloo, UCX and OpenMPI; on one node TCP stays on the loopback."""
    if nodes == 1:
        return {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    interface, adapters = best_interface(network.interfaces), ",".join(map(str, best_ports(network.ports)))
    # Without a name OpenMPI also tries the bridges of container engines, which every node has under the same address,
    # and hangs.
    by_name = ("GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES", "OMPI_MCA_btl_tcp_if_include")
    # "=" makes NCCL match the exact name, not a prefix.
    over_tcp = {"NCCL_SOCKET_IFNAME": f"={interface}", **dict.fromkeys(by_name, interface)} if interface else {}
    over_adapters = {"NCCL_IB_HCA": f"={adapters}", "UCX_NET_DEVICES": adapters} if adapters else {}
    return {**over_tcp, **over_adapters}


# -- reading -----------------------------------------------------------------------------------------------


def read(root: Path = ROOT, with_address: frozenset[str] | None = None) -> Network:
    """Return the network of this machine; ``with_address`` are the interfaces that have an address."""
    usable = interfaces_with_address() if with_address is None else with_address
    routes = [line.split() for line in text_of(root / "proc/net/route").splitlines()[1:]]
    # Interface, destination, gateway, flags, reference count, use, metric, mask.
    defaults = [(int(row[6]), row[0]) for row in routes if len(row) > 7 and row[1] == row[7] == "00000000"]
    default = min(defaults)[1] if defaults else None
    folders = sorted((root / "sys/class/net").glob("*"))
    interfaces = [_interface(folder, default) for folder in folders if folder.name in usable]
    ports = [_port(folder) for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*"))]
    return Network(tuple(filter(None, interfaces)), tuple(filter(None, ports)))


def interfaces_with_address() -> frozenset[str]:
    """Return interfaces with an IP address that other machines could reach."""
    families = (socket.AF_INET, socket.AF_INET6)
    return frozenset(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.family in families and not address.address.startswith("fe80:") for address in addresses)
    )


def _interface(folder: Path, default: str | None) -> Interface | None:
    # An interface that is down does not report its speed.
    kind, state, speed = (text_of(folder / name).strip() for name in ("type", "operstate", "speed"))
    belongs = any((folder / name).exists() for name in ("bridge", "brport", "master"))
    if not kind.isdigit() or belongs or state not in ("up", "unknown") or LOCAL_ONLY.match(folder.name):
        return None
    return Interface(folder.name, int(kind), int(speed) if speed.isdigit() else 0, folder.name == default)


def _port(folder: Path) -> Port | None:
    # "4: ACTIVE", "200 Gb/sec (4X HDR)"
    state, rate, layer = (text_of(folder / name).strip() for name in ("state", "rate", "link_layer"))
    speed = re.match(r"[\d.]+", rate)
    if not state.startswith("4:"):
        return None
    return Port(folder.parent.parent.name, int(folder.name), layer or "InfiniBand", float(speed[0]) if speed else 0.0)
