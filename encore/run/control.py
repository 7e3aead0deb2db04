"""Resolve JOB and RUN arguments, and cancel jobs and runs."""

import contextlib
import platform
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import psutil

from encore import files
from encore.errors import EncoreError, unknown_name
from encore.machine import processes
from encore.run import follow, hints, ownership, run_folder, runner, status, supervise, workloads
from encore.run.run_folder import Experiment, RunFolder, Status
from encore.slurm import commands, queue

JOB = re.compile(r"(?:job)?(?P<name>\d+(?:_\d+)?)")
STOP_SECONDS = 30.0  # Time for a cancelled run's checkpoint
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Subject:
    """Job, run folder, or both."""

    job: str = ""  # ``12`` or ``12_3``; empty for a run outside of Slurm
    folder: RunFolder | None = None


def experiments(job: str, folder: RunFolder, jobs: status.Queue) -> list[Experiment]:
    # Experiments in a run folder that belong to the job; for an array task only its experiment.
    return [
        experiment
        for experiment in folder.experiments()
        if "_" not in job or status.job_of(folder, experiment, jobs) == job
    ]


def find_subject(text: str, results: Path) -> Subject:
    for path in (Path(text), results / text):
        if (path / "run.json").is_file():
            folder = RunFolder(path.absolute())
            resuming = status.ask().resuming(folder.path)
            return Subject(resuming[0].array if resuming else _last_job(folder), folder)
    match = JOB.fullmatch(text)
    if match is None:
        folders = status.run_folders(results)
        run_names = [folder.path.name for folder in folders]
        if not run_names:
            raise EncoreError(f"no run {text!r}: no runs found in {results}", hint="--results DIR")
        # `encore status` shortens names, but not the time
        starts = [folder.path for folder in folders if folder.path.name.startswith(text)]
        has_time = len(text) >= len("20261120T101500Z")
        if has_time and len(starts) == 1 and (starts[0] / "run.json").is_file():
            return find_subject(str(starts[0]), results)
        raise unknown_name("run", text, run_names)
    jobs = queue.find_jobs(match["name"]) if queue.is_available() else []
    # Only Slurm knows an array task's job number.
    tasks = [job for job in jobs if job.number == match["name"] and job.task is not None]
    job = tasks[0].name if len(tasks) == 1 and tasks[0].array != match["name"] else match["name"]
    folder_found = folder_of(job, results, jobs)
    if not jobs and folder_found is None:
        commands.require()
        raise EncoreError(
            f"no job {job}, and no run folder for it in {results}",
            expected="a job of `squeue --me`, or a run folder",
            hint=f"list all runs: {hints.command('status', '--results', results)}",
        )
    return Subject(job, folder_found)


def _last_job(folder: RunFolder) -> str:
    # The job or array that has the folder; empty outside of Slurm or where it cannot be read.
    with contextlib.suppress(*status.DAMAGE):
        began = [state for experiment in folder.experiments() if (state := experiment.state()).started]
        if began:
            return max(began, key=lambda state: state.started).job.partition("_")[0]
    return status.number_of(folder)


def folder_of(job: str, results: Path, jobs: Sequence[queue.Job] = ()) -> RunFolder | None:
    # A job's newest run folder: in ``results``, or in the results folders of ``jobs``.
    array = job.partition("_")[0]
    resumed = next((queued.resumes for queued in jobs if queued.resumes is not None), None)
    if resumed is not None and (resumed / "run.json").is_file():
        return RunFolder(resumed)
    results_folders = {queued.results for queued in jobs if queued.results is not None} | {results}
    folders = (folder for path in results_folders for folder in status.run_folders(path))
    started = (folder for folder in folders if (folder.path / "run.json").is_file())
    return next((folder for folder in started if array in (status.number_of(folder), _last_job(folder))), None)


def newest(results: Path) -> RunFolder:
    elsewhere = [status.elsewhere(job, results) for job in status.ask().jobs if job.user == queue.this_user()]
    folders = [*status.run_folders(results), *filter(None, elsewhere)]
    runs = [folder for folder in folders if (folder.path / "run.json").is_file()]
    if runs:
        return max(runs, key=lambda run: status.created_at(run.path))
    raise EncoreError(f"no run in {results}", hint="start one with: encore run; or set the folder: --results DIR")


# -- cancel ---------------------------------------------------------------------------------------------


def cancel(subject: Subject, trust_owner: bool = False) -> list[str]:
    """Cancel a job or run. Return messages about the outcome and how to resume.

    Raises:
        EncoreError: nothing to cancel.
    """
    if subject.folder is not None:
        run_folder.refuse_foreign(subject.folder.path, trust_owner)
    if subject.folder is not None and workloads.is_in_pods(subject.folder):
        return workloads.cancel(subject.folder)
    if subject.folder is None or (subject.job and queue.is_available()):
        return _cancel_job(subject)
    return _cancel_run(subject.folder)


