"""Jobs as Slurm's queue lists them."""

from encore.slurm import queue
from encore.slurm.queue import Job


def job(name: str, state: str, reason: str = "", title: str = "encore", user: str = "") -> Job:
    number = name.replace("_", "00")
    return Job(
        name=name,
        number=number,
        state=state,
        nodes=2,
        seconds=60.0,
        submitted="2026-11-20T19:14:27",
        user=user or queue.this_user(),
        reason=reason,
        title=title,
    )
