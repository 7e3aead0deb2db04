"""The `enroot` runtime: a squashfs image, run by the caller himself; the same engine that Pyxis drives."""

from __future__ import annotations

from encore import paths
from encore.containers.renderers import container as containers
from encore.containers.renderers.container import Container
from encore.job import Command, Job


def render(job: Job, container: Container) -> Command:
    """Return the job as ``enroot start``: network, memory and processes are the host's."""
    mounts = []
    for mount in job.mounts:
        flags = "x-create=dir,rbind" + (",ro" if mount.read_only else "")
        mounts += ["--mount", f"{mount.source}:{mount.target}:none:{flags}"]
    variables = [option for name in sorted({*job.environment, *job.passed}) for option in ("--env", name)]
    # Enroot's hook hands out the GPUs that NVIDIA_VISIBLE_DEVICES names.
    gpus = {"NVIDIA_VISIBLE_DEVICES": "all" if job.gpus else "void"}
    for name, value in {**containers.inside(job, container), **gpus}.items():
        variables += ["--env", f"{name}={value}"]
    return Command(
        argv=(
            *job.outer,
            container.program or "enroot",
            "start",
            *mounts,
            *variables,
            container.image,
            *job.argv,
        ),
        environment=containers.client_environment(job, container),
        working_directory=paths.ROOT,
        runtime="enroot",
    )