def _cancel_job(subject: Subject) -> list[str]:
    commands.require()
    job, folder = subject.job, subject.folder
    tasks = queue.find_jobs(job)
    alive = [task for task in tasks if not task.is_finished]
    if not alive:
        state = f": {tasks[0].state}" if tasks else ""
        raise EncoreError(f"job {job} has ended{state}", hint=_look(folder))
    first = alive[0]
    if first.user != queue.this_user():
        raise EncoreError(f"job {first.name} belongs to {first.user}", expected="a job that belongs to you")
    if folder is None and not first.is_encore_job:
        raise EncoreError(
            f"job {first.name} ({first.title}) was not submitted by Encore",
            expected="a job named encore or encore-..., or with a run folder",
            hint=f"to cancel it anyway: scancel {first.name}",
        )
    commands.call("scancel", job)
    label = f"job {job}" + (f", {len(alive)} tasks" if len(alive) > 1 else "")
    state_text = "in the queue" if all(task.is_pending for task in alive) else "running"
    done = [f"cancelled {label} ({state_text})"]
    if folder is None:
        return [*done, "it does not have a run folder yet: nothing to resume"]
    if state_text == "running":
        done.append("the ranks write a checkpoint if KillWait of Slurm is long enough")
    return [*done, f"resume with: {hints.resume(folder.path)}"]


def _look(folder: RunFolder | None) -> str:
    return hints.inspect(folder.path) if folder else f"see: {hints.command('status', '--all')}"


def _cancel_run(folder: RunFolder) -> list[str]:
    rows = status.rows_of(folder, status.Queue())
    running = [row for row in rows if row.state == "running"]
    if not running:
        state = f"{rows[0].state}, {rows[0].reason}" if rows[0].reason else rows[0].state
        raise EncoreError(f"{folder.path.name} does not run: {state}", hint=_look(folder))
    numbers = {row.experiment for row in running}
    stopped = [_stop(folder, experiment) for experiment in folder.experiments() if experiment.number in numbers]
    return [*stopped, f"resume with: {hints.resume(folder.path)}"]


def _stop(folder: RunFolder, experiment: Experiment) -> str:
    # Send SIGTERM to an experiment's ranks. Return a message with the outcome.
    beats = experiment.folder / "heartbeat"
    ranks = processes.rank_processes(beats)
    unsupervised = ownership.lost_its_owner(experiment)
    if not ranks and not unsupervised:
        hosts = {beat.host for beat in processes.heartbeats(beats)}
        if hosts - {platform.node()}:
            raise EncoreError(f"its ranks run on {', '.join(sorted(hosts))}", hint="cancel it there")
        if hosts:
            return f"nothing to cancel in experiment {experiment.number + 1}: its ranks have ended"
        raise EncoreError(
            "no rank has written a heartbeat yet", hint="try again in a moment, or press Ctrl-C in its terminal"
        )
    for rank in ranks:
        try:
            rank.terminate()
        except psutil.AccessDenied as error:
            raise EncoreError(
                f"process {rank.pid} belongs to {rank.username()}", expected="a run that belongs to you"
            ) from error
        except psutil.NoSuchProcess:
            continue
    end = time.monotonic() + STOP_SECONDS
    while experiment.state().status == "running" and _is_left(experiment) and time.monotonic() < end:
        if unsupervised and not processes.rank_processes(beats):
            break
        time.sleep(POLL_SECONDS)
    if unsupervised:
        _conclude(folder, experiment)
    state = experiment.state()
    summary = f"cancelled experiment {experiment.number + 1}"
    if state.status == "running" and not _is_left(experiment):
        return f"{summary}: its unsupervised ranks have exited"
    if state.status == "running":
        return f"{summary}: SIGTERM sent to {len(ranks)} ranks, which have not exited yet"
    return f"{summary}: {state.status.replace('_', ' ')}, {state.reason}".rstrip(", ")


def _conclude(folder: RunFolder, experiment: Experiment) -> None:
    # Terminate an experiment without supervisor, and record the outcome on its behalf.
    processes.end(processes.left_running(experiment.folder), grace_seconds=supervise.SRUN_SECONDS)
    with contextlib.suppress(EncoreError):
        processes.clean_up(runner.resumed_command(folder, experiment))
    with ownership.acquire(experiment, ""):
        outcome = cast("Status | None", follow.read_progress(experiment.metrics).outcome)
        how = "a checkpoint was written" if outcome == "interrupted" else "without a checkpoint"
        reason = "" if outcome in run_folder.FINISHED else f"cancelled after its encore run was killed, {how}"
        state = replace(experiment.state(), status=outcome or "interrupted", reason=reason, ended=files.utc_now())
        experiment.set_state(state)
        experiment.publish_log()


def _is_left(experiment: Experiment) -> bool:
    # Whether a local process trains or supervises the experiment.
    return bool(ownership.is_run_here(experiment) or processes.rank_processes(experiment.folder / "heartbeat"))
