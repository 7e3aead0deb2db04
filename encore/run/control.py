"""What the user means by JOB or RUN, and how it is cancelled."""

from __future__ import annotations

import contextlib
import os
import platform
import pwd
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from encore import names
from encore.errors import EncoreError
from encore.machine import processes
from encore.run import status
from encore.run.run_folder import Experiment, RunFolder
from encore.slurm import commands, queue
from encore.slurm.queue import Job

JOB = re.compile(r"(?:job)?(?P<name>\d+(?:_\d+)?)")
STOP_SECONDS = 30.0
"""Longest wait for the checkpoint of a cancelled run."""
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Subject:
    """What a command is about; one of the two is there, or both."""

    job: str = ""
    """``12`` or ``12_3``; empty for a run outside of Slurm."""
    folder: RunFolder | None = None


def experiments(job: str, folder: RunFolder, jobs: status.Queue) -> list[Experiment]:
    """Return the experiments of a run folder that are the job's: for a task of an array its own."""
    every = folder.experiments()
    return [each for each in every if "_" not in job or status.job_of(folder, each, jobs) == job]


def named(text: str, results: Path) -> Subject:
    """Return the job or run of this name; EncoreError if ``text`` can be neither."""
    for path in (Path(text), results / text):
        if (path / "run.json").is_file():
            folder = RunFolder(path.absolute())
            return Subject(_last_job(folder), folder)
    match = JOB.fullmatch(text)
    if match is None:
        known = [folder.path.name for folder in status.run_folders(results)]
        if not known:
            raise EncoreError(f"no run {text!r}: there are none in {results}", remedy="--results DIR")
        raise names.unknown("run", text, known)
    found = queue.numbered(match["name"]) if queue.is_there() else []
    # A task of an array has a number of its own, which only Slurm knows.
    mine = [job for job in found if job.number == match["name"] and job.task is not None]
    job = mine[0].name if len(mine) == 1 and mine[0].array != match["name"] else match["name"]
    folder_found = folder_of(job, results)
    if not found and folder_found is None:
        commands.require()
        raise EncoreError(
            f"no job {job}, and no run folder of it in {results}",
            expected="a job of `squeue --me`, or a run folder",
            remedy="see what there is with: encore status",
        )
    return Subject(job, folder_found)


def _last_job(folder: RunFolder) -> str:
    """Return the job or array that has the folder; empty outside of Slurm or where it cannot be read."""
    with contextlib.suppress(*status.DAMAGE):
        began = [state for each in folder.experiments() if (state := each.state()).started]
        if began:
            return max(began, key=lambda state: state.started).job.partition("_")[0]
    return status.number_of(folder)


def folder_of(job: str, results: Path) -> RunFolder | None:
    """Return the newest run folder in which a job works."""
    array = job.partition("_")[0]
    for folder in status.run_folders(results):
        if (folder.path / "run.json").is_file() and array in (status.number_of(folder), _last_job(folder)):
            return folder
    return None


def newest(results: Path) -> RunFolder:
    """Return the newest run; EncoreError if there is none."""
    for folder in status.run_folders(results):
        if (folder.path / "run.json").is_file():
            return folder
    raise EncoreError(f"no run in {results}", remedy="start one with: encore run; or name the folder: --results DIR")


# -- cancel ---------------------------------------------------------------------------------------------


def cancel(subject: Subject) -> list[str]:
    """End a job or run; return what was done and how to resume. EncoreError if there is nothing to end."""
    if subject.job and (subject.folder is None or queue.is_there()):
        return _cancel_job(subject)
    if subject.folder is None:
        raise EncoreError("neither a job nor a run to cancel")
    return _cancel_run(subject.folder)


def _cancel_job(subject: Subject) -> list[str]:
    commands.require()
    job, folder = subject.job, subject.folder
    found = queue.numbered(job)
    alive = [each for each in found if not each.has_ended]
    if not alive:
        state = f": {found[0].state}" if found else ""
        raise EncoreError(f"job {job} has ended{state}", remedy=_look(folder))
    _refuse_others(alive[0], folder)
    commands.call("scancel", job)
    what = f"job {job}" + (f", {len(alive)} tasks" if len(alive) > 1 else "")
    where = "in the queue" if all(each.waits for each in alive) else "running"
    done = [f"cancelled {what} ({where})"]
    if folder is None:
        return [*done, "it has no run folder yet: nothing is left of it"]
    if where == "running":
        done.append("its ranks write a checkpoint if Slurm leaves them the time (KillWait)")
    return [*done, f"resume with: sbatch -N {alive[0].nodes} slurm/run.sub --resume {_quoted(folder)}"]


def _look(folder: RunFolder | None) -> str:
    return f"see what came of it: encore follow {_quoted(folder)}" if folder else "see: encore status --all"


def _quoted(folder: RunFolder) -> str:
    return shlex.quote(str(folder.path))


def _refuse_others(job: Job, folder: RunFolder | None) -> None:
    if job.user != this_user():
        raise EncoreError(f"job {job.name} belongs to {job.user}", expected="a job of your own")
    if folder is None and not job.is_encores:
        raise EncoreError(
            f"job {job.name} ({job.title}) is none of Encore's",
            expected="a job named encore or encore-..., or with a run folder",
            remedy=f"if you mean it: scancel {job.name}",
        )


def this_user() -> str:
    """Return the name of the user, as squeue shows it."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _cancel_run(folder: RunFolder) -> list[str]:
    rows = status.rows_of(folder, status.Queue())
    running = [row for row in rows if row.state == "running"]
    if not running:
        state = f"{rows[0].state}, {rows[0].reason}" if rows[0].reason else rows[0].state
        raise EncoreError(f"{folder.path.name} does not run: {state}", remedy=_look(folder))
    numbers = {row.experiment for row in running}
    stopped = [_stop(each) for each in folder.experiments() if each.number in numbers]
    return [*stopped, f"resume with: encore run --resume {_quoted(folder)}"]


def _stop(experiment: Experiment) -> str:
    """Send SIGTERM to the ranks of an experiment; return how it ended."""
    beats = experiment.folder / "heartbeat"
    ranks = processes.rank_processes(beats)
    if not ranks:
        hosts = sorted({beat.host for beat in processes.heartbeats(beats)} - {platform.node()})
        if hosts:
            raise EncoreError(f"its ranks run on {', '.join(hosts)}", remedy="cancel it there")
        raise EncoreError("no rank has written a heartbeat yet", remedy="wait a moment, or press Ctrl-C where it runs")
    for rank in ranks:
        try:
            rank.terminate()
        except psutil.AccessDenied as error:
            raise EncoreError(
                f"process {rank.pid} belongs to {rank.username()}", expected="a run of your own"
            ) from error
        except psutil.NoSuchProcess:
            continue
    end = time.monotonic() + STOP_SECONDS
    while experiment.state().status == "running" and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    state = experiment.state()
    what = f"cancelled experiment {experiment.number + 1}"
    if state.status == "running":
        return f"{what}: {len(ranks)} ranks were sent SIGTERM and have not reported their end"
    return f"{what}: {state.status.replace('_', ' ')}, {state.reason}".rstrip(", ")
