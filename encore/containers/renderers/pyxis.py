"""The `pyxis` runtime: Slurm's own plugin starts the container (NVIDIA/pyxis, its README's srun options)."""

from __future__ import annotations

from encore import paths
from encore.containers.renderers import container as containers
from encore.containers.renderers.container import Container
from encore.job import Command, Job


def render(job: Job, container: Container) -> Command:
    """Return the job as options of srun; network, memory and processes are the host's."""
    given = {**job.environment, **containers.inside(job, container)}
    mounts = ",".join(f"{m.source}:{m.target}:{'ro' if m.read_only else 'rw'}" for m in job.mounts)
    # Without it the image's own value of a variable wins over the job's.
    named = ",".join(sorted(name for name in given if not name.startswith("SLURM_")))
    options = (
        f"--container-image={container.image}",
        f"--container-mounts={mounts}",
        f"--container-workdir={containers.CODE}",
        f"--container-env={named}",
        "--no-container-mount-home",
        "--no-container-remap-root",
    )
    # Enroot's hook hands out the GPUs that NVIDIA_VISIBLE_DEVICES names.
    gpus = {"NVIDIA_VISIBLE_DEVICES": "all" if job.gpus else "void"}
    return Command(
        argv=(*job.outer, *options, *job.argv),
        environment={
            **containers.client_environment(job, container),
            **containers.inside(job, container),
            **gpus,
        },
        working_directory=paths.ROOT,
        runtime="pyxis",
    )
