"""Launchers of an experiment's ranks: the framework's launcher on one node, srun on several nodes.

A launcher is data: the prefix of the training command inside the environment or container (``inner``, starts all
ranks on a node), the prefix of the runtime's command (``outer``, starts one process per rank on all nodes), and the
variables for the rendezvous.
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
    # Option of ``outer`` that exports a variable, such as ``-x``; empty: all variables are exported.
    export: tuple[str, ...] = ()
    # Starts one process per node, for cleanup; empty on a single node.
    everywhere: tuple[str, ...] = ()
    # Variables set by the launcher per rank; containers must pass them.
    passed: tuple[str, ...] = ()
    cores: int | None = None  # Cores shared by the ranks of a node; None: all cores of this process
    # Folders used by ranks to reach the launcher; containers must mount them at the same path.
    folders: tuple[str, ...] = ()


ALONE = Launch("python")  # A single rank needs none

# For a single rank, no launcher disables MPI in Horovod.
HOROVOD_BY_GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
HOROVOD_BY_MPI = {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}


def by_horovod(framework: str) -> bool:
    return catalogue.framework(framework).communication == "horovod"


def own_framework() -> str:
    """Return the framework with a launcher, which is also used to benchmark machines and count steps."""
    frameworks = sorted({choice.implementation.framework for choice in catalogue.choices().values()})
    return next(name for name in frameworks if not by_horovod(name))


@dataclass(frozen=True)
class HorovodBuild:
    """Build options of Horovod, as printed by ``horovodrun --check-build``."""

    controllers: tuple[str, ...]  # MPI, Gloo: control plane
    operations: tuple[str, ...]  # NCCL, MPI, Gloo and others: data plane

    def __str__(self) -> str:
        return f"controllers {', '.join(self.controllers) or 'none'}; operations {', '.join(self.operations) or 'none'}"


def parse_check_build(text: str) -> HorovodBuild | None:
    """Parse the checked options of ``horovodrun --check-build``; None without a table.

    The framework section is ignored: Horovod also checks frameworks that are not installed.
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
    """Return the controller for ranks on one node: Gloo if Horovod supports it, else MPI; None if neither is usable.

    Horovod builds that were not queried are assumed to support Gloo, like this project's environments. A single rank
    does not need ``mpirun``.
    """
    if build is None or "Gloo" in build.controllers:
        return "gloo"
    return "mpi" if "MPI" in build.controllers and (mpirun or ranks == 1) else None


def on_one_node(
    framework: str, ranks: int, output: str, meeting: Controller | None = "gloo", as_root: bool = False
) -> Launch:
    """Return the launcher for ranks on this node; output goes to a file per rank below ``output``/ranks."""
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
    # Options of NVIDIA's submissions on one node (v0.7, resnet/implementations/mxnet/run_and_time.sh). Local ranks
    # inherit the environment, so no variables are exported. ``nojobid``: the same file names as horovodrun.
    root = ("--allow-run-as-root",) if as_root else ()
    options = (*root, "--bind-to", "none", "-np", str(ranks), "--output-filename", f"{logs}:nojobid")
    return Launch("mpirun", inner=("mpirun", *options), environment=environment)
