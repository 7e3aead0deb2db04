"""Exclusive experiment ownership: the training process holds ``owner.json`` and renews it periodically.

The record is created before any other file and removed at the end. Records of dead owners are taken over: on the
same host by checking the process, in Slurm by querying the job, otherwise by watching whether the record changes.
The record is compared with its previous state by the local clock, because clocks of hosts differ. A queued job also
owns its run: ``encore.run.status.refuse_queued``.
"""

import contextlib
import fcntl
import json
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from encore import files
from encore.errors import EncoreError
from encore.machine import processes
from encore.run import hints
from encore.run.run_folder import Experiment
from encore.slurm import queue

RECORD = "owner.json"
LOCK = ".owner.lock"
RENEWED_SECONDS = 5.0  # Renewal interval
# A record of another host is stale if unchanged for this long; NFS shows changes after up to 60 s.
SILENT_SECONDS = 90.0
WATCH_SECONDS = 0.5  # Between two looks at such a record
_silent: set[str] = set()  # Tokens of owners that were found stale; they are not watched again


@dataclass(frozen=True, kw_only=True)
class Owner:
    host: str
    pid: int
    process_started: int  # Clock ticks since boot, because PIDs are reused
    job: str  # Slurm job, ``12`` or ``12_3``; empty outside of Slurm
    cluster: str  # Slurm's name of the cluster that numbers the job
    token: str  # Distinguishes this owner from any other

    def __str__(self) -> str:
        return queue.job_label(self.job, self.cluster) if self.job else f"process {self.pid} on {self.host}"


def this_process(job: str) -> Owner:
    pid = os.getpid()
    return Owner(
        host=platform.node(),
        pid=pid,
        process_started=processes.start_ticks(pid),
        job=job,
        cluster=queue.this_cluster() if job else "",
        token=secrets.token_hex(8),
    )


@contextlib.contextmanager
def acquire(experiment: Experiment, job: str) -> Iterator[Owner]:
    owner = this_process(job)
    try:
        with _locked(experiment.folder):
            _refuse(experiment, job)
            files.write_json(experiment.folder / RECORD, asdict(owner))
    except OSError as error:
        raise EncoreError(
            f"{experiment.folder} cannot be written: {error.strerror}",
            hint="resume as its owner; check free space and write permission of the file system",
        ) from error
    try:
        yield owner
    finally:
        with contextlib.suppress(OSError), _locked(experiment.folder):
            if _read(experiment) == owner:
                (experiment.folder / RECORD).unlink()


def renew(experiment: Experiment, owner: Owner) -> bool:
    """Renew the record if it is due. Return False if another process took over the experiment.

    The age of the record is not a criterion, because a new owner renews it too. An unreadable record still counts as
    ours.
    """
    current, record = _read(experiment), experiment.folder / RECORD
    if current == owner:
        with contextlib.suppress(OSError):
            # Compare with the local clock only: a file server may date new files by its own clock.
            now = time.time()
            if abs(now - record.stat().st_mtime) >= RENEWED_SECONDS:
                os.utime(record, (now, now))
    return current in (owner, None)


def refuse_owned(experiments: Sequence[Experiment], job: str = "") -> None:
    # Reject experiments that still have to run and have another owner. ``job`` is the job of this process.
    for experiment in experiments:
        if not experiment.has_finished:
            _refuse(experiment, job)


def is_run_here(experiment: Experiment) -> bool:
    # Whether a live process of this host owns the experiment and will report its outcome.
    owner = _read(experiment)
    return owner is not None and owner.host == platform.node() and _is_process(owner)


def _refuse(experiment: Experiment, job: str) -> None:
    owner = _read(experiment)
    activity = "" if owner is None else _activity(owner, experiment, job)
    orphans = processes.left_running(experiment.folder)
    run = experiment.folder.parent
    if activity:
        raise EncoreError(
            f"{owner} {activity} experiment {experiment.number + 1} of {run.name}",
            expected="a run without an active owner",
            hint=f"follow it: {hints.follow(run)}; or end it: {hints.cancel(run)}",
        )
    if orphans:
        numbers = ", ".join(str(process.pid) for process in orphans)
        raise EncoreError(
            f"processes of experiment {experiment.number + 1} still run here without their supervisor: {numbers}",
            expected="a run without an active owner",
            hint=f"end them: {hints.cancel(run)}",
        )


def lost_its_owner(experiment: Experiment) -> bool:
    """Return whether the ``encore run`` of this host that trained the experiment was killed, outside of Slurm."""
    owner = _read(experiment)
    return owner is not None and owner.host == platform.node() and not owner.job and not _is_process(owner)


def _activity(owner: Owner, experiment: Experiment, job: str) -> str:
    # Describe a live owner's activity; empty for a dead one.
    if owner.host == platform.node():
        if _is_process(owner):
            return "is running"
        if not owner.job:
            return ""
    if owner.job:
        if owner.job == job:
            return ""  # before a requeue of this very job
        tasks = queue.query(owner.job, owner.cluster)
        if tasks is not None:
            alive = [task for task in tasks if not task.is_finished]
            if not alive:
                return ""
            return "is queued to resume" if all(task.is_pending for task in alive) else "is running"
    return "is running" if _is_renewed(owner, experiment) else ""


def _is_renewed(owner: Owner, experiment: Experiment) -> bool:
    # Whether the record of a process on another host changes while it is watched.
    if owner.token in _silent:
        return False
    first, end = _stamp(experiment), time.monotonic() + SILENT_SECONDS
    print(f"{owner} has this run: waiting up to {SILENT_SECONDS:g} s to check whether it is alive", file=sys.stderr)
    while time.monotonic() < end:
        time.sleep(WATCH_SECONDS)
        current = _read(experiment)
        if current is not None and (current != owner or _stamp(experiment) != first):
            return True
        if current is None and not (experiment.folder / RECORD).exists():
            return False
    _silent.add(owner.token)
    return False


def _stamp(experiment: Experiment) -> int:
    # Time of the last renewal by the owner's clock, in ns; 0 if the record does not exist.
    # open() makes NFS query its server
    with contextlib.suppress(OSError), (experiment.folder / RECORD).open("rb") as record:
        return os.fstat(record.fileno()).st_mtime_ns
    return 0


def _is_process(owner: Owner) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return (
            processes.is_running(psutil.Process(owner.pid))
            and processes.start_ticks(owner.pid) == owner.process_started
        )
    return False


def _read(experiment: Experiment) -> Owner | None:
    # Return the owner in the record; None if it is missing or malformed.
    try:
        return Owner(**json.loads((experiment.folder / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    # Let one process at a time judge and change the record.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(folder / LOCK, flags, 0o666), "wb") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.lockf(lock, fcntl.LOCK_EX)
        yield
