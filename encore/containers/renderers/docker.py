"""The `docker` runtime."""

from __future__ import annotations

from encore.containers.renderers import oci
from encore.containers.renderers.container import Container
from encore.job import Command, Job


def render(job: Job, container: Container) -> Command:
    """Return the job as ``docker run``; results belong to the caller."""
    # A rootless engine maps root inside to the caller outside, and any other number to another user.
    user = "0:0" if container.rootless else f"{container.user}:{container.group}"
    return oci.command(job, container, ["--user", user, *oci.gpu_options(job, container)], "docker")
