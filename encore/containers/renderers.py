"""Render a job as a command for each runtime. Renderers are pure functions of the job and of previously read facts.

Containers share the host's PID namespace and host name, so heartbeats are valid inside and outside: signals, hang
detection and cleanup work in the same way. Variables of the job are passed through the environment of the engine's
client, not on the command line, which all users of the machine can read.
"""

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from encore import paths
from encore.errors import EncoreError
from encore.job import PASSED_ON, Command, Job, Mount, caller_name

# How an engine passes GPUs: by the ``--gpus`` option, or as a CDI (Container Device Interface) device
GpuAccess = Literal["gpus", "cdi"]
# Options of ``docker run`` and ``podman run`` that hand over all GPUs; None: the engine cannot
GPU_OPTIONS: Mapping[GpuAccess | None, list[str]] = {
    "gpus": ["--gpus", "all"],
    "cdi": ["--device", "nvidia.com/gpu=all"],
    None: [],
}

# Folder of ``benchmarks/`` inside every image; NGC images keep the user's work in /workspace
CODE = "/workspace/encore"

# Variables of every container in addition to the job's: the caller's home is not mounted, and packages in the user site
# must not override those in the image
INSIDE = {"HOME": "/tmp", "PYTHONNOUSERSITE": "1", "PYTHONPATH": CODE}

STACK_BYTES = 64 * 2**20  # Stack limit per thread, as recommended for NVIDIA's framework containers
# Label of containers started by a launcher. Each rank has a container, so names cannot be fixed.
LABEL = "encore.run"
# Launchers that can be started as Python modules, without their scripts
MODULES = {"torchrun": "torch.distributed.run", "horovodrun": "horovod.runner.launch"}


@dataclass(frozen=True, kw_only=True)
class Container:
    """Facts about the container and the machine. Renderers do not read any others."""

    image: str  # Name of the image, or path of the image file for Apptainer and Enroot
    name: str
    user: int
    group: int
    caller: Mapping[str, str]  # Environment of the caller; the engine's client uses part of it
    program: str = ""  # Client of the engine; empty: from PATH
    rootless: bool = False
    gpu_access: GpuAccess = "gpus"
    infiniband: tuple[str, ...] = ()  # Device files of InfiniBand adapters
    # Limits of open files and processes, by the engines' names; -1: unlimited
    limits: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_image(self.image)


def check_image(image: str) -> None:
    """Reject an image that an engine would take for an option."""
    if image.startswith("-") or re.search(r"[\x00-\x1f\x7f]", image):
        raise EncoreError(
            f"{image!r} is not an image",
            expected="the name or file of an image, such as localhost/encore/resnet:latest",
            hint="--image NAME, or image in cluster.toml",
        )


def _mounts(job: Job, separators: str) -> tuple[Mount, ...]:
    """Return a job's mounts; reject paths with separators of the engine's mount option."""
    for path in (path for mount in job.mounts for path in (str(mount.source), mount.target)):
        special = re.search(rf"[{separators}\x00-\x1f\x7f]", path)
        if special:
            raise EncoreError(
                f"{path!r} cannot be mounted in a container: it contains {special[0]!r}",
                hint="rename the folder, use a symbolic link without this character, or --runtime host",
            )
    return job.mounts


CLIENT_VARIABLES = ("HOME", "PATH", "TMPDIR", "USER", "XDG_DATA_HOME", "XDG_RUNTIME_DIR")
CLIENT_PREFIXES = ("APPTAINER_", "CONTAINERS_", "DBUS_", "DOCKER_", "ENROOT_", "SINGULARITY_")


def _client(job: Job, container: Container) -> dict[str, str]:
    # Environment of the engine's client: its settings, and values that the job passes on
    caller = container.caller.items()
    variables = {name: value for name, value in caller if name in CLIENT_VARIABLES or name.startswith(CLIENT_PREFIXES)}
    return {**variables, **job.environment}


