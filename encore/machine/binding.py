"""Cores and memory near each GPU, and how ranks are bound to them; :mod:`encore.machine.topology` reads this machine.

Ranks that share a NUMA node share its cores evenly, each with both hardware threads of a core. Where nothing
is known about the GPUs, the allowed cores are divided evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Siblings = Mapping[int, tuple[int, ...]]
"""For each CPU (hardware thread) all CPUs of its core, itself among them."""

LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID")
"""Where mpirun, horovodrun, torchrun and srun give a rank its number on the node, in this order."""


@dataclass(frozen=True)
class Near:
    """What is near a GPU."""

    cpus: tuple[int, ...]
    """CPUs as the kernel numbers them; empty: not known."""
    numa: int | None
    """NUMA node; None: not known."""


@dataclass(frozen=True)
class Binding:
    """CPUs and NUMA node of one local rank."""

    cpus: tuple[int, ...]
    numa: int | None
    cores: int
    """Physical cores among ``cpus``: as many threads find work at once."""


# -- lists of CPUs -----------------------------------------------------------------------------------------


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return ``0-2,8`` as 0, 1, 2, 8; empty for anything that is no such list."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            return ()
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def format_cpus(cpus: Sequence[int]) -> str:
    """Return 0, 1, 2, 8 as ``0-2,8``, which ``taskset`` and ``numactl`` read."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)


def mask(cpus: Sequence[int]) -> str:
    """Return 0, 1, 2, 8 as ``0x107``, which ``srun --cpu-bind=mask_cpu`` reads."""
    return hex(sum(1 << cpu for cpu in set(cpus)))


# -- who gets what -----------------------------------------------------------------------------------------


def bind(
    ranks: int, near: Sequence[Near], allowed: Sequence[int], siblings: Siblings | None = None
) -> tuple[Binding, ...]:
    """Return the binding of each local rank, whose GPU is the one of its number.

    ``near`` may be empty or unknown: then the cores that are ``allowed`` are divided evenly.
    """
    shares = siblings or {}
    whole = tuple(sorted(set(allowed)))
    known = len(near) >= ranks and all(set(each.cpus) & set(whole) for each in near[:ranks])
    pools = [tuple(sorted(set(each.cpus) & set(whole))) for each in near[:ranks]] if known else [whole] * ranks
    bindings = []
    for rank, pool in enumerate(pools):
        sharing = [other for other, theirs in enumerate(pools) if theirs == pool]
        cores = _cores(pool, shares)
        mine = _share(cores, sharing.index(rank), len(sharing))
        cpus = tuple(sorted(cpu for core in mine for cpu in core))
        bindings.append(Binding(cpus, near[rank].numa if known else None, len(mine)))
    return tuple(bindings)


def _cores(cpus: tuple[int, ...], siblings: Siblings) -> list[tuple[int, ...]]:
    """Return the CPUs gathered into cores, in order of each core's first CPU."""
    gathered = {tuple(each for each in siblings.get(cpu, (cpu,)) if each in cpus) for cpu in cpus}
    return sorted(gathered)


def _share(cores: list[tuple[int, ...]], place: int, among: int) -> list[tuple[int, ...]]:
    """Return an even part of the cores; with fewer cores than ranks, ranks share one."""
    if len(cores) < among:
        return [cores[place % len(cores)]]
    return cores[place * len(cores) // among : (place + 1) * len(cores) // among]


# -- the launchers' options --------------------------------------------------------------------------------


def srun_options(bindings: Sequence[Binding]) -> tuple[str, ...]:
    """Return ``srun`` options that bind the tasks of every node alike (srun(1), --cpu-bind and --mem-bind).

    Slurm goes over the list again on each node, so it is as long as one node has tasks. It needs the
    task/affinity plugin.
    """
    cpus = ",".join(mask(binding.cpus) for binding in bindings)
    nodes = [binding.numa for binding in bindings]
    memory = "local" if None in nodes else "map_mem:" + ",".join(map(str, nodes))
    return (f"--cpu-bind=verbose,mask_cpu:{cpus}", f"--mem-bind={memory}")


def bound(command: Sequence[str], bindings: Sequence[Binding], with_numactl: bool = False) -> tuple[str, ...]:
    """Return ``command`` behind a line of shell that binds it to the cores of its local rank.

    For launchers that start the same command for every rank: mpirun, horovodrun, torchrun. ``numactl`` binds
    the memory as well; without it the kernel gives memory of the node that asks first, which is the same one
    for all that the rank touches itself.
    """
    places = " ".join(_binder(binding, with_numactl) for binding in bindings)
    rank = "0"
    for name in reversed(LOCAL_RANKS):
        rank = f"${{{name}:-{rank}}}"
    script = f'places=({places}); exec ${{places[{rank}]}} "$@"'
    return ("bash", "-c", script, "bound", *command)


def _binder(binding: Binding, with_numactl: bool) -> str:
    cpus = format_cpus(binding.cpus)
    if not with_numactl:
        return f"'taskset --cpu-list {cpus}'"
    memory = "--localalloc" if binding.numa is None else f"--membind={binding.numa}"
    return f"'numactl --physcpubind={cpus} {memory}'"


def threads(bindings: Sequence[Binding]) -> int:
    """Return OMP_NUM_THREADS that suits every rank: one thread a core."""
    return max(1, min(binding.cores for binding in bindings))
