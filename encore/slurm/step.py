"""The srun line that starts the ranks of one experiment, one task a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from encore.launchers import HOROVOD_BY_MPI, Launch, by_horovod
from encore.slurm import placement
from encore.slurm.allocation import Allocation

RANK_VARIABLES = (
    "PMIX_BFROP_BUFFER_TYPE", "PMIX_DSTORE_21_BASE_PATH", "PMIX_DSTORE_ESH_BASE_PATH", "PMIX_GDS_MODULE",
    "PMIX_HOSTNAME", "PMIX_NAMESPACE", "PMIX_RANK", "PMIX_SECURITY_MODE", "PMIX_SERVER_TMPDIR",
    "PMIX_SERVER_URI2", "PMIX_SERVER_URI21", "PMIX_SERVER_URI3", "PMIX_SERVER_URI4", "PMIX_SERVER_URI41",
    "PMIX_SYSTEM_TMPDIR", "PMIX_VERSION",
    "SLURM_JOB_ID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
)  # fmt: skip
"""What Slurm gives each rank about itself and PMIx; a container gets these by name from its own task."""

FIRST_PORT = 20000
PORTS = 10000


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the srun line depends on, in addition to the allocation."""

    framework: str
    nodes: int
    ranks_per_node: int
    logs: str
    """Folder of the ranks' output: rank.0/stdout, rank.0/stderr, ..."""
    mpi: str = "pmix"
    binding: tuple[str, ...] = placement.UNBOUND
    network: Mapping[str, str] = field(default_factory=dict)
    """Which interface NCCL, Gloo and UCX take."""
    folders: tuple[str, ...] = ()
    """Slurm's own folders, by which a rank in a container reaches PMIx."""


def launch(step: Step, allocation: Allocation, caller: Mapping[str, str]) -> Launch:
    """Return a launch by srun: over PMIx for Horovod, with a rendezvous by environment for torch.distributed.

    Of ``caller``, the batch job's environment, only Slurm's own variables reach srun and so the ranks.
    """
    horovod = by_horovod(step.framework)
    ranks = step.nodes * step.ranks_per_node
    crowded = allocation.cores_per_node is not None and step.ranks_per_node > allocation.cores_per_node
    command = (
        "srun",
        f"--nodes={step.nodes}",
        f"--ntasks={ranks}",
        f"--ntasks-per-node={step.ranks_per_node}",
        f"--mpi={step.mpi if horovod else 'none'}",
        "--distribution=block",
        "--export=ALL",
        "--kill-on-bad-exit=1",
        "--input=none",
        "--open-mode=truncate",
        f"--output={step.logs}/rank.%t/stdout",
        f"--error={step.logs}/rank.%t/stderr",
        *(["--overcommit"] if crowded else []),
        *step.binding,
    )
    passed = {name: value for name, value in caller.items() if name.startswith("SLURM_")}
    meeting = HOROVOD_BY_MPI if horovod else _rendezvous(allocation)
    return Launch(
        "srun",
        outer=command,
        environment={**passed, **step.network, **meeting},
        everywhere=once_a_node(step.nodes),
        passed=RANK_VARIABLES,
        cores=allocation.cores_per_node,
        folders=step.folders if horovod else (),
    )


def once_a_node(nodes: int) -> tuple[str, ...]:
    """Return the srun line of a short step next to the ranks, one process on each node."""
    size = (f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--mpi=none", "--input=none")
    return ("srun", *size, "--overlap", "--export=ALL", "--cpu-bind=none", "--quiet")


def spool_folder() -> str:
    """Return the folder below which PMIx meets its clients on every node: SlurmdSpoolDir up to its %n or %h."""
    spool = placement.setting("SlurmdSpoolDir") or "/var/spool/slurmd"
    return spool if "%" not in spool else str(Path(spool.partition("%")[0] + "x").parent)


def _rendezvous(allocation: Allocation) -> dict[str, str]:
    """Return where torch.distributed's ranks meet: rank 0's node, on a port that no other job of the node chose."""
    port = FIRST_PORT + (int(allocation.job) if allocation.is_real else 0) % PORTS
    address = placement.address(allocation.nodes[0]) if allocation.is_real else allocation.nodes[0]
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
