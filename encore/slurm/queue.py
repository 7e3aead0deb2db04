"""Slurm jobs: the current allocation, the jobs in squeue and sacct, and requeueing."""

import contextlib
import functools
import os
import re
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from encore import files
from encore.errors import EncoreError
from encore.slurm import commands

NAME = "encore"  # Job name in slurm/run.sub; ``encore submit`` appends the benchmark: ``encore-resnet``

COMMENT = "encore:"  # Prefix of the job comment; the results folder follows
RESUMES = "|"  # Separates the results folder from the name of the resumed run folder
SEPARATOR = "\x1f"  # Unit separator: cannot occur in the fields before the job name, which is free text
# Job fields by format letter in squeue(1); the job name is last.
FIELDS = {
    "%i": "name", "%A": "number", "%T": "state", "%D": "nodes", "%M": "seconds", "%V": "submitted", "%u": "user",
    "%P": "partition", "%r": "reason", "%k": "comment", "%j": "title",
}  # fmt: skip
# The same by sacct(1).
SACCT_FORMAT = "JobID,JobIDRaw,State,NNodes,Elapsed,Submit,User,Partition,Reason,Comment,JobName"
# Without --array, squeue combines an array's pending tasks.
SQUEUE = ("squeue", "--noheader", "--array", "--states=all", f"--format={SEPARATOR.join(FIELDS)}")

# States that a job does not leave (squeue(1), "JOB STATE CODES").
FINISHED_STATES = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "REVOKED", "TIMEOUT",
)  # fmt: skip
WAITING_STATES = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")


class SlurmJob(TypedDict):
    job: str
    cluster: str  # Slurm's name of it
    partition: str
    nodes: list[str]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The job that this process runs in, by Slurm's variables (sbatch(1), "OUTPUT ENVIRONMENT VARIABLES")."""

    job: str  # Job number; in an array different from the number of the array
    nodes: tuple[str, ...]
    # GPUs per node in the allocation; None if Slurm does not manage them or none were requested.
    gpus_per_node: int | None = None
    tasks_per_node: int | None = None  # from --ntasks-per-node
    cores_per_node: int | None = None
    restarts: int = 0  # how often the job was requeued
    array_job: str | None = None
    array_task: int = 0
    # Position of this task in the array, from 0; None if the task numbers are not evenly spaced.
    array_index: int | None = 0
    array_count: int = 1
    partition: str = ""
    cluster: str = ""

    @property
    def name(self) -> str:
        """``12``, or ``12_3`` for an array task, as accepted by Slurm commands."""
        return self.job if self.array_job is None else f"{self.array_job}_{self.array_task}"

    @property
    def is_real(self) -> bool:
        return self.job.isdigit()

    @property
    def folder_mark(self) -> str:
        """Suffix of the run folder; all tasks of an array share a folder."""
        return f"job{self.array_job or self.job}"

    def as_json(self) -> SlurmJob:
        return {
            "job": self.name,
            "cluster": self.cluster,
            "partition": self.partition,
            "nodes": list(self.nodes),
        }


# Nodes of this job that failed the gate (encore/run/gate.py) and are not used by the run.
EXCLUDED_NODES = "ENCORE_LEFT_OUT"


