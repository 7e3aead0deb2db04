"""Which interfaces are taken: InfiniBand, RoCE, plain Ethernet, and what never leaves a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from encore.machine import network
from encore.machine.network import ETHERNET, INFINIBAND, Interface, Network, Port

ETH = Interface("eno1", ETHERNET, 10_000, True)
FAST = Interface("enp1s0", ETHERNET, 100_000, False)
IPOIB = Interface("ibs1", INFINIBAND, 200_000, False)


def test_one_node_stays_on_the_loopback() -> None:
    found = network.variables(Network((ETH, IPOIB), (Port("mlx5_0", 1, "InfiniBand", 200.0),)), 1)
    assert found == {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


def test_infiniband_wins_over_roce_and_slower_ports() -> None:
    ports = (
        Port("mlx5_0", 1, "InfiniBand", 200.0),
        Port("mlx5_1", 1, "InfiniBand", 200.0),
        Port("mlx5_4", 1, "InfiniBand", 100.0),
        Port("mlx5_5", 1, "Ethernet", 400.0),
    )
    assert network.variables(Network((ETH, FAST, IPOIB), ports), 4) == {
        "NCCL_SOCKET_IFNAME": "=ibs1",
        "GLOO_SOCKET_IFNAME": "ibs1",
        "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "OMPI_MCA_btl_tcp_if_include": "ibs1",
    }


def test_roce_is_taken_where_there_is_no_infiniband() -> None:
    found = network.variables(Network((ETH,), (Port("mlx5_bond_0", 1, "Ethernet", 100.0),)), 2)
    assert (found["NCCL_IB_HCA"], found["NCCL_SOCKET_IFNAME"]) == ("=mlx5_bond_0:1", "=eno1")


def test_ethernet_of_the_default_route_then_the_fastest() -> None:
    assert network.best_interface((FAST, ETH)) == ETH
    assert network.best_interface((Interface("a", ETHERNET, 1000, False), FAST)) == FAST
    assert network.variables(Network((FAST, ETH), ()), 2) == {
        "NCCL_SOCKET_IFNAME": "=eno1",
        "GLOO_SOCKET_IFNAME": "eno1",
        "UCX_NET_DEVICES": "eno1",
        "OMPI_MCA_btl_tcp_if_include": "eno1",
    }


def test_nothing_found_sets_nothing() -> None:
    assert network.variables(Network((), ()), 2) == {}


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="ascii")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """/sys and /proc of a machine with the files that the kernel's documentation names; constructed."""
    interfaces = {
        "lo": (772, "unknown", ""), "eth0": (1, "up", "-1"), "eth1": (1, "down", "10000"), "ib0": (32, "up", ""),
        "docker0": (1, "up", ""), "veth12": (1, "up", "10000"), "br7": (1, "up", ""), "eth2": (1, "up", "25000"),
        "bond0": (1, "up", "50000"),
    }  # fmt: skip
    for name, (kind, state, speed) in interfaces.items():
        folder = tmp_path / "sys/class/net" / name
        put(folder / "type", str(kind))
        put(folder / "operstate", state)
        put(folder / "speed", speed)
    (tmp_path / "sys/class/net/br7/bridge").mkdir()
    (tmp_path / "sys/class/net/eth2/master").mkdir()
    for adapter, state, layer in (("mlx5_0", "4: ACTIVE", "InfiniBand"), ("mlx5_1", "1: DOWN", "InfiniBand")):
        folder = tmp_path / "sys/class/infiniband" / adapter / "ports/1"
        put(folder / "state", state)
        put(folder / "link_layer", layer)
        put(folder / "rate", "200 Gb/sec (4X HDR)")
    put(
        tmp_path / "proc/net/route",
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "eth9\t00000000\t0100A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\n"
        "eth0\t00000000\t0100A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
        "eth1\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0",
    )
    return tmp_path


def test_what_the_kernel_reports_is_read(root: Path) -> None:
    named = frozenset(path.name for path in (root / "sys/class/net").iterdir())
    found = network.read(root, named)
    assert found.interfaces == (
        Interface("bond0", ETHERNET, 50_000, False),
        Interface("eth0", ETHERNET, 0, True),
        Interface("ib0", INFINIBAND, 0, False),
    )
    assert found.ports == (Port("mlx5_0", 1, "InfiniBand", 200.0),)
    # An interface without an address cannot be talked through.
    assert [each.name for each in network.read(root, frozenset({"eth0"})).interfaces] == ["eth0"]


def test_a_machine_without_anything_is_read(tmp_path: Path) -> None:
    assert network.read(tmp_path, frozenset()) == Network((), ())
    assert network.default_interface("") is None


def test_this_machine_is_read() -> None:
    assert "lo" not in [each.name for each in network.read().interfaces]
