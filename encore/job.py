"""A job: one command for all ranks with its mounts and environment, the same on every runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from encore import node
from encore.configuration import Configuration

PASSED_ON = (
    "CUDA_VISIBLE_DEVICES",
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "TMPDIR",
    "TZ",
    "USER",
)
"""Variables that a rank takes over from the caller; all others must be named with --env."""


@dataclass(frozen=True)
class Mount:
    """A folder of the host as a job sees it."""

    source: Path
    target: str
    read_only: bool


@dataclass(frozen=True)
class Job:
    """What to start, independent of how. Paths in ``argv`` are targets of mounts."""

    argv: tuple[str, ...]
    """The launcher and the training command; ``python`` and ``horovodrun`` are found on the job's PATH."""
    environment: Mapping[str, str]
    """All that the ranks see, but for PATH, which the runtime gives."""
    mounts: tuple[Mount, ...]
    ranks: int
    gpus: int
    """GPUs per node; 0 on a CPU."""


@dataclass(frozen=True)
class Command:
    """A job rendered for one runtime: what this machine executes."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    working_directory: Path
    cleanup: tuple[str, ...] = ()
    """Removes what the command may leave behind outside of its own processes; empty: nothing can be left."""
    runtime: str = "host"


@dataclass(frozen=True)
class Places:
    """Where the job finds its data and leaves its results, as the ranks see it."""

    data: str
    output: str


def launcher(configuration: Configuration, output: str) -> tuple[str, ...]:
    """Horovod's launcher over Gloo for several ranks on one node; nothing for a single one."""
    if configuration.ranks == 1:
        return ()
    ranks = str(configuration.ranks)
    # horovodrun keeps the output of each rank in a file of its own.
    return ("horovodrun", "--gloo", "-np", ranks, "--output-filename", f"{output}/ranks")


def rank_environment(configuration: Configuration, extra: Mapping[str, str]) -> dict[str, str]:
    """Variables that the ranks need, whatever starts them; ``extra`` wins."""
    variables = {
        "PYTHONUNBUFFERED": "1",
        # A single rank has no launcher that would tell Horovod to leave MPI alone.
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    if configuration.get("device") == "cpu":
        threads = max(1, node.cores() // configuration.ranks_per_node)
        variables["OMP_NUM_THREADS"] = str(threads)
    variables.update(configuration.system.environment)
    variables.update(extra)
    return variables


def training_job(
    configuration: Configuration,
    places: Places,
    mounts: tuple[Mount, ...],
    extra_environment: Mapping[str, str],
) -> Job:
    """The job that trains one experiment whose folder is ``places.output``."""
    module = f"{configuration.choice.implementation.module}.train"
    command = ("python", "-m", module, "--config", f"{places.output}/config.json")
    arguments = ("--data", places.data, "--output", places.output)
    return Job(
        argv=(*launcher(configuration, places.output), *command, *arguments),
        environment=rank_environment(configuration, extra_environment),
        mounts=mounts,
        ranks=configuration.ranks,
        gpus=configuration.ranks_per_node if configuration.get("device") == "gpu" else 0,
    )
