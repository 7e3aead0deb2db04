"""The batch script of a submission: Slurm's options first, then the same slurm/run.sub that works by itself."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from encore import __version__, paths
from encore.slurm.cluster import Cluster
from encore.slurm.queue import COMMENT, RESUMES

WARNING_SECONDS = 120
"""Before the time limit: enough for a checkpoint on a slow file system."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What is asked of sbatch."""

    name: str
    """The benchmark, such as resnet."""
    nodes: int
    gpus_per_node: int
    """0 for ranks on the CPU."""
    minutes: int | None
    """Time limit; None: the partition's own."""
    results: Path
    arguments: tuple[str, ...]
    """Of ``encore run``, without the benchmark's name."""
    array: tuple[int, ...] = ()
    """Numbers of the tasks of an array, one run each, in order."""
    at_once: int | None = None
    """Most tasks that run at the same time; None: no limit."""
    reservation: str = ""
    dependency: str = ""
    mail: str = ""
    suffix: str = ""
    """The site's part of the job's name."""
    comment: str = ""
    """The site's part of the job's comment."""
    more: tuple[str, ...] = ()
    """Further options of sbatch."""
    resumes: str = ""
    """Name of the run folder that is resumed; empty: the job makes one."""


def options(submission: Submission, cluster: Cluster) -> list[str]:
    """Return options of sbatch in the order in which the script lists them; what comes later wins."""
    log = "slurm-%A_%a.out" if submission.array else "slurm-%j.out"
    given = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "reservation": submission.reservation,
        "dependency": submission.dependency,
        "mail-user": submission.mail,
        "mail-type": "END,FAIL,REQUEUE" if submission.mail else "",
        "array": _tasks(submission.array) + (f"%{submission.at_once}" if submission.at_once else ""),
        "time": clock(submission.minutes) if submission.minutes else "",
        **gpus(submission.gpus_per_node, cluster),
    }
    return [
        f"--job-name=encore-{submission.name}" + (f"-{submission.suffix}" if submission.suffix else ""),
        f"--nodes={submission.nodes}",
        *(f"--{name}={value}" for name, value in given.items() if value),
        f"--output={submission.results}/{log}",
        f"--comment={_comment(submission)}",
        "--exclusive",
        "--requeue",
        "--open-mode=append",
        f"--signal=B:USR1@{WARNING_SECONDS}",
        *cluster.sbatch,
        *submission.more,
    ]


def _comment(submission: Submission) -> str:
    """Return ``encore:RESULTS|RUN|SITE``, without what is empty at its end."""
    parts = (f"{COMMENT}{submission.results}", submission.resumes, submission.comment)
    return RESUMES.join(parts).rstrip(RESUMES)


def _tasks(numbers: Sequence[int]) -> str:
    """Return ``0-4``, or ``1,3,4`` for tasks that are not the first ones."""
    if len(numbers) > 1 and tuple(numbers) == tuple(range(len(numbers))):
        return f"0-{numbers[-1]}"
    return ",".join(map(str, numbers))


def gpus(count: int, cluster: Cluster) -> dict[str, str]:
    """Return the option by which so many GPUs of a node are asked for; none where Slurm does not manage them."""
    if not count or cluster.gpu_option == "none":
        return {}
    typed = f"{cluster.gpu_type}:{count}" if cluster.gpu_type else str(count)
    return {"gres": f"gpu:{typed}"} if cluster.gpu_option == "gres" else {"gpus-per-node": typed}


def clock(minutes: int) -> str:
    """Return Slurm's ``hours:minutes:seconds``."""
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def render(submission: Submission, cluster: Cluster) -> str:
    """Return the script; a pure function, so that a dry run shows it on a machine without Slurm."""
    header = [f"#SBATCH {_in_comment(option)}" for option in options(submission, cluster)]
    name = [] if submission.resumes else [submission.name]
    command = [str(paths.ROOT / "slurm" / "run.sub"), *name, *submission.arguments]
    lines = [
        "#!/usr/bin/env bash",
        f"# Made by Encore {__version__}: encore submit {submission.name} --nodes {submission.nodes} ...",
        *header,
        "set -euo pipefail",
        f"export ENCORE_ROOT={shlex.quote(str(paths.ROOT))}",
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def _in_comment(option: str) -> str:
    """Return an option as a #SBATCH line takes it: quoted where it has a blank (sbatch reads double quotes)."""
    return f'"{option}"' if " " in option else option


def with_cluster(arguments: Sequence[str], cluster_file: Path | None) -> tuple[str, ...]:
    """Return the arguments of ``encore run`` in the job, which reads the same cluster file."""
    return (*arguments, *(("--cluster", str(cluster_file.absolute())) if cluster_file is not None else ()))
