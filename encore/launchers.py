"""How the ranks of an experiment are started: by the framework's own launcher on one node, by srun on many.

A launcher is data: what comes before the training command inside the environment or container (``inner``,
starts all ranks of a node), what comes before the runtime's command (``outer``, starts one process a rank on
every node), and the variables by which the ranks find each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from encore import catalogue


@dataclass(frozen=True)
class Launch:
    """How the ranks of one experiment come to life."""

    name: str
    """The program: horovodrun, torchrun, srun; ``python`` for a single rank without any."""
    inner: tuple[str, ...] = ()
    outer: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    export: tuple[str, ...] = ()
    """Option of ``outer`` that hands on one variable by its name, such as ``-x``; empty: it hands on all."""
    everywhere: tuple[str, ...] = ()
    """Starts one process on every node, to clean up; empty where there is this node alone."""
    passed: tuple[str, ...] = ()
    """Variables that each rank gets from its launcher, by name; a container must pass them on."""
    cores: int | None = None
    """Cores that all ranks of a node have together; None: those of this process."""
    folders: tuple[str, ...] = ()
    """Folders by which a rank reaches its launcher; a container must have them at the same place."""


# A single rank has no launcher that would make Horovod leave MPI alone.
HOROVOD_BY_GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
HOROVOD_BY_MPI = {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}


def by_horovod(framework: str) -> bool:
    """Return whether the framework's ranks communicate through Horovod; else through torch.distributed."""
    return catalogue.framework(framework).communication == "horovod"


def on_one_node(framework: str, ranks: int, output: str) -> Launch:
    """Return all ranks on this node; each keeps its output in a file of its own below ``output``/ranks."""
    horovod = by_horovod(framework)
    environment = HOROVOD_BY_GLOO if horovod else {}
    if ranks == 1:
        return Launch("python", environment=environment)
    return (_horovodrun if horovod else _torchrun)(ranks, f"{output}/ranks", environment)


def _horovodrun(ranks: int, logs: str, environment: Mapping[str, str]) -> Launch:
    command = ("horovodrun", "--gloo", "-np", str(ranks), "--output-filename", logs)
    return Launch("horovodrun", inner=command, environment=environment)


def _torchrun(ranks: int, logs: str, environment: Mapping[str, str]) -> Launch:
    # --standalone: a rendezvous on a free port of this node. 3: standard output and error, to files.
    options = ("--standalone", f"--nproc-per-node={ranks}", f"--log-dir={logs}", "--redirects=3")
    return Launch("torchrun", inner=("torchrun", *options, "--no-python"), environment=environment)
