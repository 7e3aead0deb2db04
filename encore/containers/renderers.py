"""A job as a command of each runtime: pure functions of the job and of facts that were read before.

All container runtimes share the host's process numbers and host name, so that a rank's heartbeat means the same inside
and outside: signals, the hang watch and the search for left-over processes need no second way. Values of the job's
variables travel in the environment of the engine's client and not on the command line, where every user of the machine
could read them.
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

# How an engine hands out GPUs: its own ``--gpus`` option, or a device of the Container Device Interface
GpuAccess = Literal["gpus", "cdi"]
# Options of ``docker run`` and ``podman run`` that hand over all GPUs; None: the engine cannot
GPU_OPTIONS: Mapping[GpuAccess | None, list[str]] = {
    "gpus": ["--gpus", "all"],
    "cdi": ["--device", "nvidia.com/gpu=all"],
    None: [],
}

# Folder of ``benchmarks/`` inside every image; NGC images keep the user's work in /workspace
CODE = "/workspace/encore"

# What every container gets in addition to the job's environment: the caller's home is not there, and packages that the
# caller installed for himself must not replace those of the image
INSIDE = {"HOME": "/tmp", "PYTHONNOUSERSITE": "1", "PYTHONPATH": CODE}

STACK_BYTES = 64 * 2**20  # Stack of a thread, as NVIDIA's documentation of the framework containers asks for
# Label of the containers that a launcher starts: one a rank, on any node, so that none has a fixed name
LABEL = "encore.run"
# Launchers that a Python can start itself, wherever their programs are
MODULES = {"torchrun": "torch.distributed.run", "horovodrun": "horovod.runner.launch"}


@dataclass(frozen=True, kw_only=True)
class Container:
    """Facts about the container and the machine, read once; renderers read nothing themselves."""

    image: str  # Name of the image, or path of the image file for Apptainer and Enroot
    name: str
    user: int
    group: int
    caller: Mapping[str, str]  # Environment of the caller, from which the engine's own client takes what it needs
    program: str = ""  # The engine's client; empty: the one on PATH
    rootless: bool = False
    gpu_access: GpuAccess = "gpus"
    infiniband: tuple[str, ...] = ()  # Device files of InfiniBand adapters
    # The most open files and processes that the caller may have, by the engines' names; -1: no limit
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
    """Return the mounts of a job, unless a path contains one of the characters that end it in the engine's option."""
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
    # The environment of the engine's client: its own settings, and the values of what the job passes on
    caller = container.caller.items()
    variables = {name: value for name, value in caller if name in CLIENT_VARIABLES or name.startswith(CLIENT_PREFIXES)}
    return {**variables, **job.environment}


def inside_of(job: Job, container: Container) -> dict[str, str]:
    """Return what a container gets in addition to the job's environment; no value is a secret."""
    variables = {
        **caller_name(container.caller),
        # By number, and not below HOME: Apptainer and Enroot share /tmp with the host, and so with other users.
        "TORCHINDUCTOR_CACHE_DIR": f"/tmp/torchinductor_{container.user}",
        "TRITON_CACHE_DIR": f"/tmp/triton_{container.user}",
    }
    # All GPUs are handed to the container, as on the host, and CUDA chooses.
    chosen = container.caller.get("CUDA_VISIBLE_DEVICES") if job.gpus else None
    visible = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    return {**INSIDE, **{name: value for name, value in variables.items() if name not in job.environment}, **visible}


def _named(job: Job, values: Mapping[str, str]) -> list[str]:
    # ``--env`` options: by name alone what the client's environment has, with their values those ``values``
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
    # What Docker and Podman share; the container goes at its end, or by ``cleanup``
    program = container.program or engine
    name = ["--name", container.name]
    cleanup: tuple[str, ...] = (program, "rm", "--force", "--volumes", container.name)
    if job.launch.outer:
        name = ["--label", f"{LABEL}={container.name}"]
        cleanup_arguments = json.dumps({"engine": program, "label": f"{LABEL}={container.name}"})
        cleanup = (
            *job.launch.everywhere,
            sys.executable,
            "-m",
            "encore.machine.host_actions",
            "remove-containers",
            cleanup_arguments,
        )
    pins_memory = bool(job.gpus or container.infiniband)
    mounts = (
        f"type=bind,source={each.source},target={each.target}{',readonly' if each.read_only else ''}"
        for each in _mounts(job, ',"')
    )
    shared = [
        # Heartbeats carry process number and host name. The host's name must lead to an address, for a single rank too:
        # Gloo looks itself up. No TTY: the output goes to a file.
        *("--pull", "never", "--workdir", CODE, "--pid", "host", "--uts", "host", "--network", "host"),
        # Ranks of one node talk through /dev/shm, NCCL as well as DALI's processes.
        *(("--ipc", "host") if job.ranks > 1 else ("--shm-size", "1g")),
        *("--ulimit", f"stack={STACK_BYTES}"),
        # Pinned memory for GPUs and adapters; an engine without the right to raise limits refuses the option.
        *(("--ulimit", "memlock=-1") if pins_memory and not container.rootless else ()),
        *(word for device in container.infiniband for word in ("--device", device)),
        *(word for mount in mounts for word in ("--mount", mount)),
        *_named(job, inside_of(job, container)),
        *options,
        *(GPU_OPTIONS[gpu_access] if job.gpus else ()),
    ]
    argv = [*job.launch.outer, program, "run", "--rm", *name, *shared, container.image, *job.argv]
    return _command(engine, argv, _client(job, container), cleanup)


