"""The options that Docker and Podman share."""

from __future__ import annotations

import json
import sys

from encore import paths
from encore.containers.renderers import container as containers
from encore.containers.renderers.container import Container
from encore.job import Command, Job


def command(job: Job, container: Container, options: list[str], engine: str) -> Command:
    """Return ``docker run`` or ``podman run``; the container goes at its end, or by ``cleanup``."""
    program = container.program or engine
    return Command(
        argv=(
            *job.outer,
            program,
            "run",
            *shared_options(job, container),
            *options,
            container.image,
            *job.argv,
        ),
        environment=containers.client_environment(job, container),
        working_directory=paths.ROOT,
        cleanup=_removal(job, container, program),
        runtime=engine,
    )


LABEL = "encore.run"
"""Label of the containers that a launcher starts: one a rank, on any node, so that none has a fixed name."""


def _removal(job: Job, container: Container, program: str) -> tuple[str, ...]:
    if not job.outer:
        return (program, "rm", "--force", "--volumes", container.name)
    wanted = json.dumps({"engine": program, "label": f"{LABEL}={container.name}"})
    remove = (sys.executable, "-m", "encore.machine.on_node", "remove-containers", wanted)
    return (*job.everywhere, *remove)


def shared_options(job: Job, container: Container) -> list[str]:
    """Return everything but what the two engines do differently. No TTY: the output goes to a file."""
    return [
        "--rm",
        *(["--label", f"{LABEL}={container.name}"] if job.outer else ["--name", container.name]),
        "--pull",
        "never",
        "--workdir",
        containers.CODE,
        # Heartbeats carry process number and host name: see encore/containers/renderers/container.py.
        "--pid",
        "host",
        "--uts",
        "host",
        # The host's name must lead to an address, for a single rank too: Gloo looks itself up.
        "--network",
        "host",
        *_memory(job),
        *_limits(job, container),
        *[option for device in container.infiniband for option in ("--device", device)],
        *_mounts(job),
        *_environment(job, container),
    ]


def _memory(job: Job) -> list[str]:
    # Ranks of one node talk through /dev/shm, NCCL as well as DALI's processes.
    return ["--ipc", "host"] if job.ranks > 1 else ["--shm-size", "1g"]


def _limits(job: Job, container: Container) -> list[str]:
    limits = ["--ulimit", f"stack={containers.STACK_BYTES}"]
    # Pinned memory for GPUs and adapters; an engine without the right to raise limits refuses the option.
    if (job.gpus or container.infiniband) and not container.rootless:
        limits += ["--ulimit", "memlock=-1"]
    return limits


def _mounts(job: Job) -> list[str]:
    options = []
    for mount in job.mounts:
        read_only = ",readonly" if mount.read_only else ""
        options += ["--mount", f"type=bind,source={mount.source},target={mount.target}{read_only}"]
    return options


def _environment(job: Job, container: Container) -> list[str]:
    by_name = [option for name in sorted({*job.environment, *job.passed}) for option in ("--env", name)]
    given = containers.inside(job, container).items()
    return by_name + [option for name, value in given for option in ("--env", f"{name}={value}")]


def gpu_options(job: Job, container: Container) -> list[str]:
    """Return all GPUs of the node, or none for a job on the CPU."""
    if not job.gpus:
        return []
    if container.gpu_access == "cdi":
        return ["--device", "nvidia.com/gpu=all"]
    return ["--gpus", "all"]
