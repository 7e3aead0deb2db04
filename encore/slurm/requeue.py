"""Put the job back into the queue, from where it resumes its run folder."""

from __future__ import annotations

import signal
from pathlib import Path

from encore.errors import EncoreError
from encore.slurm import commands
from encore.slurm.allocation import Allocation

WARNING = signal.SIGUSR1
"""What slurm/run.sub lets Slurm send before the time limit (sbatch --signal)."""


def request(allocation: Allocation, most: int, folder: Path) -> str:
    """Requeue the job; return what came of it, for the user to read."""
    if allocation.restarts >= most:
        return f"requeued {allocation.restarts} times already; resume with: {_resume_command(allocation, folder)}"
    try:
        commands.call("scontrol", "requeue", allocation.job)
    except EncoreError as error:
        return f"not requeued, {error.found}; resume with: {_resume_command(allocation, folder)}"
    return f"job {allocation.name} is back in the queue and resumes when it starts again"


def _resume_command(allocation: Allocation, folder: Path) -> str:
    return f"sbatch -N {len(allocation.nodes)} slurm/run.sub --resume {folder}"
