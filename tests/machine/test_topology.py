"""Links, network and CPU topology as kernel, driver and NVML report them, and the binding of ranks."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from encore import paths
from encore.files import text_of
from encore.machine import binding, links, network, node, processes, telemetry
from encore.machine.network import ETHERNET, INFINIBAND, Interface, Network, Port
from tests.machine.machines import machine
from tests.results.result_logs import write_files
from tests.trainings import wait_until

SAMPLES = paths.ROOT / "tests" / "samples" / "topology"


def sample(name: str) -> links.Server:
    return links.parse_topology((SAMPLES / f"{name}.txt").read_text(encoding="utf-8"))


SECOND_SWITCH = ("GPU2", "GPU3", "mlx5_1")
# NVLinks of each GPU, NUMA node and its GPUs, second PCIe switch, kind, NVSwitch, link from GPU 0 to GPU 5. DGX-1: six
# NVLinks a V100, two sockets, four switches; DGX A100: twelve NVLinks from each GPU to every other one.
EXPECTED = {
    "dgx1-v100": ([6] * 8, [": GPU0 GPU1 GPU2 GPU3", ": GPU4 GPU5 GPU6 GPU7"], SECOND_SWITCH, "NVLink", False, "SYS"),
    "dgx-a100": (
        [84] * 8, ["3: GPU0 GPU1", "1: GPU2 GPU3", "7: GPU4 GPU5", "5: GPU6 GPU7"], SECOND_SWITCH, "NVLink", True,
        "NV12",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_recorded_topology(name: str) -> None:
    server = sample(name)
    nvlinks = [sum(count for pair, count in server.nvlinks.items() if gpu in pair) for gpu in server.gpus]
    near = [f"{server.numa[gpus[0]]}: {' '.join(gpus)}" for gpus in server.near]
    properties = (server.switches[1], server.kind, server.has_nvswitch, server.link("GPU0", "GPU5"))
    assert (nvlinks, near, *properties) == EXPECTED[name]
    restored = links.from_json(server.as_json())
    assert restored == links.from_json(restored.as_json()) and restored.nvlinks == server.nvlinks


# Output of drivers on a terminal: two GPUs behind a PCIe switch, no NVLink
UNDERLINED = (
    "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tPIX\t0-15\t0\t\tN/A\nGPU1\tPIX\t X \t0-15\t0\t\tN/A\n"
)


@pytest.mark.parametrize(
    ("text", "kind", "near", "is_linked"),
    [
        (UNDERLINED, "PCIe", (("GPU0", "GPU1"),), True),
        ("", "", (), False),
        ("No devices were found\n", "", (), False),
        ("\tGPU0\tGPU1\nGPU0\t X\n", "PCIe", (("GPU0", "GPU1"),), False),
    ],
    ids=["underlined heading", "empty", "no devices", "cut"],
)
def test_matrix_is_found_in_the_text(text: str, kind: str, near: tuple[tuple[str, str], ...], is_linked: bool) -> None:
    server = links.parse_topology(text)
    assert (server.kind, server.near, server.switches) == (kind, near, near if is_linked else ())
    assert bool(server.links) is is_linked


def from_matrix(*rows: str) -> links.Server:
    # Return a server with the links in the upper triangle of a matrix
    gpus = tuple(f"GPU{number}" for number in range(len(rows) + 1))
    upper = {(gpus[i], gpus[j]): link for i, row in enumerate(rows) for j, link in enumerate(row.split(), start=i + 1)}
    return links.Server(gpus=gpus, links=upper | {(second, first): link for (first, second), link in upper.items()})


@pytest.mark.parametrize(
    ("server", "capability", "floor"),
    [
        (sample("dgx1-v100"), "7.0", 60.0),
        (sample("dgx-a100"), "8.0", 120.0),
        (from_matrix("NV18"), "9.0", 185.4),
        (from_matrix("NV4 NV4 NV4", "NV4 NV4", "NV4"), "8.0", 40.0),
        # NVLink bridges join pairs. The ring between the pairs goes through the CPUs.
        (from_matrix("NV4 SYS SYS", "SYS SYS", "NV4"), "8.6", 3.0),
        (from_matrix("NV4 PIX PIX", "PIX PIX", "NV4"), "8.6", 6.0),
        (from_matrix("NODE"), "8.9", 3.0),
        (from_matrix("NV18"), None, None),
        (links.Server(gpus=("GPU0", "GPU1")), "9.0", None),
        (links.Server(gpus=("GPU0",)), "9.0", None),
    ],
)
def test_floor_of_an_all_reduce(server: links.Server, capability: str | None, floor: float | None) -> None:
    # Half of the bandwidth that NCCL expects for the links (src/graph/topo.h), in GB/s
    result = links.all_reduce_floor(server, capability)
    assert (result and result[0] / 1e9) == (pytest.approx(floor) if floor else None)


ANSWERS: dict[str, Callable[..., object]] = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlDeviceGetCount": lambda: 2,
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=f"00000000:0{handle}:00.0"),
    "nvmlDeviceGetPcieThroughput": lambda handle, counter: 1000 * (counter + 1) + handle,
    "nvmlDeviceGetFieldValues": lambda handle, fields: [
        SimpleNamespace(nvmlReturn=int(handle == 1), value=SimpleNamespace(ullVal=number * 10))
        for number, scope in fields
        if scope == telemetry.ALL_LINKS
    ],
    "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 4 * handle,
    "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 10 * kind + handle,
    "nvmlEventSetCreate": lambda: "events",
    "nvmlEventSetFree": lambda events: None,
    "nvmlDeviceRegisterEvents": lambda handle, types, events: None,
    "nvmlDeviceGetIndex": lambda handle: handle,
}


class Library:
    # Part of pynvml that Encore calls, with two GPUs
    NVMLError = type("NVMLError", (Exception,), {})
    NVML_SUCCESS = 0
    NVML_CLOCK_SM = NVML_CLOCK_MEM = NVML_TEMPERATURE_GPU = NVML_PCIE_UTIL_TX_BYTES = 0
    NVML_VOLATILE_ECC, nvmlEventTypeXidCriticalError = 0, 8
    NVML_PCIE_UTIL_RX_BYTES, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 1, 138, 139

    def __init__(self, **answers: object) -> None:
        self.__dict__ |= ANSWERS | answers

    def __getattr__(self, name: str) -> object:
        return Mock(side_effect=self.NVMLError("Not Supported"))


def test_links_and_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [SimpleNamespace(device=device, eventData=xid) for device, xid in ((0, 48), (1, 79))]
    wait = Mock(side_effect=[*events, Library.NVMLError("Timeout"), Library.NVMLError("Timeout")])
    monkeypatch.setitem(sys.modules, "pynvml", Library(nvmlEventSetWait=wait))
    monkeypatch.setattr(processes, "output_of", lambda *command: (SAMPLES / "dgx-a100.txt").read_text(encoding="utf-8"))
    server = links.this_server(machine("A100"))
    assert (server.name, server.links, server.gpu_model) == ("box", sample("dgx-a100").links, "A100")
    unsupported = dict.fromkeys(
        ("use_percent", "memory_mib", "sm_mhz", "memory_mhz", "power_watts", "temperature_celsius", "nvlink_sent_kib",
         "nvlink_received_kib")
    )  # fmt: skip
    assert [telemetry.sample_gpu(handle) for handle in (0, 1)] == [
        {**unsupported, "pcie_sent_kib_s": 1000, "pcie_received_kib_s": 2000, "nvlink_sent_kib": 1380,
         "nvlink_received_kib": 1390, "throttle": 0, "ecc_corrected": 0, "ecc_uncorrected": 10},
        {**unsupported, "pcie_sent_kib_s": 1001, "pcie_received_kib_s": 2001, "throttle": 4, "ecc_corrected": 1,
         "ecc_uncorrected": 11},
    ]  # fmt: skip
    with telemetry.xid_events([0, 1]) as read:
        assert (read(), read()) == ([[0, 48], [1, 79]], [])
    assert binding.near_gpus(node.busses()) == () and node.gpus() == ()
    named = Library(nvmlDeviceGetName=lambda handle: "NVIDIA GB10", nvmlSystemGetDriverVersion=lambda: "580.1")
    monkeypatch.setitem(sys.modules, "pynvml", named)
    gpu = node.Gpu(index=0, name="NVIDIA GB10", memory_gib=0.0, driver="580.1", compute_capability=None)
    assert node.gpus() == (gpu, replace(gpu, index=1))


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        (" 1 ", [1]),
        ("", []),
        ("-1", []),
        ("0,-1,2", [0]),  # an invalid entry hides all that follow
        ("1,3", [1]),
        ("1,1,2", [1]),
        ("GPU-a1", [1]),
        ("GPU-b2,GPU-a0", [2, 0]),
        ("GPU-a", []),  # not unique
        ("MIG-7", [7]),
        ("MIG-8", []),
    ],
)
def test_cuda_visible_devices(visible: str | None, indices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Callable[..., object]] = {
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetUUID": lambda handle: ["GPU-a0-0", "GPU-a1-0", "GPU-b2-0"][handle],
        "nvmlDeviceGetHandleByUUID": Mock(side_effect=[7, 7] if visible == "MIG-7" else Library.NVMLError("Not Found")),
        "nvmlDeviceGetName": lambda handle: "NVIDIA A100",
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=f"0000:0{handle}:00.0"),
    }
    monkeypatch.setitem(sys.modules, "pynvml", Library(**answers))
    monkeypatch.setattr(processes, "output_of", lambda *command: "")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in node.gpus()] == indices
    assert node.busses() == [f"0000:0{index}:00.0" for index in indices]


def samples_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text_of(path).splitlines(keepends=True) if line.endswith("\n")]


def test_nodes_are_sampled_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "INTERVAL_SECONDS", 0.01)
    path, remote = tmp_path / "telemetry.jsonl", tmp_path / "telemetry.n2.jsonl"
    commands = [
        (sys.executable, "-m", "encore.machine.telemetry", str(path)),
        (str(tmp_path / "no_program"),),
        (sys.executable, "-c", "raise SystemExit('cannot start')"),
    ]
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    with telemetry.sample_nodes(path, commands) as pids:
        wait_until(lambda: bool(samples_in(remote)) and len(samples_in(path)) > 2, "a sample of n2, three of this node")
    threads = {thread.name for thread in threading.enumerate()}
    assert (len(pids), any(map(psutil.pid_exists, pids)), "telemetry" in threads) == (2, False, False)
    samples = samples_in(path)
    assert samples == sorted(samples, key=lambda reading: reading["time"])
    assert set(samples[0]) == {*telemetry.sample_host(), "gpus", "xids"}
    assert {reading["node"] for reading in samples_in(remote)} == {"n2"}
    assert "cannot start" in text_of(tmp_path / "telemetry.txt")


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
    # Variables of ranks on several nodes that use an interface and InfiniBand adapters
    tcp = dict.fromkeys(("GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include"), interface)
    infiniband = {"NCCL_IB_HCA": f"={adapters}"} if adapters else {}
    return {**tcp, **infiniband, "NCCL_SOCKET_IFNAME": f"={interface}", "UCX_NET_DEVICES": adapters or interface}


@pytest.mark.parametrize(
    ("devices", "nodes", "expected"),
    [
        (Network((ETH, IPOIB), PORTS), 1, LOOPBACK),
        (Network((ETH, FAST, IPOIB), PORTS), 4, settings("ibs1", "mlx5_0:1,mlx5_1:1")),
        (Network((ETH,), PORTS[3:]), 2, settings("eno1", "mlx5_5:1")),
        (Network((FAST, ETH), ()), 2, settings("eno1")),
        (Network((SLOW, FAST), ()), 2, settings("enp1s0")),
        (Network((), ()), 2, {}),
    ],
)
def test_network_variables_of_ranks(devices: Network, nodes: int, expected: dict[str, str]) -> None:
    assert network.variables(devices, nodes) == expected


def test_network_is_read_from_sys_and_proc(tmp_path: Path) -> None:
    # Constructed, with the files in the kernel's documentation
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
        port = f"sys/class/infiniband/{adapter}/ports/1"
        files |= {f"{port}/state": state, f"{port}/link_layer": "InfiniBand", f"{port}/rate": "200 Gb/sec (4X HDR)\n"}
    files["proc/net/route"] = (
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "ens9\t00000000\t0100A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\n"
        "eth0\t00000000\t0100A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
        "eth1\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    write_files(tmp_path, files)
    expected = (
        Interface("bond0", ETHERNET, 50_000, False), Interface("eth0", ETHERNET, 0, True),
        Interface("ib0", INFINIBAND, 0, False),
    )  # fmt: skip
    for folder, names, result in (
        (tmp_path, frozenset(interfaces), Network(expected, PORTS[:1])),
        (tmp_path, frozenset({"eth0"}), Network(expected[1:2], PORTS[:1])),  # the others have no address
        (tmp_path / "none", frozenset(), Network((), ())),
    ):
        assert network.read(folder, names) == result
    assert "lo" not in [interface.name for interface in network.read().interfaces]


# Output of `nvidia-smi topo -m` on a DGX A100 (NVIDIA/nccl issue 1505); the last four GPUs follow the same pattern.
NODES = {numa: f"{16 * numa}-{16 * numa + 15},{16 * numa + 128}-{16 * numa + 143}" for numa in (1, 3, 5, 7)}
A100_NEAR = tuple(binding.Affinity(binding.parse_cpus(NODES[numa]), numa) for numa in (3, 3, 1, 1, 7, 7, 5, 5))
# A DGX-1 with a process on one socket (benchmarks/distributed/ddp/README.md of pytorch/pytorch)
SOCKET = (binding.Affinity(binding.parse_cpus("0-19,40-59"), 0),) * 8


def threads_of(cores: int) -> dict[int, tuple[int, ...]]:
    # Two hardware threads a core with numbers i and i + cores, as on DGX-1 and DGX A100
    return {cpu: (cpu % cores, cpu % cores + cores) for cpu in range(2 * cores)}


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-2,8", (0, 1, 2, 8)), ("7", (7,)), ("", ()), ("N/A", ()), ("0-", (0,)), ("3-1", ())],
)
def test_lists_of_cpus(text: str, cpus: tuple[int, ...]) -> None:
    assert binding.parse_cpus(text) == cpus and binding.parse_cpus(binding.format_cpus(cpus)) == cpus


SHARED_NODES = [
    "48-55,176-183 3 8", "56-63,184-191 3 8", "16-23,144-151 1 8", "24-31,152-159 1 8",
    "112-119,240-247 7 8", "120-127,248-255 7 8", "80-87,208-215 5 8", "88-95,216-223 5 8",
]  # fmt: skip
SHARED_SOCKET = [
    "0-1,40-41 0 2", "2-4,42-44 0 3", "5-6,45-46 0 2", "7-9,47-49 0 3",
    "10-11,50-51 0 2", "12-14,52-54 0 3", "15-16,55-56 0 2", "17-19,57-59 0 3",
]  # fmt: skip


@pytest.mark.parametrize(
    ("near", "allowed", "cores", "expected"),
    [
        (A100_NEAR, range(256), 128, SHARED_NODES),
        (SOCKET, range(80), 40, SHARED_SOCKET),
        ((), range(4), None, ["0-1 None 2", "2-3 None 2"]),
        ((binding.Affinity((), 0),) * 2, range(4, 8), 4, ["4-5 None 2", "6-7 None 2"]),
        # Ranks get only allowed CPUs. If none of them is near the GPUs, the ranks divide all of them.
        (A100_NEAR, [48, 49, 176], 128, ["48,176 3 1", "49 3 1"]),
        (A100_NEAR, [0, 1], None, ["0 None 1", "1 None 1"]),
        ((), [0, 1], None, ["0 None 1", "1 None 1", "0 None 1"]),
    ],
)
def test_ranks_share_the_cpus_near_their_gpus(
    near: tuple[binding.Affinity, ...], allowed: Sequence[int], cores: int | None, expected: list[str]
) -> None:
    bindings = binding.bind(len(expected), near, allowed, threads_of(cores) if cores else None)
    assert [f"{binding.format_cpus(rank.cpus)} {rank.numa} {rank.cores}" for rank in bindings] == expected
    assert binding.threads(bindings) == min(int(text.split()[2]) for text in expected)


def test_cpus_near_a_gpu_are_read_from_sys(tmp_path: Path) -> None:
    files = {
        "bus/pci/devices/0000:07:00.0/numa_node": "3\n", "bus/pci/devices/0000:07:00.0/local_cpulist": NODES[3],
        "bus/pci/devices/0000:0f:00.0/numa_node": "-1\n",
        "devices/system/cpu/cpu1/topology/thread_siblings_list": "1,3\n", "devices/system/cpu/cpufreq/policy": "",
    }  # fmt: skip
    write_files(tmp_path, files)
    near = [binding.near_gpus([bus], tmp_path) for bus in ("00000000:07:00.0", "0000FFFF:0F:00.0")]
    assert (near, binding.siblings(tmp_path)) == ([A100_NEAR[:1], ()], {1: (1, 3)})


def test_binding_options_of_launchers() -> None:
    near, plain = binding.bind(2, A100_NEAR[1:3], range(256), threads_of(128)), binding.bind(2, (), range(4))
    assert binding.srun_options(near) == (
        "--cpu-bind=verbose,mask_cpu:0xffff0000000000000000000000000000ffff000000000000,"
        "0xffff0000000000000000000000000000ffff0000",
        "--mem-bind=map_mem:3,1",
    )
    assert binding.srun_options(plain) == ("--cpu-bind=verbose,mask_cpu:0x3,0xc", "--mem-bind=local")
    rank = "${places[${OMPI_COMM_WORLD_LOCAL_RANK:-${HOROVOD_LOCAL_RANK:-${LOCAL_RANK:-${SLURM_LOCALID:-0}}}}]}"
    taskset = f"places=('taskset --cpu-list 48-63,176-191' 'taskset --cpu-list 16-31,144-159'); exec {rank} \"$@\""
    assert binding.wrap_command(("python", "train.py"), near) == ("bash", "-c", taskset, "bound", "python", "train.py")
    numactl = [binding.wrap_command((), ranks, with_numactl=True)[2].partition(";")[0] for ranks in (near, plain)]
    assert numactl == [
        "places=('numactl --physcpubind=48-63,176-191 --membind=3' 'numactl --physcpubind=16-31,144-159 --membind=1')",
        "places=('numactl --physcpubind=0-1 --localalloc' 'numactl --physcpubind=2-3 --localalloc')",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", binding.LOCAL_RANKS)
def test_wrapper_binds_on_this_machine(name: str, rank: int) -> None:
    bindings = binding.of_this_machine(2)
    show = ("python3", "-c", "import os; print(sorted(os.sched_getaffinity(0)))")
    variables = {"PATH": os.environ["PATH"], name: str(rank)}
    output = subprocess.check_output(binding.wrap_command(show, bindings), env=variables, text=True)
    assert output.strip() == str(list(bindings[rank].cpus))
