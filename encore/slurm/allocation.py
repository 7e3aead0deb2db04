"""The Slurm job that this process runs in, by Slurm's variables (sbatch(1), "OUTPUT ENVIRONMENT VARIABLES")."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from encore.slurm import commands


@dataclass(frozen=True, kw_only=True)
class Allocation:
    job: str  # number of this job; for a task of an array it differs from the array's
    nodes: tuple[str, ...]
    # GPUs that Slurm hands out on each node; None where it does not manage them or none were asked for.
    gpus_per_node: int | None = None
    tasks_per_node: int | None = None  # from --ntasks-per-node
    cores_per_node: int | None = None
    restarts: int = 0  # how often the job was requeued
    array_job: str | None = None
    array_task: int = 0
    # Position of this task in its array, from 0; None where the tasks are not numbered evenly.
    array_index: int | None = 0
    array_count: int = 1
    partition: str = ""
    cluster: str = ""

    @property
    def name(self) -> str:
        """``12`` or, for a task of an array, ``12_3``: what Slurm's commands take."""
        return self.job if self.array_job is None else f"{self.array_job}_{self.array_task}"

    @property
    def is_real(self) -> bool:
        return self.job.isdigit()

    @property
    def folder_mark(self) -> str:
        """End of the run folder's name; all tasks of an array share a folder."""
        return f"job{self.array_job or self.job}"

    def as_json(self) -> dict[str, Any]:
        return {
            "job": self.name,
            "cluster": self.cluster,
            "partition": self.partition,
            "nodes": list(self.nodes),
        }


def current(environment: Mapping[str, str]) -> Allocation | None:
    job, node_list, array = (environment.get(f"SLURM_{each}") for each in ("JOB_ID", "JOB_NODELIST", "ARRAY_JOB_ID"))
    if not job or not node_list:
        return None

    def number(name: str) -> int | None:
        match = re.match(r"\d+", environment.get(f"SLURM_{name}", ""))
        return int(match.group()) if match else None

    task, first, last, step, count = (
        number(f"ARRAY_TASK_{name}") or 0 for name in ("ID", "MIN", "MAX", "STEP", "COUNT")
    )
    return Allocation(
        job=job,
        nodes=expand(node_list),
        gpus_per_node=number("GPUS_ON_NODE"),
        tasks_per_node=number("NTASKS_PER_NODE"),
        # A shell of salloc is on no node: it has the list for all nodes, such as 64(x4).
        cores_per_node=number("CPUS_ON_NODE") or number("JOB_CPUS_PER_NODE"),
        restarts=number("RESTART_COUNT") or 0,
        array_job=array,
        array_task=task,
        array_index=_array_index(task, first, last, step, count) if array else 0,
        array_count=count or 1,
        partition=environment.get("SLURM_JOB_PARTITION", ""),
        cluster=environment.get("SLURM_CLUSTER_NAME", ""),
    )


def _array_index(task: int, first: int, last: int, step: int, count: int) -> int | None:
    # The position of the task in an array of equal steps, such as 0-9 or 1-9:2; None in any other.
    index, rest = divmod(task - first, max(step, 1))
    return None if rest or (last - first) // max(step, 1) + 1 != count else index


def expand(node_list: str) -> tuple[str, ...]:
    """Expand ``n[1-2]`` to ``n1``, ``n2``; by scontrol, which knows every form."""
    if not re.search(r"[\[,]", node_list):
        return (node_list,)
    return tuple(commands.call("scontrol", "show", "hostnames", node_list).split())
