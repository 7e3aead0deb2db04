"""The `podman` runtime."""

from __future__ import annotations

from dataclasses import replace

from encore.containers.renderers import oci
from encore.containers.renderers.container import Container
from encore.job import Command, Job


def render(job: Job, container: Container) -> Command:
    """Return the job as ``podman run``; results belong to the caller."""
    # SELinux (Red Hat) denies a container the caller's folders and the GPUs unless it is set not to.
    options = ["--user", f"{container.user}:{container.group}", "--security-opt", "label=disable"]
    if container.rootless:
        # The caller keeps his number inside, so that what he writes there is his outside.
        options += ["--userns", "keep-id"]
    # Else Podman asks for a million of each, which the kernel refuses to whoever may not raise limits.
    for name, most in container.limits.items():
        options += ["--ulimit", f"{name}={most}:{most}"]
    # Podman knows GPUs through the Container Device Interface alone.
    by_interface = replace(container, gpu_access="cdi")
    return oci.command(job, container, [*options, *oci.gpu_options(job, by_interface)], "podman")
