"""Batch script for a submission: Slurm options, followed by slurm/run.sub, which also works without Encore's script.

The time limit is derived from the published time of the configuration.
"""

import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from encore import __version__, paths
from encore.configuration import Configuration
from encore.errors import EncoreError
from encore.results.published.published import PublishedResult, load_published
from encore.results.rules import canonical
from encore.slurm.cluster import Cluster
from encore.slurm.queue import COMMENT, RESUMES

WARNING_SECONDS = 120  # before the time limit: enough for a checkpoint on a slow file system


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``encore submit`` in addition to those of the run; None: from cluster.toml."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    gpu_type: str | None = None
    minutes: int | None = None
    # Array tasks, one run per task, in sbatch syntax: ``0-4``, or ``0-4%2`` for two at a time.
    array: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    dependency: str | None = None
    mail: str | None = None  # Mail address for the end, failure or requeue of the job
    job_name: str | None = None  # put after ``encore-BENCHMARK-``
    comment: str | None = None  # Appended to Encore's job comment
    require_target: bool = False  # Mark the job FAILED if a target is not reached
    sbatch: tuple[str, ...] = ()  # additional sbatch options
    cluster: Path | None = None
    trust_owner: bool = False  # Allow resuming a run folder that a different user owns


@dataclass(frozen=True, kw_only=True)
class Submission:
    name: str  # the benchmark, such as resnet
    nodes: int
    gpus_per_node: int  # 0 for ranks on the CPU
    minutes: int | None  # Time limit; None: limit of the partition
    results: Path
    arguments: tuple[str, ...]  # of ``encore run``, without the benchmark's name
    array: tuple[int, ...] = ()  # Task numbers of the array in order, one run per task
    options: Options = Options()  # Cluster options
    resumes: str = ""  # name of the run folder that is resumed; empty: the job makes one
    secrets: tuple[str, ...] = ()  # variables that sbatch passes to the job instead of arguments


def options(submission: Submission, cluster: Cluster) -> list[str]:
    """Return the sbatch options in the order of the script; later options override earlier ones."""
    log, request = "slurm-%A_%a.out" if submission.array else "slurm-%j.out", submission.options
    # sbatch syntax: 0-9%2 runs up to two tasks at a time.
    _, sign, at_once = (request.array or "").partition("%")
    # ``encore:RESULTS|RUN|SITE``, without empty parts at the end.
    comment = RESUMES.join((f"{COMMENT}{submission.results}", submission.resumes, request.comment or ""))
    settings = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "reservation": request.reservation,
        "dependency": request.dependency,
        "mail-user": request.mail,
        "mail-type": "END,FAIL,REQUEUE" if request.mail else "",
        "array": _tasks(submission.array) + sign + at_once if submission.array else "",
        "time": clock(submission.minutes) if submission.minutes else "",
        **gpu_option(submission.gpus_per_node, cluster),
    }
    return [
        f"--job-name=encore-{submission.name}" + (f"-{request.job_name}" if request.job_name else ""),
        f"--nodes={submission.nodes}",
        *(f"--{name}={value}" for name, value in settings.items() if value),
        f"--output={submission.results}/{log}",
        f"--comment={comment.rstrip(RESUMES)}",
        "--exclusive",
        "--requeue",
        "--open-mode=append",
        f"--signal=B:USR1@{WARNING_SECONDS}",
        *cluster.sbatch,
        *request.sbatch,
    ]


def _directive(option: str) -> str:
    # sbatch reads one line, and double quotes around an option with a blank
    if re.search(r'[\x00-\x1f\x7f"]', option):
        raise EncoreError(
            f"sbatch option {option!r} contains a line break, a control character or a quote",
            hint="correct it in cluster.toml or on the command line",
        )
    return f'#SBATCH "{option}"' if " " in option else f"#SBATCH {option}"


def _tasks(numbers: Sequence[int]) -> str:
    # ``0-4``, or ``1,3,4`` if the tasks are not consecutive from 0.
    if len(numbers) > 1 and tuple(numbers) == tuple(range(len(numbers))):
        return f"0-{numbers[-1]}"
    return ",".join(map(str, numbers))


def gpu_option(count: int, cluster: Cluster) -> dict[str, str]:
    """Return the option that requests ``count`` GPUs per node; empty if Slurm does not manage GPUs."""
    if not count or cluster.gpu_option == "none":
        return {}
    typed = f"{cluster.gpu_type}:{count}" if cluster.gpu_type else str(count)
    return {"gres": f"gpu:{typed}"} if cluster.gpu_option == "gres" else {"gpus-per-node": typed}


def clock(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def render(submission: Submission, cluster: Cluster) -> str:
    """Render the script. A pure function, so that a dry run works without Slurm."""
    name = [] if submission.resumes else [submission.name]
    command = [str(paths.ROOT / "slurm" / "run.sub"), *name, *submission.arguments]
    lines = [
        "#!/usr/bin/env bash",
        f"# Generated by Encore {__version__}: encore submit {submission.name} --nodes {submission.nodes} ...",
        *map(_directive, options(submission, cluster)),
        "set -euo pipefail",
        f"export ENCORE_ROOT={shlex.quote(str(paths.ROOT))}",
        *([f"export ENCORE_PROGRAM={shlex.quote(sys.argv[0])}"] if paths.IS_INSTALLED else []),
        *(f': "${{{name}:?set it in the environment of sbatch}}"' for name in submission.secrets),
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def with_cluster(arguments: Sequence[str], cluster_file: Path | None) -> tuple[str, ...]:
    """Return the arguments of ``encore run`` in the job, which reads the same cluster file."""
    return (*arguments, *(("--cluster", str(cluster_file.absolute())) if cluster_file is not None else ()))


MARGIN = 2.0  # For different hardware and file systems and unlucky seeds; Slurm kills the job at the limit
SETUP_MINUTES = 20  # pulling an image, starting it, reading the data set for the first time, evaluation before the end
SMALL_MINUTES = 15  # a small data set on a few cores, set-up of the framework's environment included


@dataclass(frozen=True)
class Estimate:
    minutes: int | None
    reason: str


def estimate(configuration: Configuration, runs: int, minutes: int | None = None) -> Estimate:
    """Estimate the time limit of ``runs`` sequential runs, unless it was requested; None without a published time."""
    if minutes:
        return Estimate(minutes, "as requested")
    system = configuration.system
    if system.kind == "small":
        return Estimate(SMALL_MINUTES * (1 + runs), f"{SMALL_MINUTES} min per run of the toy data set, plus set-up")
    result = _find_published(configuration)
    if result is None or result.score_minutes is None:
        return Estimate(None, "no published time of this configuration: using the limit of the partition")
    submitted = system.nodes * system.gpus_per_node
    scaled = result.score_minutes * submitted / configuration.ranks
    minutes = SETUP_MINUTES + math.ceil(MARGIN * scaled * runs)
    reason = f"{result.name} took {result.score_minutes:.4g} min on {submitted} GPUs; times {MARGIN:g}, {runs} run(s)"
    return Estimate(minutes, f"{reason}, {configuration.ranks} GPUs, and {SETUP_MINUTES} min for set-up")


def _find_published(configuration: Configuration) -> PublishedResult | None:
    system, benchmark = configuration.system, configuration.choice.benchmark.name
    key = (system.round, canonical(benchmark), system.submission.rsplit("/", 1)[-1])
    found = (result for result in load_published() if (result.round, result.benchmark, result.system) == key)
    return next((result for result in found if result.score_minutes is not None), None)
