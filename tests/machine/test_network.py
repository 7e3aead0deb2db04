"""Which interfaces are taken: InfiniBand, RoCE, plain Ethernet, and what never leaves a machine."""

from pathlib import Path

import pytest

from encore.machine import network
from encore.machine.network import ETHERNET, INFINIBAND, Interface, Network, Port

ETH = Interface("eno1", ETHERNET, 10_000, True)
SLOW = Interface("a", ETHERNET, 1000, False)
FAST = Interface("enp1s0", ETHERNET, 100_000, False)
IPOIB = Interface("ibs1", INFINIBAND, 200_000, False)
PORTS = (
    Port("mlx5_0", 1, "InfiniBand", 200.0), Port("mlx5_1", 1, "InfiniBand", 200.0),
    Port("mlx5_4", 1, "InfiniBand", 100.0), Port("mlx5_5", 1, "Ethernet", 400.0),
)  # fmt: skip
LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


def settings(interface: str, adapters: str = "") -> dict[str, str]:
    # What ranks on several nodes are given for an interface, and for adapters besides
    tcp = dict.fromkeys(("GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include"), interface)
    by_adapter = {"NCCL_IB_HCA": f"={adapters}"} if adapters else {}
    return {**tcp, **by_adapter, "NCCL_SOCKET_IFNAME": f"={interface}", "UCX_NET_DEVICES": adapters or interface}


@pytest.mark.parametrize(
    ("found", "nodes", "expected"),
    [
        (Network((ETH, IPOIB), PORTS), 1, LOOPBACK),
        (Network((ETH, FAST, IPOIB), PORTS), 4, settings("ibs1", "mlx5_0:1,mlx5_1:1")),
        (Network((ETH,), PORTS[3:]), 2, settings("eno1", "mlx5_5:1")),
        (Network((FAST, ETH), ()), 2, settings("eno1")),
        (Network((SLOW, FAST), ()), 2, settings("enp1s0")),
        (Network((), ()), 2, {}),
    ],
)
def test_settings_of_the_ranks(found: Network, nodes: int, expected: dict[str, str]) -> None:
    assert network.variables(found, nodes) == expected


def test_what_the_kernel_reports_is_read(tmp_path: Path) -> None:
    # /sys and /proc of a machine with the files that the kernel's documentation names; constructed
    interfaces = {
        "lo": (772, "unknown", ""), "eth0": (1, "up", "-1"), "eth1": (1, "down", "10000"), "ib0": (32, "up", ""),
        "docker0": (1, "up", ""), "veth12": (1, "up", "10000"), "br7": (1, "up", ""), "eth2": (1, "up", "25000"),
        "bond0": (1, "up", "50000"),
    }  # fmt: skip
    files = {"sys/class/net/br7/bridge": "", "sys/class/net/eth2/master": ""}
    for name, values in interfaces.items():
        for file, value in zip(("type", "operstate", "speed"), values, strict=True):
            files[f"sys/class/net/{name}/{file}"] = f"{value}\n"
    for adapter, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        for file, value in (("state", state), ("link_layer", "InfiniBand"), ("rate", "200 Gb/sec (4X HDR)")):
            files[f"sys/class/infiniband/{adapter}/ports/1/{file}"] = f"{value}\n"
    files["proc/net/route"] = (
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "ens9\t00000000\t0100A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\n"
        "eth0\t00000000\t0100A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
        "eth1\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    expected = (
        Interface("bond0", ETHERNET, 50_000, False), Interface("eth0", ETHERNET, 0, True),
        Interface("ib0", INFINIBAND, 0, False),
    )  # fmt: skip
    assert network.read(tmp_path, frozenset(interfaces)) == Network(expected, PORTS[:1])
    # An interface without an address cannot be talked through.
    assert network.read(tmp_path, frozenset({"eth0"})).interfaces == expected[1:2]
    assert network.read(tmp_path / "none", frozenset()) == Network((), ())
    assert "lo" not in [each.name for each in network.read().interfaces]
