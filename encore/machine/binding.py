"""CPU and memory affinity of GPUs, as reported by the kernel, and binding of ranks to cores.

Ranks on the same NUMA node share its cores evenly; a core's hardware threads stay together. Without affinity
information the allowed cores are divided evenly.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from encore.files import text_of
from encore.machine import node

Siblings = Mapping[int, tuple[int, ...]]  # All hardware threads of a CPU's core, by CPU

# Local rank variables of mpirun, horovodrun, torchrun and srun, by precedence
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID")
SYS = Path("/sys")


@dataclass(frozen=True)
class Affinity:
    cpus: tuple[int, ...]  # CPU numbers of the kernel; empty if unknown
    numa: int


@dataclass(frozen=True)
class Binding:
    """CPUs and NUMA node of a local rank."""

    cpus: tuple[int, ...]
    numa: int | None
    cores: int  # Physical cores in ``cpus``; the useful number of threads


# -- lists of CPUs -----------------------------------------------------------------------------------------


def parse_cpus(text: str) -> tuple[int, ...]:
    """Parse ``0-2,8`` into 0, 1, 2, 8; empty if malformed."""
    parts = [re.fullmatch(r"(\d+)-?(\d*)", part.strip()) for part in text.split(",")]
    ranges = (range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part)
    return tuple(sorted({cpu for cpus in ranges for cpu in cpus})) if all(parts) else ()


def format_cpus(cpus: Sequence[int]) -> str:
    """Return 0, 1, 2, 8 as ``0-2,8``, which ``taskset`` and ``numactl`` read."""
    # Consecutive numbers have the same distance from their positions.
    groups = groupby(enumerate(sorted(cpus)), lambda entry: entry[1] - entry[0])
    parts = [[cpu for _, cpu in group] for _, group in groups]
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


# -- binding --------------------------------------------------------------------------------------------


def bind(
    ranks: int, near: Sequence[Affinity], allowed: Sequence[int], siblings: Siblings | None = None
) -> tuple[Binding, ...]:
    """Return the bindings by local rank. Rank i uses GPU i.

    If ``near`` is empty or incomplete, the ``allowed`` cores are divided evenly.
    """
    pools = [tuple(sorted(set(affinity.cpus) & set(allowed))) for affinity in near[:ranks]]
    is_known = len(pools) == ranks and all(pools)
    pools = pools if is_known else [tuple(sorted(set(allowed)))] * ranks
    bindings = []
    for rank, pool in enumerate(pools):
        position, sharers = pools[:rank].count(pool), pools.count(pool)
        cores = sorted(
            {tuple(thread for thread in (siblings or {}).get(cpu, (cpu,)) if thread in pool) for cpu in pool}
        )
        assigned = cores[position * len(cores) // sharers : (position + 1) * len(cores) // sharers]
        if len(cores) < sharers:
            assigned = [cores[position % len(cores)]]
        cpus = tuple(sorted(cpu for core in assigned for cpu in core))
        bindings.append(Binding(cpus, near[rank].numa if is_known else None, len(assigned)))
    return tuple(bindings)


def of_this_machine(ranks: int) -> tuple[Binding, ...]:
    return bind(ranks, near_gpus(node.busses()), sorted(os.sched_getaffinity(0)), siblings())


def near_gpus(busses: Sequence[str], root: Path = SYS) -> tuple[Affinity, ...]:
    """Return ``local_cpulist`` and ``numa_node`` of PCI devices; empty if the firmware does not report them."""
    # The kernel writes a PCI domain with four digits, NVML with eight.
    folders = [root / "bus" / "pci" / "devices" / bus.lower()[-len("0000:07:00.0") :] for bus in busses]
    nodes = [text_of(folder / "numa_node").strip() for folder in folders]
    # -1 if the firmware does not report it, as in most virtual machines.
    if not all(node.isdigit() for node in nodes):
        return ()
    cpus = [parse_cpus(text_of(folder / "local_cpulist")) for folder in folders]
    return tuple(Affinity(local, int(node)) for local, node in zip(cpus, nodes, strict=True))


def siblings(root: Path = SYS) -> Siblings:
    """Return the hardware threads of each CPU's core."""
    threads_by_cpu = {
        int(folder.name[3:]): parse_cpus(text_of(folder / "topology/thread_siblings_list"))
        for folder in (root / "devices" / "system" / "cpu").glob("cpu[0-9]*")
    }
    return {cpu: threads for cpu, threads in threads_by_cpu.items() if threads}


# -- the launchers' options --------------------------------------------------------------------------------


def srun_options(bindings: Sequence[Binding]) -> tuple[str, ...]:
    """Return ``srun`` options for binding tasks identically on all nodes (srun(1), --cpu-bind and --mem-bind).

    Slurm applies the list to each node, so its length is the number of tasks per node. Needs the task/affinity
    plugin.
    """
    masks = ",".join(hex(sum(1 << cpu for cpu in set(binding.cpus))) for binding in bindings)
    nodes = [binding.numa for binding in bindings]
    memory = "local" if None in nodes else "map_mem:" + ",".join(map(str, nodes))
    return (f"--cpu-bind=verbose,mask_cpu:{masks}", f"--mem-bind={memory}")


def wrap_command(command: Sequence[str], bindings: Sequence[Binding], with_numactl: bool = False) -> tuple[str, ...]:
    """Wrap ``command`` in a shell command that binds it to its local rank's cores.

    For launchers that run the same command for all ranks: mpirun, horovodrun, torchrun. ``numactl`` also binds
    memory. Without it the kernel allocates on the node of the first access, which is the same node for memory that
    the rank initializes.
    """
    wrappers = []
    for binding in bindings:
        memory = "--localalloc" if binding.numa is None else f"--membind={binding.numa}"
        cpus = format_cpus(binding.cpus)
        wrappers.append(f"'numactl --physcpubind={cpus} {memory}'" if with_numactl else f"'taskset --cpu-list {cpus}'")
    rank = "0"
    for name in reversed(LOCAL_RANKS):
        rank = f"${{{name}:-{rank}}}"
    return ("bash", "-c", f'places=({" ".join(wrappers)}); exec ${{places[{rank}]}} "$@"', "bound", *command)


def threads(bindings: Sequence[Binding]) -> int:
    return max(1, min(binding.cores for binding in bindings))
