"""Jobs as Slurm's queue lists them."""

from collections.abc import Iterable

import pytest

from encore.slurm import queue


def job(name: str, state: str, reason: str = "", title: str = "encore", user: str = "", comment: str = "") -> queue.Job:
    return queue.Job(
        name=name,
        number=name.replace("_", "00"),
        state=state,
        nodes=2,
        seconds=60.0,
        submitted="2026-11-20T19:14:27",
        user=user or queue.this_user(),
        reason=reason,
        title=title,
        comment=comment,
    )


def in_queue(monkeypatch: pytest.MonkeyPatch, jobs: Iterable[queue.Job], elsewhere: Iterable[queue.Job] = ()) -> None:
    # Give the cluster ``here`` the queue ``jobs`` and the cluster ``far`` the queue ``elsewhere``
    queues = {"": list(jobs), "--clusters=far": list(elsewhere)}

    def find_jobs(name: str, option: str = "") -> list[queue.Job]:
        return [job for job in queues[option] if name in (job.name, job.number, job.array)]

    functions = {"is_available": lambda: True, "this_cluster": lambda: "here", "all_jobs": lambda: queues[""]}
    for name, function in {**functions, "find_jobs": find_jobs, "finished_jobs": list}.items():
        monkeypatch.setattr(queue, name, function)
