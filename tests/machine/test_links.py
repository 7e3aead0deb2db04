"""Links of a machine as nvidia-smi and NVML report them, and traffic in the telemetry."""

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from encore import paths
from encore.files import text_of
from encore.machine import binding, links, node, processes, telemetry
from encore.machine.links import Server, parse_topology
from tests.machine.machines import machine
from tests.trainings import wait_until

SAMPLES = paths.ROOT / "tests" / "samples" / "topology"


def sample(name: str) -> Server:
    return parse_topology((SAMPLES / f"{name}.txt").read_text(encoding="utf-8"))


SECOND_SWITCH = ("GPU2", "GPU3", "mlx5_1")
EXPECTED = {
    "dgx1-v100": ([6] * 8, [": GPU0 GPU1 GPU2 GPU3", ": GPU4 GPU5 GPU6 GPU7"], SECOND_SWITCH, "NVLink", False, "SYS"),
    "dgx-a100": (
        [84] * 8, ["3: GPU0 GPU1", "1: GPU2 GPU3", "7: GPU4 GPU5", "5: GPU6 GPU7"], SECOND_SWITCH, "NVLink", True,
        "NV12",
    ),
}  # fmt: skip


def test_recorded_machines() -> None:
    # A DGX-1: six NVLinks a V100, two sockets, four PCIe switches; a DGX A100: twelve from each GPU to all others
    found = {}
    for name in ("dgx1-v100", "dgx-a100"):
        server = sample(name)
        links_of = [sum(count for pair, count in server.nvlinks.items() if gpu in pair) for gpu in server.gpus]
        near = [f"{server.numa[gpus[0]]}: {' '.join(gpus)}" for gpus in server.near]
        found[name] = (
            links_of,
            near,
            server.switches[1],
            server.kind,
            server.has_nvswitch,
            server.link("GPU0", "GPU5"),
        )
    assert found == EXPECTED
    again = links.from_json(sample("dgx1-v100").as_json())
    assert again == links.from_json(again.as_json()) and again.nvlinks == sample("dgx1-v100").nvlinks


def by_matrix(*rows: str) -> Server:
    # A server of the links in the upper triangle, row by row
    gpus = tuple(f"GPU{number}" for number in range(len(rows) + 1))
    found = {}
    for i, row in enumerate(rows):
        for j, word in enumerate(row.split(), i + 1):
            found[gpus[i], gpus[j]] = found[gpus[j], gpus[i]] = word
    return Server(gpus=gpus, links=found)


@pytest.mark.parametrize(
    ("server", "capability", "floor"),
    [
        (sample("dgx1-v100"), "7.0", 60.0),
        (sample("dgx-a100"), "8.0", 120.0),
        (by_matrix("NV18"), "9.0", 185.4),
        (by_matrix("NV4 NV4 NV4", "NV4 NV4", "NV4"), "8.0", 40.0),
        # Bridges join pairs; between them the CPUs carry the ring.
        (by_matrix("NV4 SYS SYS", "SYS SYS", "NV4"), "8.6", 3.0),
        (by_matrix("NV4 PIX PIX", "PIX PIX", "NV4"), "8.6", 6.0),
        (by_matrix("NODE"), "8.9", 3.0),
        (by_matrix("NV18"), None, None),
        (Server(gpus=("GPU0", "GPU1")), "9.0", None),
        (Server(gpus=("GPU0",)), "9.0", None),
    ],
)
def test_floor_of_an_all_reduce(server: Server, capability: str | None, floor: float | None) -> None:
    # Half of what NCCL counts with for the links, whose numbers are those of its src/graph/topo.h
    found = links.all_reduce_floor(server, capability)
    assert (found and found[0] / 1e9) == (pytest.approx(floor) if floor else None)


@pytest.mark.parametrize("text", ["", "No devices were found\n", "\tGPU0\tGPU1\nGPU0\t X\n"], ids=["", "none", "cut"])
def test_text_without_a_matrix_has_no_links(text: str) -> None:
    assert not parse_topology(text).links


