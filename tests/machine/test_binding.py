"""Which cores a rank gets: samples of real machines, odd ones, and the exact options of each launcher."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from encore.machine import binding
from encore.machine.binding import Near

# What `nvidia-smi topo -m` prints of a DGX A100 by NVIDIA/nccl issue 1505, its other four GPUs after the same pattern.
NODES = {numa: f"{16 * numa}-{16 * numa + 15},{16 * numa + 128}-{16 * numa + 143}" for numa in (1, 3, 5, 7)}
A100_NEAR = tuple(Near(binding.parse_cpus(NODES[numa]), numa) for numa in (3, 3, 1, 1, 7, 7, 5, 5))
# A DGX-1 of which a program was allowed one socket (benchmarks/distributed/ddp/README.md of pytorch/pytorch)
SOCKET = (Near(binding.parse_cpus("0-19,40-59"), 0),) * 8
UNKNOWN = (Near((), 0), Near((), 0))


def threads_of(cores: int) -> dict[int, tuple[int, ...]]:
    # Two hardware threads a core, numbered as on DGX-1 and DGX A100: i and i + cores
    return {cpu: (cpu % cores, cpu % cores + cores) for cpu in range(2 * cores)}


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-2,8", (0, 1, 2, 8)), ("7", (7,)), ("", ()), ("N/A", ()), ("0-", (0,)), ("3-1", ())],
)
def test_lists_of_cpus(text: str, cpus: tuple[int, ...]) -> None:
    assert binding.parse_cpus(text) == cpus
    assert binding.parse_cpus(binding.format_cpus(cpus)) == cpus


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
        (UNKNOWN, range(4, 8), 4, ["4-5 None 2", "6-7 None 2"]),
        # Only what is allowed is given out; where nothing near is allowed, all that is allowed is divided.
        (A100_NEAR, [48, 49, 176], 128, ["48,176 3 1", "49 3 1"]),
        (A100_NEAR, [0, 1], None, ["0 None 1", "1 None 1"]),
        ((), [0, 1], None, ["0 None 1", "1 None 1", "0 None 1"]),
    ],
)
def test_ranks_share_what_is_near_their_gpus(
    near: tuple[Near, ...], allowed: Sequence[int], cores: int | None, expected: list[str]
) -> None:
    found = binding.bind(len(expected), near, allowed, threads_of(cores) if cores else None)
    assert [f"{binding.format_cpus(each.cpus)} {each.numa} {each.cores}" for each in found] == expected
    assert binding.threads(found) == min(int(text.split()[2]) for text in expected)


@pytest.mark.parametrize(
    ("chosen", "numas"),
    [(None, [3, 3, 1, 1, 7, 7, 5, 5]), ("2,0", [1, 3]), ("GPU-1234", []), ("8", []), ("7", [5]), ("", [])],
)
def test_chosen_gpus_keep_their_order(chosen: str | None, numas: list[int]) -> None:
    assert [each.numa for each in binding.visible(A100_NEAR, chosen)] == numas


def test_the_kernel_reports_what_is_near_a_gpu(tmp_path: Path) -> None:
    files = {
        "bus/pci/devices/0000:07:00.0/numa_node": "3\n", "bus/pci/devices/0000:07:00.0/local_cpulist": NODES[3],
        "bus/pci/devices/0000:0f:00.0/numa_node": "-1\n",
        "devices/system/cpu/cpu1/topology/thread_siblings_list": "1,3\n", "devices/system/cpu/cpufreq/policy": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    assert binding.near_gpus(["00000000:07:00.0"], tmp_path) == A100_NEAR[:1]
    assert binding.near_gpus(["00000000:07:00.0", "0000FFFF:0F:00.0"][1:], tmp_path) == ()
    assert binding.siblings(tmp_path) == {1: (1, 3)}


def test_options_of_the_launchers_are_pinned() -> None:
    near, alone = binding.bind(2, A100_NEAR[1:3], range(256), threads_of(128)), binding.bind(2, (), range(4))
    assert binding.srun_options(near) == (
        "--cpu-bind=verbose,mask_cpu:0xffff0000000000000000000000000000ffff000000000000,"
        "0xffff0000000000000000000000000000ffff0000",
        "--mem-bind=map_mem:3,1",
    )
    assert binding.srun_options(alone) == ("--cpu-bind=verbose,mask_cpu:0x3,0xc", "--mem-bind=local")
    rank = "${places[${OMPI_COMM_WORLD_LOCAL_RANK:-${HOROVOD_LOCAL_RANK:-${LOCAL_RANK:-${SLURM_LOCALID:-0}}}}]}"
    plain = f"places=('taskset --cpu-list 48-63,176-191' 'taskset --cpu-list 16-31,144-159'); exec {rank} \"$@\""
    assert binding.bound(("python", "train.py"), near) == ("bash", "-c", plain, "bound", "python", "train.py")
    memory = [binding.bound((), each, with_numactl=True)[2].partition(";")[0] for each in (near, alone)]
    assert memory == [
        "places=('numactl --physcpubind=48-63,176-191 --membind=3' 'numactl --physcpubind=16-31,144-159 --membind=1')",
        "places=('numactl --physcpubind=0-1 --localalloc' 'numactl --physcpubind=2-3 --localalloc')",
    ]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", binding.LOCAL_RANKS)
def test_wrapper_binds_on_this_machine(name: str, rank: int) -> None:
    bindings = binding.of_this_machine(2)
    show = ("python3", "-c", "import os; print(sorted(os.sched_getaffinity(0)))")
    variables = {"PATH": os.environ["PATH"], name: str(rank)}
    done = subprocess.run(binding.bound(show, bindings), env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(list(bindings[rank].cpus))
