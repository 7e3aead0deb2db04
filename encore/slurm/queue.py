"""Jobs: the one that this process runs in, those that squeue and sacct report, and how one goes back into the queue."""

import contextlib
import functools
import os
import pwd
import re
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from encore.errors import EncoreError
from encore.slurm import commands

NAME = "encore"  # what slurm/run.sub calls its jobs; ``encore submit`` adds the benchmark: ``encore-resnet``

COMMENT = "encore:"  # begins the comment of Encore's jobs; their results folder follows
RESUMES = "|"  # comes after it where the job resumes a run; the name of its folder follows
SEPARATOR = "\x1f"  # unit separator: the fields before the job's name, which is free text, never hold it
# The fields of a Job by their letters in squeue(1); the job's name is the last.
FIELDS = {
    "%i": "name", "%A": "number", "%T": "state", "%D": "nodes", "%M": "seconds", "%V": "submitted", "%u": "user",
    "%P": "partition", "%r": "reason", "%k": "comment", "%j": "title",
}  # fmt: skip
# The same by sacct(1).
ACCOUNTED = "JobID,JobIDRaw,State,NNodes,Elapsed,Submit,User,Partition,Reason,Comment,JobName"
# squeue draws the waiting tasks of an array together without --array.
SQUEUE = ("squeue", "--noheader", "--array", "--states=all", f"--format={SEPARATOR.join(FIELDS)}")
ACCOUNTED_SINCE = "now-7days"

# States that a job does not leave (squeue(1), "JOB STATE CODES").
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "REVOKED", "TIMEOUT",
)  # fmt: skip
WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")


class SlurmJob(TypedDict):
    job: str
    cluster: str  # Slurm's name of it
    partition: str
    nodes: list[str]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The job that this process runs in, by Slurm's variables (sbatch(1), "OUTPUT ENVIRONMENT VARIABLES")."""

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

    def as_json(self) -> SlurmJob:
        return {
            "job": self.name,
            "cluster": self.cluster,
            "partition": self.partition,
            "nodes": list(self.nodes),
        }


# The nodes of this job that a run does without: what failed the gate (encore/run/gate.py).
LEFT_OUT = "ENCORE_LEFT_OUT"


