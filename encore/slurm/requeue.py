"""Put the job back into the queue, from where it resumes its run folder."""

import signal

from encore.errors import EncoreError
from encore.slurm import commands
from encore.slurm.allocation import Allocation

WARNING = signal.SIGUSR1  # what slurm/run.sub lets Slurm send before the time limit (sbatch --signal)


def is_done(allocation: Allocation) -> bool:
    """Return whether Slurm has put the job back by itself: preempted, after the loss of a node, or by an operator.

    It counts the restart before it ends the processes (slurmctld, _job_requeue).
    """
    restarts = commands.show_job(allocation.job).get("Restarts", "")
    return restarts.isdigit() and int(restarts) > allocation.restarts


def request(allocation: Allocation, most: int) -> tuple[bool, str]:
    """Requeue the job; return whether it resumes by itself, and the outcome as a message."""
    if is_done(allocation):
        return True, f"Slurm has put job {allocation.name} back in the queue; it resumes when it starts again"
    if allocation.restarts >= most:
        return False, f"requeued {allocation.restarts} times already"
    try:
        commands.call("scontrol", "requeue", allocation.job)
    except EncoreError as error:
        # Slurm ends the job's processes, scontrol among them, which may not live to say that it was done.
        if not is_done(allocation):
            return False, f"not requeued, {error.found}"
    return True, f"job {allocation.name} is back in the queue and resumes when it starts again"