def excluded_nodes(environment: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(filter(None, environment.get(EXCLUDED_NODES, "").split(",")))


def this_allocation(environment: Mapping[str, str]) -> Allocation | None:
    job, node_list, array = (
        environment.get(f"SLURM_{variable}") for variable in ("JOB_ID", "JOB_NODELIST", "ARRAY_JOB_ID")
    )
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
        nodes=tuple(name for name in expand(node_list) if name not in excluded_nodes(environment)),
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


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job or array task in squeue or sacct."""

    name: str  # ``12``, or ``12_3`` for a task
    number: str  # Slurm's job number, unique for array tasks, too
    state: str  # Slurm's job state, such as PENDING
    nodes: int
    seconds: float  # time that it has run
    submitted: str  # local time as ISO 8601; after a requeue the time of the requeue
    user: str
    reason: str
    title: str  # Job name (sbatch --job-name)
    partition: str = ""
    comment: str = ""

    @property
    def results(self) -> Path | None:
        """Results folder from Encore's job comment; None if unknown."""
        path = self.comment[len(COMMENT) :].partition(RESUMES)[0]
        return Path(path) if self.comment.startswith(COMMENT) else None

    @property
    def resumes(self) -> Path | None:
        """Run folder that it resumes; None: it makes one."""
        name = self.comment.partition(RESUMES)[2].partition(RESUMES)[0]
        return self.results / name if self.results is not None and name else None

    @property
    def array(self) -> str:
        """Array job number: ``12`` for the task ``12_3`` and for the job ``12``."""
        return self.name.partition("_")[0]

    @property
    def task(self) -> int | None:
        number = self.name.partition("_")[2]
        return int(number) if number.isdigit() else None

    @property
    def is_finished(self) -> bool:
        return self.state in FINISHED_STATES

    @property
    def is_pending(self) -> bool:
        return self.state in WAITING_STATES

    @property
    def is_encore_job(self) -> bool:
        return self.title == NAME or self.title.startswith(f"{NAME}-")

    @property
    def submitted_at(self) -> float:
        """The same in Unix seconds; 0 if Slurm does not report it."""
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(self.submitted).timestamp()
        return 0.0


def is_available() -> bool:
    return shutil.which("squeue") is not None


def this_user() -> str:
    return files.user_name(os.getuid())


@functools.cache
def this_cluster() -> str:
    """Return Slurm's name of the cluster that answers here; empty where none does."""
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
    return commands.setting("ClusterName") if not cluster and is_available() else cluster


def job_label(job: str, cluster: str) -> str:
    return f"job {job} of cluster {cluster}" if cluster else f"job {job}"


def all_jobs() -> list[Job]:
    """Return the pending, running and recently finished jobs of all users; empty without Slurm."""
    return parse(commands.call(*SQUEUE)) if is_available() else []


def query(name: str, cluster: str) -> list[Job] | None:
    """Return the job or array tasks with this name; None if the cluster cannot be queried from this machine.

    Raises:
        EncoreError: the controller of this cluster does not answer.
    """
    if not is_available():
        return None
    if not cluster or cluster == this_cluster():
        return find_jobs(name)
    with contextlib.suppress(EncoreError):  # needs Slurm's database (squeue(1), --clusters)
        return find_jobs(name, f"--clusters={cluster}")
    return None


def find_jobs(name: str, *options: str) -> list[Job]:
    """Return the job or tasks called ``12`` or ``12_3``, whoever's they are; none if the controller knows none."""
    if not is_available():
        return []
    number = name.partition("_")[0]
    try:
        jobs = parse(commands.call(*SQUEUE, f"--jobs={number}", *options))
    except EncoreError as error:
        if "Invalid job id" in error.found:
            return []
        raise
    return [job for job in jobs if name in (job.name, job.number, job.array)]


def finished_jobs() -> list[Job]:
    """Return jobs of this user that accounting has seen end in the last days; none where it is off."""
    if shutil.which("sacct") is None:
        return []
    options = ("--noheader", "--parsable2", "--allocations", "--starttime=now-7days", f"--user={this_user()}")
    columns = (f"--delimiter={SEPARATOR}", f"--format={SACCT_FORMAT}")
    try:
        text = commands.call("sacct", *options, *columns)
    except EncoreError:
        return []
    return [job for job in parse(text) if job.is_finished]


def parse(text: str) -> list[Job]:
    rows = (line.split(SEPARATOR, len(FIELDS) - 1) for line in text.split("\n"))
    jobs = []
    for row in rows:
        if len(row) == len(FIELDS) and re.match(r"\d", row[0]):
            plain = ("" if cell.strip() in ("None", "(null)") else cell.strip() for cell in row)
            fields: dict[str, Any] = dict(zip(FIELDS.values(), plain, strict=True))
            # sacct prints "CANCELLED by 1000".
            fields["state"] = fields["state"].partition(" ")[0]
            fields["nodes"] = int(fields["nodes"]) if fields["nodes"].isdigit() else 0
            fields["seconds"] = commands.parse_seconds(fields["seconds"]) or 0.0
            jobs.append(Job(**fields))
    return jobs


WARNING = signal.SIGUSR1  # Signal sent before the time limit (sbatch --signal in slurm/run.sub)


def is_requeued(allocation: Allocation) -> bool:
    """Whether Slurm has requeued the job, after preemption, node failure or by an operator.

    Slurm increments the restart count before it kills the processes (slurmctld, _job_requeue).
    """
    restarts = commands.show_job(allocation.job).get("Restarts", "")
    return restarts.isdigit() and int(restarts) > allocation.restarts


def requeue(allocation: Allocation, max_requeues: int) -> tuple[bool, str]:
    """Requeue the job. Return whether it will resume automatically, and a message."""
    if is_requeued(allocation):
        return True, f"Slurm has requeued job {allocation.name}; it resumes automatically"
    if allocation.restarts >= max_requeues:
        return False, f"requeued {allocation.restarts} times already"
    try:
        commands.call("scontrol", "requeue", allocation.job)
    except EncoreError as error:
        # Slurm kills the processes of the job, including scontrol, possibly before scontrol reports success.
        if not is_requeued(allocation):
            return False, f"not requeued, {error.found}"
    return True, f"job {allocation.name} is requeued and resumes automatically"
