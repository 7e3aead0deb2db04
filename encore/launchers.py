"""How the ranks of an experiment are started: by the framework's own launcher on one node, by srun on many.

A launcher is data: what comes before the training command inside the environment or container (``inner``,
starts all ranks of a node), what comes before the runtime's command (``outer``, starts one process a rank on
every node), and the variables by which the ranks find each other.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from encore import catalogue


@dataclass(frozen=True)
class Launch:
    name: str  # The program: horovodrun, mpirun, torchrun, srun; ``python`` for a single rank without any
    inner: tuple[str, ...] = ()
    outer: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    # Option of ``outer`` that hands on one variable by its name, such as ``-x``; empty: it hands on all.
    export: tuple[str, ...] = ()
    # Starts one process on every node, to clean up; empty where there is this node alone.
    everywhere: tuple[str, ...] = ()
    # Variables that each rank gets from its launcher, by name; a container must pass them on.
    passed: tuple[str, ...] = ()
    cores: int | None = None  # Cores that all ranks of a node have together; None: those of this process
    # Folders by which a rank reaches its launcher; a container must have them at the same place.
    folders: tuple[str, ...] = ()


ALONE = Launch("python")  # A single rank needs none

# A single rank has no launcher that would make Horovod leave MPI alone.
HOROVOD_BY_GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
HOROVOD_BY_MPI = {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}


def by_horovod(framework: str) -> bool:
    return catalogue.framework(framework).communication == "horovod"


def own_framework() -> str:
    """Return the framework whose library measures machines and counts steps: the one that brings its own launcher."""
    frameworks = sorted({choice.implementation.framework for choice in catalogue.choices().values()})
    return next(name for name in frameworks if not by_horovod(name))


@dataclass(frozen=True)
class HorovodBuild:
    """What a Horovod was built with, as ``horovodrun --check-build`` prints it."""

    controllers: tuple[str, ...]  # MPI, Gloo: by which the ranks find and steer each other
    operations: tuple[str, ...]  # NCCL, MPI, Gloo and others: by which tensors travel

    def __str__(self) -> str:
        return f"controllers {', '.join(self.controllers) or 'none'}; operations {', '.join(self.operations) or 'none'}"


def parse_check_build(text: str) -> HorovodBuild | None:
    """Return what a table of ``horovodrun --check-build`` marks; None if there is no table.

    Its frameworks say nothing: Horovod marks one that is not installed, too.
    """
    parts = re.split(r"^\s*Available (.+):\s*$", text, flags=re.MULTILINE)[1:]
    marked = {
        title: tuple(re.findall(r"^\s*\[X\] (\w+)", rows, re.MULTILINE))
        for title, rows in zip(parts[::2], parts[1::2], strict=True)
    }
    if "Controllers" not in marked:
        return None
    return HorovodBuild(marked["Controllers"], marked.get("Tensor Operations", ()))


Controller = Literal["gloo", "mpi"]


def controller(build: HorovodBuild | None, mpirun: bool, ranks: int) -> Controller | None:
    """Return how the ranks of one node meet: by Gloo if the Horovod has it, else by MPI; None if neither can be.

    One that was not asked is taken to have Gloo, as the environments of this project have. A single rank needs no
    ``mpirun``.
    """
    if build is None or "Gloo" in build.controllers:
        return "gloo"
    return "mpi" if "MPI" in build.controllers and (mpirun or ranks == 1) else None


def on_one_node(
    framework: str, ranks: int, output: str, meeting: Controller | None = "gloo", as_root: bool = False
) -> Launch:
    """Return all ranks on this node; each keeps its output in a file of its own below ``output``/ranks."""
    logs = f"{output}/ranks"
    if not by_horovod(framework):
        # --standalone: a rendezvous on a free port of this node. 3: standard output and error, to files.
        options = ("--standalone", f"--nproc-per-node={ranks}", f"--log-dir={logs}", "--redirects=3", "--no-python")
        return ALONE if ranks == 1 else Launch("torchrun", inner=("torchrun", *options))
    environment = HOROVOD_BY_MPI if meeting == "mpi" else HOROVOD_BY_GLOO
    if ranks == 1:
        return Launch("python", environment=environment)
    if meeting != "mpi":
        command = ("horovodrun", "--gloo", "-np", str(ranks), "--output-filename", logs)
        return Launch("horovodrun", inner=command, environment=environment)
    # As NVIDIA's submissions have it on one node (v0.7, resnet/implementations/mxnet/run_and_time.sh). Ranks on this
    # node inherit the environment, so that no variable has to be named. Files are named as horovodrun names them:
    # without the job's number in the path.
    root = ("--allow-run-as-root",) if as_root else ()
    options = (*root, "--bind-to", "none", "-np", str(ranks), "--output-filename", f"{logs}:nojobid")
    return Launch("mpirun", inner=("mpirun", *options), environment=environment)
