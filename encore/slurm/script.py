"""The batch script of a submission: Slurm's options first, then the same slurm/run.sub that works by itself.

Its time limit comes from the published time of its configuration.
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
class Wanted:
    """What ``encore submit`` was asked for in addition to the run; None leaves the choice to cluster.toml."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    gpu_type: str | None = None
    minutes: int | None = None
    # Tasks of an array, one run each, as sbatch has them: ``0-4``, or ``0-4%2`` for two at once.
    array: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    dependency: str | None = None
    mail: str | None = None  # address that Slurm writes to when the job ends, fails or is requeued
    job_name: str | None = None  # put after ``encore-BENCHMARK-``
    comment: str | None = None  # put after Encore's own part of the job's comment
    require_target: bool = False  # whether a missed target ends the job as FAILED
    more: tuple[str, ...] = ()  # further options of sbatch
    cluster: Path | None = None
    trust_owner: bool = False  # whether a run folder of another user may be resumed


@dataclass(frozen=True, kw_only=True)
class Submission:
    name: str  # the benchmark, such as resnet
    nodes: int
    gpus_per_node: int  # 0 for ranks on the CPU
    minutes: int | None  # time limit; None: the partition's own
    results: Path
    arguments: tuple[str, ...]  # of ``encore run``, without the benchmark's name
    array: tuple[int, ...] = ()  # numbers of the tasks of an array, one run each, in order
    wanted: Wanted = Wanted()  # the site's options
    resumes: str = ""  # name of the run folder that is resumed; empty: the job makes one
    secrets: tuple[str, ...] = ()  # variables that sbatch passes to the job instead of arguments


def options(submission: Submission, cluster: Cluster) -> list[str]:
    """Return options of sbatch in the order in which the script lists them; what comes later wins."""
    log, wanted = "slurm-%A_%a.out" if submission.array else "slurm-%j.out", submission.wanted
    # As sbatch has it: at most two tasks at the same time in 0-9%2.
    _, sign, at_once = (wanted.array or "").partition("%")
    # ``encore:RESULTS|RUN|SITE``, without what is empty at its end.
    comment = RESUMES.join((f"{COMMENT}{submission.results}", submission.resumes, wanted.comment or ""))
    given = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "reservation": wanted.reservation,
        "dependency": wanted.dependency,
        "mail-user": wanted.mail,
        "mail-type": "END,FAIL,REQUEUE" if wanted.mail else "",
        "array": _tasks(submission.array) + sign + at_once if submission.array else "",
        "time": clock(submission.minutes) if submission.minutes else "",
        **gpu_option(submission.gpus_per_node, cluster),
    }
    return [
        f"--job-name=encore-{submission.name}" + (f"-{wanted.job_name}" if wanted.job_name else ""),
        f"--nodes={submission.nodes}",
        *(f"--{name}={value}" for name, value in given.items() if value),
        f"--output={submission.results}/{log}",
        f"--comment={comment.rstrip(RESUMES)}",
        "--exclusive",
        "--requeue",
        "--open-mode=append",
        f"--signal=B:USR1@{WARNING_SECONDS}",
        *cluster.sbatch,
        *wanted.more,
    ]


def _directive(option: str) -> str:
    # sbatch reads one line, and double quotes around an option with a blank
    if re.search(r'[\x00-\x1f\x7f"]', option):
        raise EncoreError(
            f"sbatch option {option!r} has a line break, another control character or a quote",
            hint="correct it in cluster.toml or on the command line",
        )
    return f'#SBATCH "{option}"' if " " in option else f"#SBATCH {option}"


def _tasks(numbers: Sequence[int]) -> str:
    # ``0-4``, or ``1,3,4`` for tasks that are not the first ones.
    if len(numbers) > 1 and tuple(numbers) == tuple(range(len(numbers))):
        return f"0-{numbers[-1]}"
    return ",".join(map(str, numbers))


def gpu_option(count: int, cluster: Cluster) -> dict[str, str]:
    """Return the option that asks for this many GPUs of a node; none where Slurm does not manage them."""
    if not count or cluster.gpu_option == "none":
        return {}
    typed = f"{cluster.gpu_type}:{count}" if cluster.gpu_type else str(count)
    return {"gres": f"gpu:{typed}"} if cluster.gpu_option == "gres" else {"gpus-per-node": typed}


def clock(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def render(submission: Submission, cluster: Cluster) -> str:
    """Return the script; a pure function, so that a dry run shows it on a machine without Slurm."""
    name = [] if submission.resumes else [submission.name]
    command = [str(paths.ROOT / "slurm" / "run.sub"), *name, *submission.arguments]
    lines = [
        "#!/usr/bin/env bash",
        f"# Made by Encore {__version__}: encore submit {submission.name} --nodes {submission.nodes} ...",
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


MARGIN = 2.0  # own hardware, file system and luck with the seed; Slurm kills at the limit, and waits for none
SETUP_MINUTES = 20  # pulling an image, starting it, reading the data set for the first time, evaluation before the end
SMALL_MINUTES = 15  # a small data set on a few cores, set-up of the framework's environment included


@dataclass(frozen=True)
class Estimate:
    minutes: int | None
    reason: str


def estimate(configuration: Configuration, runs: int) -> Estimate:
    """Return the time limit for ``runs`` runs one after the other; None where nothing was published."""
    system = configuration.system
    if system.kind == "small":
        return Estimate(SMALL_MINUTES * (1 + runs), f"{SMALL_MINUTES} min a run of the toy data set, and set-up")
    cell = _published(configuration)
    if cell is None or cell.score_minutes is None:
        return Estimate(None, "no published time of this configuration: the partition's own limit holds")
    submitted = system.nodes * system.gpus_per_node
    scaled = cell.score_minutes * submitted / configuration.ranks
    minutes = SETUP_MINUTES + math.ceil(MARGIN * scaled * runs)
    reason = f"{cell.name} took {cell.score_minutes:.4g} min on {submitted} GPUs; times {MARGIN:g}, {runs} run(s)"
    return Estimate(minutes, f"{reason}, {configuration.ranks} GPUs, and {SETUP_MINUTES} min for set-up")


def _published(configuration: Configuration) -> PublishedResult | None:
    system, benchmark = configuration.system, configuration.choice.benchmark.name
    wanted = (system.round, canonical(benchmark), system.submission.rsplit("/", 1)[-1])
    scored = (cell for cell in load_published() if cell.score_minutes is not None)
    return next((cell for cell in scored if (cell.round, cell.benchmark, cell.system) == wanted), None)
