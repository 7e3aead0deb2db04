"""The `apptainer` runtime: an image file, run by the caller himself."""

from __future__ import annotations

from encore import paths
from encore.containers.renderers import container as containers
from encore.containers.renderers.container import Container
from encore.job import Command, Job


def render(job: Job, container: Container) -> Command:
    """Return the job as ``apptainer run``: network, memory and processes are the host's unless asked otherwise."""
    binds = []
    for mount in job.mounts:
        binds += ["--bind", f"{mount.source}:{mount.target}:{'ro' if mount.read_only else 'rw'}"]
    inside = dict(containers.inside(job, container))
    home = inside.pop("HOME")
    # Apptainer hands APPTAINERENV_X on as X; --cleanenv stops everything else.
    passed = {f"APPTAINERENV_{name}": value for name, value in {**job.environment, **inside}.items()}
    client = containers.client_environment(job, container)
    return Command(
        argv=(
            *job.outer,
            container.program or "apptainer",
            "run",
            # A task of srun has the job's own environment already, and what Slurm set for this rank alone.
            *([] if job.outer else ["--cleanenv"]),
            "--home",
            home,
            "--pwd",
            containers.CODE,
            *(["--nv"] if job.gpus else []),
            *binds,
            container.image,
            *job.argv,
        ),
        environment={**client, **passed},
        working_directory=paths.ROOT,
        runtime="apptainer",
    )
