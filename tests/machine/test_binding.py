"""Which cores a rank gets: samples of real machines, odd ones, and the exact options of each launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from encore.machine import binding, topology
from encore.machine.binding import Binding, Near

# What `nvidia-smi topo -m` prints, and NVML gives: of a DGX A100 by NVIDIA/nccl issue 1505, its other four GPUs after
# the same pattern; of a DGX-1 by benchmarks/distributed/ddp/README.md of pytorch/pytorch at e125c55f, where a program
# was allowed one socket.
A100_NEAR = tuple(
    Near(binding.parse_cpus(f"{16 * numa}-{16 * numa + 15},{16 * numa + 128}-{16 * numa + 143}"), numa)
    for numa in (3, 3, 1, 1, 7, 7, 5, 5)
)
DGX1_NEAR = (Near(binding.parse_cpus("0-19,40-59"), None),) * 8


def threads_of(cores: int) -> dict[int, tuple[int, ...]]:
    """Return two hardware threads a core, numbered as on DGX-1 and DGX A100: i and i + cores."""
    return {cpu: (cpu % cores, cpu % cores + cores) for cpu in range(2 * cores)}


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-2,8", (0, 1, 2, 8)), ("7", (7,)), ("", ()), ("N/A", ()), ("0-", (0,)), ("3-1", ())],
)
def test_lists_of_cpus(text: str, cpus: tuple[int, ...]) -> None:
    assert binding.parse_cpus(text) == cpus


def test_lists_and_masks_are_written() -> None:
    assert binding.format_cpus([8, 0, 1, 2]) == "0-2,8"
    assert binding.mask([0, 1, 2, 8]) == "0x107"
    assert binding.mask([127]) == "0x80000000000000000000000000000000"


class Library:
    """NVML of a machine whose GPUs have these CPUs and NUMA nodes nearby."""

    NVML_AFFINITY_SCOPE_NODE = 0
    NVMLError = RuntimeError

    def __init__(self, near: Sequence[Near]) -> None:
        self._near = near
        self.is_open = False

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self._near)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Near:
        return self._near[index]

    def nvmlDeviceGetPciInfo(self, handle: Near) -> SimpleNamespace:
        return SimpleNamespace(busId=b"0000FFFF:07:00.0")

    def nvmlDeviceGetCpuAffinity(self, handle: Near, words: int) -> list[int]:
        bits = sum(1 << cpu for cpu in handle.cpus)
        return [bits >> 64 * word & (1 << 64) - 1 for word in range(words)]

    def nvmlDeviceGetMemoryAffinity(self, handle: Near, words: int, scope: int) -> list[int]:
        if handle.numa is None:
            raise self.NVMLError("Not Supported")
        return [1 << handle.numa, *[0] * (words - 1)]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Near]], Library]:
    """Put a machine of 256 hardware threads and these GPUs in the place of this one."""

    def place(near: Sequence[Near]) -> Library:
        made = Library(near)
        monkeypatch.setitem(sys.modules, "pynvml", made)
        monkeypatch.setattr(topology.os, "sysconf", lambda name: 256)
        return made

    return place


def test_affinity_by_nvml(library: Callable[[Sequence[Near]], Library]) -> None:
    made = library(A100_NEAR)
    assert topology.near_gpus({}) == A100_NEAR
    assert topology.near_gpus({"CUDA_VISIBLE_DEVICES": "2,0"}) == (A100_NEAR[2], A100_NEAR[0])
    assert not made.is_open


def test_driver_without_memory_affinity_gives_the_cpus(library: Callable[[Sequence[Near]], Library]) -> None:
    library(DGX1_NEAR)
    assert topology.near_gpus({}) == DGX1_NEAR


def test_library_that_does_not_answer_knows_nothing(library: Callable[[Sequence[Near]], Library]) -> None:
    made = library(())
    assert topology.near_gpus({}) == ()

    def refuse() -> None:
        raise made.NVMLError("Driver Not Loaded")

    made.nvmlInit = refuse  # type: ignore[method-assign]
    assert topology.near_gpus({}) == ()


def test_kernel(tmp_path: Path) -> None:
    folder = tmp_path / "bus/pci/devices/0000:07:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("3\n", encoding="ascii")
    (folder / "local_cpulist").write_text("48-63,176-191\n", encoding="ascii")
    assert topology.from_kernel(["00000000:07:00.0"], tmp_path) == A100_NEAR[:1]
    (folder / "numa_node").write_text("-1\n", encoding="ascii")
    assert topology.from_kernel(["00000000:07:00.0"], tmp_path) == ()


def test_ranks_of_a_dgx_a100_share_their_node_and_keep_both_threads_of_a_core() -> None:
    bindings = binding.bind(8, A100_NEAR, range(256), threads_of(128))
    assert [binding.format_cpus(each.cpus) for each in bindings] == [
        "48-55,176-183", "56-63,184-191", "16-23,144-151", "24-31,152-159",
        "112-119,240-247", "120-127,248-255", "80-87,208-215", "88-95,216-223",
    ]  # fmt: skip
    assert [each.numa for each in bindings] == [3, 3, 1, 1, 7, 7, 5, 5]
    assert binding.threads(bindings) == 8
    assert not set(bindings[0].cpus) & set(bindings[1].cpus)


def test_ranks_of_a_dgx1_divide_the_socket_that_all_of_them_name() -> None:
    bindings = binding.bind(8, DGX1_NEAR, range(80), threads_of(40))
    assert [binding.format_cpus(each.cpus) for each in bindings[:3]] == [
        "0-1,40-41",
        "2-4,42-44",
        "5-6,45-46",
    ]
    assert sorted(cpu for each in bindings for cpu in each.cpus) == list(binding.parse_cpus("0-19,40-59"))


def test_unknown_topology_divides_the_allowed_cores() -> None:
    assert binding.bind(2, (), [0, 1, 2, 3]) == (Binding((0, 1), None, 2), Binding((2, 3), None, 2))
    unknown = (Near((), None), Near((), None))
    assert binding.bind(2, unknown, [4, 5, 6, 7], threads_of(4)) == (
        Binding((4, 5), None, 2),
        Binding((6, 7), None, 2),
    )


def test_only_allowed_cores_are_given_out() -> None:
    bindings = binding.bind(2, A100_NEAR, [48, 49, 176], threads_of(128))
    assert [each.cpus for each in bindings] == [(48, 176), (49,)]
    # Nothing near is allowed: then all that is allowed is divided.
    assert [each.cpus for each in binding.bind(2, A100_NEAR, [0, 1])] == [(0,), (1,)]


def test_more_ranks_than_cores_share_them() -> None:
    assert [each.cpus for each in binding.bind(3, (), [0, 1])] == [(0,), (1,), (0,)]


@pytest.mark.parametrize(
    ("chosen", "numas"),
    [(None, [3, 3, 1, 1, 7, 7, 5, 5]), ("2,0", [1, 3]), ("GPU-1234", []), ("9", []), ("", [])],
)
def test_chosen_gpus_keep_their_order(chosen: str | None, numas: list[int]) -> None:
    assert [each.numa for each in topology.visible(A100_NEAR, chosen)] == numas


def test_srun_options() -> None:
    bindings = binding.bind(2, A100_NEAR[1:3], range(256), threads_of(128))
    assert binding.srun_options(bindings) == (
        "--cpu-bind=verbose,mask_cpu:0xffff0000000000000000000000000000ffff000000000000,"
        "0xffff0000000000000000000000000000ffff0000",
        "--mem-bind=map_mem:3,1",
    )
    alone = binding.bind(2, (), [0, 1, 2, 3])
    assert binding.srun_options(alone) == ("--cpu-bind=verbose,mask_cpu:0x3,0xc", "--mem-bind=local")


def test_wrapper_is_pinned() -> None:
    bindings = binding.bind(2, A100_NEAR[1:3], range(256), threads_of(128))
    rank = "${OMPI_COMM_WORLD_LOCAL_RANK:-${HOROVOD_LOCAL_RANK:-${LOCAL_RANK:-${SLURM_LOCALID:-0}}}}"
    plain = "'taskset --cpu-list 48-63,176-191' 'taskset --cpu-list 16-31,144-159'"
    assert binding.bound(("python", "train.py"), bindings) == (
        "bash", "-c", f'places=({plain}); exec ${{places[{rank}]}} "$@"', "bound", "python", "train.py",
    )  # fmt: skip
    script = binding.bound((), bindings, with_numactl=True)[2]
    assert "'numactl --physcpubind=48-63,176-191 --membind=3'" in script
    assert "--localalloc" in binding.bound((), binding.bind(1, (), [0]), with_numactl=True)[2]


def test_wrapper_binds() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    bindings = binding.bind(2, (), allowed, topology.siblings())
    show = ("python3", "-c", "import os; print(sorted(os.sched_getaffinity(0)))")
    for name in binding.LOCAL_RANKS:
        for rank in (0, 1):
            variables = {"PATH": os.environ["PATH"], name: str(rank)}
            done = subprocess.run(
                binding.bound(show, bindings), env=variables, capture_output=True, text=True, check=True
            )
            assert done.stdout.strip() == str(list(bindings[rank].cpus))


def test_this_machine_is_read() -> None:
    bindings = topology.bindings(1)
    assert set(bindings[0].cpus) <= os.sched_getaffinity(0)
    assert bindings[0].cores >= 1