def docker(job: Job, container: Container) -> Command:
    """Return the job as ``docker run``; results belong to the caller."""
    # A rootless engine maps root inside to the caller outside, and any other number to another user.
    user = "0:0" if container.rootless else f"{container.user}:{container.group}"
    return _oci("docker", job, container, ["--user", user], container.gpu_access)


def podman(job: Job, container: Container) -> Command:
    """Return the job as ``podman run``; results belong to the caller."""
    options = [
        # SELinux (Red Hat) denies a container the caller's folders and the GPUs unless it is set not to.
        *("--user", f"{container.user}:{container.group}", "--security-opt", "label=disable"),
        # The caller keeps his number inside, so that what he writes there is his outside.
        *(("--userns", "keep-id") if container.rootless else ()),
        # Else Podman asks for a million of each, which the kernel refuses to whoever may not raise limits.
        *(word for name, limit in container.limits.items() for word in ("--ulimit", f"{name}={limit}:{limit}")),
    ]
    # Podman knows GPUs through the Container Device Interface alone.
    return _oci("podman", job, container, options, "cdi")


def apptainer(job: Job, container: Container) -> Command:
    """Return the job as ``apptainer run``: network, memory and processes are the host's unless asked otherwise."""
    variables = inside_of(job, container)
    # A task of srun has the job's own environment already, and what Slurm set for this rank alone.
    options = [*(() if job.launch.outer else ("--cleanenv",)), "--home", variables.pop("HOME"), "--pwd", CODE]
    mounts = (f"{each.source}:{each.target}:{'ro' if each.read_only else 'rw'}" for each in _mounts(job, ",:"))
    options += [*(("--nv",) if job.gpus else ()), *(word for mount in mounts for word in ("--bind", mount))]
    argv = [*job.launch.outer, container.program or "apptainer", "run", *options, container.image, *job.argv]
    # Apptainer hands APPTAINERENV_X on as X; --cleanenv stops everything else.
    passed = {f"APPTAINERENV_{name}": value for name, value in {**job.environment, **variables}.items()}
    return _command("apptainer", argv, {**_client(job, container), **passed})


def enroot(job: Job, container: Container) -> Command:
    """Return the job as ``enroot start``, by the caller himself: network, memory and processes are the host's."""
    mounts = (
        f"{each.source}:{each.target}:none:x-create=dir,rbind{',ro' if each.read_only else ''}"
        for each in _mounts(job, ":")
    )
    named = _named(job, {**inside_of(job, container), **_visible_to_enroot(job)})
    options = (*(word for mount in mounts for word in ("--mount", mount)), *named)
    argv = [*job.launch.outer, container.program or "enroot", "start", *options, container.image, *job.argv]
    return _command("enroot", argv, _client(job, container))


def pyxis(job: Job, container: Container) -> Command:
    """Return the job as options of srun, whose plugin starts the container (NVIDIA/pyxis, its README's options)."""
    variables = inside_of(job, container)
    mounts = ",".join(f"{m.source}:{m.target}:{'ro' if m.read_only else 'rw'}" for m in _mounts(job, ",:"))
    # Without it the image's own value of a variable wins over the job's.
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
    """Return the job as a command in the environment of ``python``; mounts are the folders themselves.

    ``caller`` is the environment of the user: only PASSED_ON and PATH are taken over from it. A Python that was
    ``is_user_python`` by the user may have its programs and packages anywhere: it is named by its file, starts launchers as
    modules, and keeps the caller's PYTHONPATH, by which environment modules work.
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
