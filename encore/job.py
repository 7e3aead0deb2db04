"""A job: one command for all ranks with mounts and environment, independent of the runtime."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from encore import catalogue, launchers
from encore.configuration import Configuration
from encore.launchers import Launch

# Variables passed from the caller to the ranks; other variables require --env.
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


def caller_name(caller: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's name as LOGNAME and USER, also where the caller has none.

    PyTorch 2.8 to 2.12 look it up when an optimizer or `torch.compile` is first used, and end where neither these nor
    /etc/passwd have it, as for the caller's uid in a container (https://github.com/pytorch/pytorch/issues/140765).
    """
    name = caller.get("LOGNAME") or caller.get("USER") or "encore"
    return {"LOGNAME": name, "USER": name}


@dataclass(frozen=True)
class Mount:
    source: Path
    target: str
    read_only: bool


@dataclass(frozen=True, kw_only=True)
class Job:
    """Command and environment, independent of the runtime. Paths in ``argv`` are mount targets."""

    # Training command, prefixed by a launcher inside the runtime; programs are found on the job's PATH.
    argv: tuple[str, ...]
    environment: Mapping[str, str]  # Complete environment of the ranks except PATH, which the runtime sets
    mounts: tuple[Mount, ...]
    ranks: int
    gpus: int  # GPUs per node; 0 on a CPU
    launch: Launch = launchers.ALONE  # ``argv`` already contains ``inner``


@dataclass(frozen=True, kw_only=True)
class Command:
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    working_directory: Path
    # Removes leftovers outside of the command's processes; empty if there cannot be any.
    cleanup: tuple[str, ...] = ()
    runtime: str = "host"
    rank_folders: tuple[Path, ...] = ()  # Folders that must be there for the ranks' output
    samplers: tuple[tuple[str, ...], ...] = ()  # Write telemetry of the other nodes until stdin is closed


def rank_environment(
    configuration: Configuration, launch: Launch, extra: Mapping[str, str], cores: int
) -> dict[str, str]:
    # Environment of the ranks; ``extra`` takes precedence. Ranks on the same node share ``cores``.
    variables = {"PYTHONUNBUFFERED": "1", **launch.environment}
    if configuration.get("device") == "cpu":
        threads = max(1, (launch.cores or cores) // configuration.ranks_per_node)
        # Threads that spin while they wait take cores from the other ranks and programs
        variables |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        if catalogue.framework(configuration.choice.implementation.framework).horovod:
            # Horovod's thread wakes up every millisecond by default: half of the system time of small steps
            variables["HOROVOD_CYCLE_TIME"] = "10"
        if launch.environment.items() >= launchers.HOROVOD_BY_MPI.items():
            variables["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if configuration.get("precision") == "fp32":
        variables |= catalogue.framework(configuration.choice.implementation.framework).fp32
    return {**variables, **{name: variable.value for name, variable in configuration.environment.items()}, **extra}


def training_job(
    configuration: Configuration,
    data: Path,
    output: Path,
    extra_environment: Mapping[str, str],
    cores: int,
    launch: Launch | None = None,
    weights: tuple[Mount, ...] = (),
) -> Job:
    """Return the training job of the experiment in ``output``; by default on this node.

    ``weights`` are initial weight files outside of the data folder.
    """
    framework = configuration.choice.implementation.framework
    launch = launch or launchers.on_one_node(framework, configuration.ranks, str(output))
    program = ("python", "-m", f"{configuration.choice.implementation.module}.train")
    arguments = ("--config", f"{output}/config.json", "--data", str(data), "--output", str(output))
    folders = (Mount(Path(folder), folder, False) for folder in launch.folders)
    return Job(
        argv=(*launch.inner, *program, *arguments),
        environment=rank_environment(configuration, launch, extra_environment, cores),
        mounts=(Mount(data, str(data), True), *weights, Mount(output, str(output), False), *folders),
        ranks=configuration.ranks,
        gpus=configuration.ranks_per_node if configuration.get("device") == "gpu" else 0,
        launch=launch,
    )