def left_out(environment: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(filter(None, environment.get(LEFT_OUT, "").split(",")))


def this_allocation(environment: Mapping[str, str]) -> Allocation | None:
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
        nodes=tuple(name for name in expand(node_list) if name not in left_out(environment)),
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
    """A job, or a task of an array, as squeue and sacct report it."""

    name: str  # ``12``, or ``12_3`` for a task
    number: str  # Slurm's own number, by which a task of an array has one too
    state: str  # in Slurm's words, such as PENDING
    nodes: int
    seconds: float  # time that it has run
    submitted: str  # local time as ISO 8601; after a requeue the time of the requeue
    user: str
    reason: str
    title: str  # what sbatch --job-name calls it
    partition: str = ""
    comment: str = ""

    @property
    def results(self) -> Path | None:
        """Folder in which it makes its run folder, by the comment that Encore gives its jobs; None: not known."""
        path = self.comment[len(COMMENT) :].partition(RESUMES)[0]
        return Path(path) if self.comment.startswith(COMMENT) else None

    @property
    def resumes(self) -> Path | None:
        """Run folder that it resumes; None: it makes one."""
        name = self.comment.partition(RESUMES)[2].partition(RESUMES)[0]
        return self.results / name if self.results is not None and name else None

    @property
    def array(self) -> str:
        """``12`` for the task ``12_3``, and for the job ``12`` itself."""
        return self.name.partition("_")[0]

    @property
    def task(self) -> int | None:
        number = self.name.partition("_")[2]
        return int(number) if number.isdigit() else None

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def is_encores(self) -> bool:
        return self.title == NAME or self.title.startswith(f"{NAME}-")

    @property
    def submitted_at(self) -> float:
        """The same in Unix seconds; 0 if Slurm does not report it."""
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(self.submitted).timestamp()
        return 0.0


def is_there() -> bool:
    return shutil.which("squeue") is not None


def this_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


@functools.cache
def this_cluster() -> str:
    """Return Slurm's name of the cluster that answers here; empty where none does."""
    named = os.environ.get("SLURM_CLUSTER_NAME", "")
    return commands.setting("ClusterName") if not named and is_there() else named


def called(job: str, cluster: str) -> str:
    return f"job {job} of cluster {cluster}" if cluster else f"job {job}"


def everyone() -> list[Job]:
    """Return jobs of all users that wait, run, or ended some minutes ago; none where there is no Slurm."""
    return parse(commands.call(*SQUEUE)) if is_there() else []


def asked(name: str, cluster: str) -> list[Job] | None:
    """Return the job or tasks of this name on this cluster; None where its controller cannot be asked from here.

    Raises:
        EncoreError: this cluster's own controller does not answer.
    """
    if not is_there():
        return None
    if not cluster or cluster == this_cluster():
        return numbered(name)
    with contextlib.suppress(EncoreError):  # needs Slurm's database (squeue(1), --clusters)
        return numbered(name, f"--clusters={cluster}")
    return None


def numbered(name: str, *where: str) -> list[Job]:
    """Return the job or tasks called ``12`` or ``12_3``, whoever's they are; none if the controller knows none."""
    if not is_there():
        return []
    number = name.partition("_")[0]
    try:
        found = parse(commands.call(*SQUEUE, f"--jobs={number}", *where))
    except EncoreError as error:
        if "Invalid job id" in error.found:
            return []
        raise
    return [job for job in found if name in (job.name, job.number, job.array)]


def accounted() -> list[Job]:
    """Return jobs of this user that accounting has seen end in the last days; none where it is off."""
    if shutil.which("sacct") is None:
        return []
    options = ("--noheader", "--parsable2", "--allocations", f"--starttime={ACCOUNTED_SINCE}", f"--user={this_user()}")
    columns = (f"--delimiter={SEPARATOR}", f"--format={ACCOUNTED}")
    try:
        text = commands.call("sacct", *options, *columns)
    except EncoreError:
        return []
    return [job for job in parse(text) if job.has_ended]


def parse(text: str) -> list[Job]:
    rows = (line.split(SEPARATOR, len(FIELDS) - 1) for line in text.split("\n"))
    jobs = []
    for row in rows:
        if len(row) == len(FIELDS) and re.match(r"\d", row[0]):
            plain = ("" if each.strip() in ("None", "(null)") else each.strip() for each in row)
            fields: dict[str, Any] = dict(zip(FIELDS.values(), plain, strict=True))
            # sacct prints "CANCELLED by 1000".
            fields["state"] = fields["state"].partition(" ")[0]
            fields["nodes"] = int(fields["nodes"]) if fields["nodes"].isdigit() else 0
            fields["seconds"] = commands.seconds_of(fields["seconds"]) or 0.0
            jobs.append(Job(**fields))
    return jobs


WARNING = signal.SIGUSR1  # what slurm/run.sub lets Slurm send before the time limit (sbatch --signal)


def is_requeued(allocation: Allocation) -> bool:
    """Return whether Slurm has put the job back by itself: preempted, after the loss of a node, or by an operator.

    It counts the restart before it ends the processes (slurmctld, _job_requeue).
    """
    restarts = commands.show_job(allocation.job).get("Restarts", "")
    return restarts.isdigit() and int(restarts) > allocation.restarts


def requeue(allocation: Allocation, most: int) -> tuple[bool, str]:
    """Requeue the job; return whether it resumes by itself, and the outcome as a message."""
    if is_requeued(allocation):
        return True, f"Slurm has put job {allocation.name} back in the queue; it resumes when it starts again"
    if allocation.restarts >= most:
        return False, f"requeued {allocation.restarts} times already"
    try:
        commands.call("scontrol", "requeue", allocation.job)
    except EncoreError as error:
        # Slurm ends the job's processes, scontrol among them, which may not live to say that it was done.
        if not is_requeued(allocation):
            return False, f"not requeued, {error.found}"
    return True, f"job {allocation.name} is back in the queue and resumes when it starts again"
