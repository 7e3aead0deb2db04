"""Which cores a rank gets: samples of real machines, odd ones, and the exact options of each launcher."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from encore import paths
from encore.machine import binding, topology
from encore.machine.binding import Binding, Near

SAMPLES = paths.ROOT / "tests" / "samples" / "topology"
A100_NEAR = tuple(
    Near(binding.parse_cpus(f"{16 * numa}-{16 * numa + 15},{16 * numa + 128}-{16 * numa + 143}"), numa)
    for numa in (3, 3, 1, 1, 7, 7, 5, 5)
)


def threads_of(cores: int) -> dict[int, tuple[int, ...]]:
    """Two hardware threads a core, numbered as on DGX-1 and DGX A100: i and i + cores."""
    return {cpu: (cpu % cores, cpu % cores + cores) for cpu in range(2 * cores)}


def read(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


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


def test_nvidia_smi_of_a_dgx1() -> None:
    near = binding.parse_nvidia_smi(read("dgx1.txt"))
    assert near == (Near(binding.parse_cpus("0-19,40-59"), None),) * 8


def test_nvidia_smi_of_a_dgx_a100() -> None:
    assert binding.parse_nvidia_smi(read("dgxa100.txt")) == A100_NEAR[:4]
    assert binding.parse_nvidia_smi(read("tabs_constructed.txt")) == A100_NEAR


@pytest.mark.parametrize("text", ["", "No devices were found", "GPU0 CPU Affinity\nGPU0", "\n\n"])
def test_what_nvidia_smi_does_not_tell_is_not_known(text: str) -> None:
    assert binding.parse_nvidia_smi(text) == ()


def test_hwloc() -> None:
    text = read("hwloc_constructed.xml")
    first = Near((*range(16), *range(36, 40)), 0)
    second = Near((*range(16, 32), *range(32, 36)), 1)
    ids = ["00000000:07:00.0", "00000000:0A:00.0", "00000000:86:00.0", "00000000:89:00.0"]
    assert binding.parse_hwloc(text, ids) == (first, first, second, second)
    assert binding.parse_hwloc(text, ["00000000:FF:00.0"]) == ()
    assert binding.parse_hwloc("<topology", ids) == ()


def test_hwloc_of_this_machine_can_be_read() -> None:
    assert topology.from_hwloc(["ffff:ff:00.0"]) == ()


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
    near = binding.parse_nvidia_smi(read("dgx1.txt"))
    bindings = binding.bind(8, near, range(80), threads_of(40))
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