def container_variables(job: Job, container: Container) -> dict[str, str]:
    """Return the variables that a container gets in addition to the job's; they contain no secrets."""
    variables = {
        **caller_name(container.caller),
        # By number, and not below HOME: Apptainer and Enroot share /tmp with the host, and so with other users.
        "TORCHINDUCTOR_CACHE_DIR": f"/tmp/torchinductor_{container.user}",
        "TRITON_CACHE_DIR": f"/tmp/triton_{container.user}",
    }
    # All GPUs are handed to the container, as on the host, and CUDA chooses.
    devices = container.caller.get("CUDA_VISIBLE_DEVICES") if job.gpus else None
    visible = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    return {**INSIDE, **{name: value for name, value in variables.items() if name not in job.environment}, **visible}


def _env_options(job: Job, values: Mapping[str, str]) -> list[str]:
    # ``--env`` options: by name for variables in the client's environment, with value for ``values``
    by_name = sorted({*job.environment, *job.launch.passed})
    return [word for setting in (*by_name, *(f"{n}={v}" for n, v in values.items())) for word in ("--env", setting)]


def _visible_to_enroot(job: Job) -> dict[str, str]:
    # Which GPUs Enroot's hook hands out
    return {"NVIDIA_VISIBLE_DEVICES": "all" if job.gpus else "void"}


def _command(engine: str, argv: list[str], environment: Mapping[str, str], cleanup: tuple[str, ...] = ()) -> Command:
    return Command(
        argv=tuple(argv), environment=environment, working_directory=paths.ROOT, cleanup=cleanup, runtime=engine
    )


def _oci(engine: str, job: Job, container: Container, options: list[str], gpu_access: GpuAccess) -> Command:
    # Common options of Docker and Podman. The container is removed at exit, or by ``cleanup``
    program = container.program or engine
    name = ["--name", container.name]
    cleanup: tuple[str, ...] = (program, "rm", "--force", "--volumes", container.name)
    if job.launch.outer:
        name = ["--label", f"{LABEL}={container.name}"]
        cleanup = (
            *job.launch.everywhere,
            sys.executable,
            "-m",
            "encore.machine.host_actions",
            "remove-containers",
            json.dumps({"engine": program, "label": f"{LABEL}={container.name}"}),
        )
    pins_memory = bool(job.gpus or container.infiniband)
    mounts = (
        f"type=bind,source={mount.source},target={mount.target}{',readonly' if mount.read_only else ''}"
        for mount in _mounts(job, ',"')
    )
    shared = [
        # Heartbeats contain PID and host name. The host name must resolve to an address, for a single rank too, because
        # Gloo looks it up. No TTY: output goes to a file.
        *("--pull", "never", "--workdir", CODE, "--pid", "host", "--uts", "host", "--network", "host"),
        # Ranks on a node communicate through /dev/shm: NCCL and DALI's processes.
        *(("--ipc", "host") if job.ranks > 1 else ("--shm-size", "1g")),
        *("--ulimit", f"stack={STACK_BYTES}"),
        # Pinned memory for GPUs and adapters; an engine without the right to raise limits refuses the option.
        *(("--ulimit", "memlock=-1") if pins_memory and not container.rootless else ()),
        *(word for device in container.infiniband for word in ("--device", device)),
        *(word for bind in mounts for word in ("--mount", bind)),
        *_env_options(job, container_variables(job, container)),
        *options,
        *(GPU_OPTIONS[gpu_access] if job.gpus else ()),
    ]
    argv = [*job.launch.outer, program, "run", "--rm", *name, *shared, container.image, *job.argv]
    return _command(engine, argv, _client(job, container), cleanup)


def docker(job: Job, container: Container) -> Command:
    """Return the job as ``docker run``; results belong to the caller."""
    # Rootless engines map root in the container to the caller, and other users to subordinate IDs.
    user = "0:0" if container.rootless else f"{container.user}:{container.group}"
    return _oci("docker", job, container, ["--user", user], container.gpu_access)


