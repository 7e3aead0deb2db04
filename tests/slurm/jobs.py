"""Jobs as Slurm's queue lists them."""

from collections.abc import Iterable

import pytest

from encore.slurm import queue
from encore.slurm.queue import Job


def job(name: str, state: str, reason: str = "", title: str = "encore", user: str = "", comment: str = "") -> Job:
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
        comment=comment,
    )


def in_queue(monkeypatch: pytest.MonkeyPatch, jobs: Iterable[Job], elsewhere: Iterable[Job] = ()) -> None:
    """Let this cluster, which is called ``here``, have these jobs, and another one those ``elsewhere``."""
    known = {"": list(jobs), "--clusters=far": list(elsewhere)}

    def numbered(name: str, where: str = "") -> list[Job]:
        return [each for each in known[where] if name in (each.name, each.number, each.array)]

    answers = {"is_there": lambda: True, "this_cluster": lambda: "here", "everyone": lambda: known[""]}
    for name, answer in {**answers, "numbered": numbered, "accounted": list}.items():
        monkeypatch.setattr(queue, name, answer)