def test_underlined_heading_and_two_gpus_behind_a_switch() -> None:
    # As drivers print on a terminal; no NVLink
    text = "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    text += "GPU0\t X \tPIX\t0-15\t0\t\tN/A\nGPU1\tPIX\t X \t0-15\t0\t\tN/A\n"
    server = parse_topology(text)
    assert (server.kind, server.switches, server.near) == ("PCIe", (("GPU0", "GPU1"),), (("GPU0", "GPU1"),))


def traffic(handle: int, fields: list[tuple[int, int]]) -> list[SimpleNamespace]:
    ((number, scope),) = fields
    assert scope == telemetry.ALL_LINKS
    return [SimpleNamespace(nvmlReturn=int(handle == 1), value=SimpleNamespace(ullVal=number * 10))]


ANSWERS: dict[str, Callable[..., object]] = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlDeviceGetCount": lambda: 2,
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=f"00000000:0{handle}:00.0".encode()),
    "nvmlDeviceGetNvLinkState": lambda handle, link: int(link < 2),
    "nvmlDeviceGetNvLinkRemotePciInfo": lambda handle, link: SimpleNamespace(busId=f"00000000:0{1 - handle}:00.0"),
    "nvmlDeviceGetPcieThroughput": lambda handle, counter: 1000 * (counter + 1) + handle,
    "nvmlDeviceGetFieldValues": traffic,
}


class Library:
    # As much of pynvml as is asked: two GPUs with two links to each other, and one link to nothing

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_NVLINK_MAX_LINKS = 3
    NVML_SUCCESS = 0
    NVML_CLOCK_SM = NVML_CLOCK_MEM = NVML_TEMPERATURE_GPU = NVML_PCIE_UTIL_TX_BYTES = 0
    NVML_PCIE_UTIL_RX_BYTES, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 1, 138, 139

    def __getattr__(self, name: str) -> object:
        def refuse(*_: object) -> None:
            raise self.NVMLError("Not Supported")

        return ANSWERS.get(name, refuse)


def test_links_and_traffic_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Library())
    here = links.this_server(machine("V100", "V100"))
    assert (here.name, here.gpu_model, here.nvlinks) == ("box", "V100", {("GPU0", "GPU1"): 2})
    text = (SAMPLES / "dgx-a100.txt").read_text(encoding="utf-8")
    monkeypatch.setattr(processes, "output_of", lambda *command: text)
    by_program = links.this_server(machine("A100"))
    assert (by_program.links, by_program.gpu_model) == (sample("dgx-a100").links, "A100")
    nothing = dict.fromkeys(
        ("use_percent", "memory_mib", "sm_mhz", "memory_mhz", "power_watts", "temperature_celsius", "nvlink_sent_kib",
         "nvlink_received_kib")
    )  # fmt: skip
    assert [telemetry.sample_gpu(handle) for handle in (0, 1)] == [
        {**nothing, "pcie_sent_kib_s": 1000, "pcie_received_kib_s": 2000, "nvlink_sent_kib": 1380,
         "nvlink_received_kib": 1390},
        {**nothing, "pcie_sent_kib_s": 1001, "pcie_received_kib_s": 2001},
    ]  # fmt: skip
    assert binding.near_gpus(node.busses()) == () and node.gpus() == ()
    named = {"nvmlDeviceGetName": lambda handle: b"NVIDIA GB10", "nvmlSystemGetDriverVersion": lambda: "580.1"}
    for name, answer in named.items():
        monkeypatch.setitem(ANSWERS, name, answer)
    found = node.Gpu(index=0, name="NVIDIA GB10", memory_gib=0.0, driver="580.1", compute_capability=None)
    assert node.gpus() == (found, replace(found, index=1))


def test_telemetry_is_sampled_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "INTERVAL_SECONDS", 0.01)
    path, sampled = tmp_path / "telemetry.jsonl", telemetry.Telemetry(tmp_path / "telemetry.jsonl")
    sampled.start()
    wait_until(lambda: text_of(path).count("\n") > 2, "three samples", seconds=60)
    sampled.stop()
    lines = path.read_text(encoding="utf-8").splitlines()
    times = [json.loads(line)["time"] for line in lines]
    assert times == sorted(times) and set(json.loads(lines[0])) == {*telemetry.sample_host(), "gpus"}
    assert "telemetry" not in {thread.name for thread in threading.enumerate()}