def podman(job: Job, container: Container) -> Command:
    """Return the job as ``podman run``; results belong to the caller."""
    options = [
        # SELinux (Red Hat) denies a container the caller's folders and the GPUs unless it is set not to.
        *("--user", f"{container.user}:{container.group}", "--security-opt", "label=disable"),
        # Keep the caller's user ID, so that the caller owns the files that the container writes.
        *(("--userns", "keep-id") if container.rootless else ()),
        # By default Podman requests a limit of 1,000,000, which fails for users that may not raise limits.
        *(word for name, limit in container.limits.items() for word in ("--ulimit", f"{name}={limit}:{limit}")),
    ]
    # Podman supports GPUs through CDI only.
    return _oci("podman", job, container, options, "cdi")


def apptainer(job: Job, container: Container) -> Command:
    """Render for ``apptainer run``, which shares network, memory and processes with the host by default."""
    variables = container_variables(job, container)
    # An srun task already has the job's and its rank's environment.
    options = [*(() if job.launch.outer else ("--cleanenv",)), "--home", variables.pop("HOME"), "--pwd", CODE]
    mounts = (f"{mount.source}:{mount.target}:{'ro' if mount.read_only else 'rw'}" for mount in _mounts(job, ",:"))
    options += [*(("--nv",) if job.gpus else ()), *(word for bind in mounts for word in ("--bind", bind))]
    argv = [*job.launch.outer, container.program or "apptainer", "run", *options, container.image, *job.argv]
    # Apptainer passes APPTAINERENV_X on as X; --cleanenv blocks everything else.
    passed = {f"APPTAINERENV_{name}": value for name, value in {**job.environment, **variables}.items()}
    return _command("apptainer", argv, {**_client(job, container), **passed})


def enroot(job: Job, container: Container) -> Command:
    """Return the job as ``enroot start``, by the caller himself: network, memory and processes are the host's."""
    mounts = (
        f"{mount.source}:{mount.target}:none:x-create=dir,rbind{',ro' if mount.read_only else ''}"
        for mount in _mounts(job, ":")
    )
    env_options = _env_options(job, {**container_variables(job, container), **_visible_to_enroot(job)})
    options = (*(word for bind in mounts for word in ("--mount", bind)), *env_options)
    argv = [*job.launch.outer, container.program or "enroot", "start", *options, container.image, *job.argv]
    return _command("enroot", argv, _client(job, container))


def pyxis(job: Job, container: Container) -> Command:
    """Render as srun options of the Pyxis plugin (NVIDIA/pyxis, README)."""
    variables = container_variables(job, container)
    mounts = ",".join(f"{m.source}:{m.target}:{'ro' if m.read_only else 'rw'}" for m in _mounts(job, ",:"))
    # Otherwise the image's variables override the job's.
    names = ",".join(sorted(name for name in {**job.environment, **variables} if not name.startswith("SLURM_")))
    options = (
        f"--container-image={container.image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={CODE}",
        f"--container-env={names}",
        "--no-container-mount-home",
        "--no-container-remap-root",
    )
    environment = {**_client(job, container), **variables, **_visible_to_enroot(job)}
    return _command("pyxis", [*job.launch.outer, *options, *job.argv], environment)


def host(job: Job, python: Path, caller: Mapping[str, str], is_user_python: bool = False) -> Command:
    """Render for the environment of ``python`` on the host, without mounts.

    ``caller`` is the environment of the user; only PASSED_ON and PATH are used. With ``is_user_python`` programs and
    packages may be anywhere: the interpreter is given by path, launchers are started as modules, and the caller's
    PYTHONPATH is kept, which environment modules need.
    """
    own_path = caller.get("PYTHONPATH") if is_user_python else None
    environment = {
        **{name: caller[name] for name in PASSED_ON if name in caller},
        **caller_name(caller),
        "PATH": os.pathsep.join([str(python.parent), caller.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(paths.ROOT), own_path))),
        **job.environment,
    }
    argv = job.argv
    if is_user_python:
        modules = {name: (str(python), "-m", module) for name, module in MODULES.items()}
        programs = {**modules, "python": (str(python),)}
        argv = tuple(part for word in argv for part in programs.get(word, (word,)))
    export = job.launch.export
    exported = [word for name in sorted(environment) for word in (*export, name)] if export else []
    return _command("host", [*job.launch.outer, *exported, *argv], environment)
