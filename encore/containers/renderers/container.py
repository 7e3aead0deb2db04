"""What the container runtimes have in common: what they must know besides the job, and what they all pass on.

All four share the host's process numbers and host name, so that a rank's heartbeat means the same inside
and outside: signals, the hang watch and the search for left-over processes need no second way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from encore.job import Job, caller_name

GpuAccess = Literal["gpus", "cdi"]
"""How an engine hands out GPUs: its own ``--gpus`` option, or a device of the Container Device Interface."""

CODE = "/workspace/encore"
"""Folder of ``benchmarks/`` inside every image; NGC images keep the user's work in /workspace."""

INSIDE = {"HOME": "/tmp", "PYTHONNOUSERSITE": "1", "PYTHONPATH": CODE}
"""What every container gets in addition to the job's environment: the caller's home is not there, and packages that
the caller installed for himself must not replace those of the image."""

STACK_BYTES = 64 * 2**20
"""Stack of a thread, as NVIDIA's documentation of the framework containers asks for."""


@dataclass(frozen=True, kw_only=True)
class Container:
    """Facts about the container and the machine, read once; renderers read nothing themselves."""

    image: str
    """Name of the image, or path of the image file for Apptainer and Enroot."""
    name: str
    user: int
    group: int
    caller: Mapping[str, str]
    """Environment of the caller, from which the engine's own client takes what it needs."""
    program: str = ""
    """The engine's client; empty: the one on PATH."""
    rootless: bool = False
    gpu_access: GpuAccess = "gpus"
    infiniband: tuple[str, ...] = ()
    """Device files of InfiniBand adapters."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """The most open files and processes that the caller may have, by the engines' names; -1: no limit."""


CLIENT_VARIABLES = ("HOME", "PATH", "TMPDIR", "USER", "XDG_DATA_HOME", "XDG_RUNTIME_DIR")
CLIENT_PREFIXES = ("APPTAINER_", "CONTAINERS_", "DBUS_", "DOCKER_", "ENROOT_", "SINGULARITY_")


def client_environment(job: Job, container: Container) -> dict[str, str]:
    """Return the environment of the engine's client: its own settings, and the values of what the job passes on.

    Values travel this way and not on the command line, where every user of the machine could read them.
    """
    kept = {
        name: value
        for name, value in container.caller.items()
        if name in CLIENT_VARIABLES or name.startswith(CLIENT_PREFIXES)
    }
    return {**kept, **job.environment}


def visible_devices(job: Job, container: Container) -> dict[str, str]:
    """Return the caller's choice of GPUs: all are handed to the container, as on the host, and CUDA chooses."""
    chosen = container.caller.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": chosen} if chosen is not None and job.gpus else {}


def inside(job: Job, container: Container) -> dict[str, str]:
    """Return variables whose values are no secret and differ from the client's own."""
    # By number, and not below HOME: Apptainer and Enroot share /tmp with the host, and so with other users.
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": f"/tmp/torchinductor_{container.user}",
        "TRITON_CACHE_DIR": f"/tmp/triton_{container.user}",
    }
    ours = {**caller_name(container.caller), **caches}
    chosen = {name: value for name, value in ours.items() if name not in job.environment}
    return {**INSIDE, **chosen, **visible_devices(job, container)}
