"""States of runs and jobs, from run folders, the Slurm queue and running processes."""

import contextlib
import os
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from encore import catalogue, files
from encore.errors import EncoreError
from encore.machine import processes
from encore.results.compare.expected import Forecast
from encore.results.logs.run_log import read_run
from encore.run import evaluate, follow, hints, ownership, run_folder, workloads
from encore.run.run_folder import Experiment, ExperimentState, RunFolder
from encore.slurm import commands, queue
from encore.slurm.queue import Job

State = Literal[
    "queued", "starting", "running", "reached", "not reached", "interrupted", "failed", "lost",
    "not started", "cancelled", "ended", "damaged",
]  # fmt: skip
ALIVE: tuple[State, ...] = ("queued", "starting", "running")

SILENT_SECONDS = 15.0  # Telemetry is written once per second; a run on this machine without it for longer has ended
# Limit for other machines, whose files are visible with a delay (NFS: up to 60 s).
SILENT_SECONDS_ELSEWHERE = 90.0
CLOCKS_APART_SECONDS = 3600.0  # Clocks of two machines differ by less: a run that seems silent for less is watched
WATCH_SECONDS = 3.0  # Longer than the heartbeat interval of a live rank
UNSUPERVISED = "its encore run was killed and its ranks still run: encore cancel ends them"
# Run folder suffix in a Slurm job. Further runs in the job are numbered.
JOB_MARK = re.compile(r"-job(\d+)(?:-\d+)?$")

# Exceptions raised when a file has unexpected content.
DAMAGE = (OSError, ValueError, TypeError, KeyError, AttributeError, EncoreError)


@dataclass(frozen=True)
class Queue:
    """Snapshot of all users' jobs, as far as Slurm shows them (PrivateData in slurm.conf)."""

    jobs: tuple[Job, ...] = ()
    answers: bool = False  # Whether Slurm was reachable; if not, a missing job is not evidence
    note: str = ""

    def find(self, name: str) -> Job | None:
        return next((job for job in self.jobs if name and name in (job.name, job.number)), None)

    def tasks(self, array: str) -> list[Job]:
        tasks = [job for job in self.jobs if job.array == array and job.task is not None]
        return sorted(tasks, key=lambda job: job.task or 0)

    def resuming(self, run: Path) -> list[Job]:
        return [job for job in self.jobs if job.resumes == run and not job.is_finished]


@dataclass(frozen=True, kw_only=True)
class Row:
    state: State
    when: float  # Creation or submission time, Unix seconds
    job: str = ""
    run: Path | None = None
    reason: str = ""
    experiment: int | None = None  # Experiment of the progress, from 0; None before the first one starts
    experiments: int = 0
    reached: int = 0  # Number of experiments that reached the target
    epoch: float = 0
    epochs: int = 0
    position: str = ""  # Progress in samples, for runs of one epoch
    qualities: Mapping[str, float] = field(default_factory=dict)  # Results of the last evaluation
    targets: Mapping[str, float] = field(default_factory=dict)
    nodes: int | None = None
    seconds: float | None = None  # Time that it has run, or waited so far in the queue
    user: str = ""  # Owner of the run folder or submitter of the job
    benchmark: str = ""
    partition: str = ""  # Partition of the job; empty outside Slurm
    forecast: Forecast | None = None  # Predicted time to target of a running experiment
    slow: str = ""  # Slow rank that blocks a running experiment

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "job": self.job or None}


def ask(job: str = "") -> Queue:
    # Query the queue, or one job or array. Empty without Slurm.
    try:
        jobs = queue.find_jobs(job) if job else queue.all_jobs()
    except EncoreError as error:
        return Queue(note=f"cannot query the queue: {error.found}")
    return Queue(tuple(jobs), answers=queue.is_available())


def refuse_queued(folder: RunFolder, experiments: Sequence[Experiment], job: str = "") -> None:
    """Reject a run that a queued job trains or will resume.

    ``job`` is the job of this process, empty on a login node. Between a requeue and the next start no process owns
    the run, but the job does: resuming it elsewhere would make the job start with a finished or foreign run.
    """
    unfinished = [experiment for experiment in experiments if not experiment.has_finished]
    if not queue.is_available():
        return
    is_jobs = any(experiment.state().job for experiment in unfinished) or bool(folder.metadata().get("slurm"))
    jobs = ask()
    if jobs.note:
        # Slurm's commands may be installed on a machine outside any cluster.
        if is_jobs and "configuration source" not in jobs.note:
            raise EncoreError(
                jobs.note, expected="an answer from Slurm about jobs of this run", hint="try again when Slurm responds"
            )
        return
    # A started job is not blocked by other queued tasks or jobs that resume the same run.
    claims = [] if job else jobs.resuming(folder.path)
    for experiment in unfinished:
        state = experiment.state()
        name = state.job or ("" if job else job_of(folder, experiment, jobs))
        if not name or name == job:
            continue
        cluster = state.cluster or str((folder.metadata().get("slurm") or {}).get("cluster", ""))
        answer = queue.query(name, cluster)
        if answer == [] and is_hidden(_owner(experiment.folder)):
            raise EncoreError(
                f"cannot check whether {queue.job_label(name, cluster)} still has {folder.path.name}: Slurm hides "
                "jobs of other users (PrivateData)",
                expected="a run that belongs to you",
                hint=f"let {_owner(experiment.folder)} resume it",
            )
        claims += [claim for claim in answer or () if not claim.is_finished]
    if claims:
        first = claims[0]
        activity = "is queued to resume" if first.is_pending else f"is in the queue ({first.state}) and has"
        raise EncoreError(
            f"{queue.job_label(first.name, queue.this_cluster())}, of {first.user}, {activity} {folder.path.name}",
            expected="a run without an active job",
            hint=f"watch it: {hints.command('follow', first.name)}; or cancel it: "
            f"{hints.command('cancel', first.name)}",
        )


def is_hidden(user: str) -> bool:
    # Whether Slurm hides this user's jobs from the caller (PrivateData in slurm.conf).
    hidden = commands.setting("PrivateData").split(",")
    return user != queue.this_user() and os.getuid() != 0 and bool({"jobs", "all"} & set(hidden))


# -- one experiment -------------------------------------------------------------------------------------


def state_of(experiment: Experiment, job: Job | None, answers: bool) -> tuple[State, str]:
    state = experiment.state()
    if state.status in run_folder.FINISHED:
        return ("reached" if state.status == "reached" else "not reached"), ""
    if job is not None and job.is_pending:
        return "queued", job.reason
    if state.status == "failed":
        return "failed", state.reason
    in_job = job is not None and not job.is_finished
    if state.status == "running":
        unseen = job is None and _owner(experiment.folder) != queue.this_user()
        if not in_job and ownership.lost_its_owner(experiment):
            orphans = processes.left_running(experiment.folder)
            return ("running", UNSUPERVISED) if orphans else ("lost", _why_lost(state, job))
        # PrivateData in slurm.conf hides other users' jobs: then a job that is not shown may run.
        job_ended = bool(state.job) and answers and (job is None or job.is_finished)
        if in_job or ((unseen or not job_ended) and is_alive(experiment)):
            return "running", ""
        return "lost", _why_lost(state, job)
    # An interrupted experiment in a running job is shutting down or resuming after a requeue.
    if in_job:
        return "starting", ""
    if state.status == "interrupted":
        return "interrupted", state.reason
    return "not started", f"Slurm: {job.state}" if job is not None else ""


def _why_lost(state: ExperimentState, job: Job | None) -> str:
    if job is not None:
        return f"Slurm: {job.state}"
    return f"job {state.job} no longer exists" if state.job else "its processes have exited"


def _owner(path: Path) -> str:
    return files.user_name(path.stat().st_uid)


def _activities(experiment: Experiment) -> list[float]:
    # The Unix times of heartbeats and records.
    times = [max(beat.time, beat.alive) for beat in processes.heartbeats(experiment.folder / "heartbeat")]
    for name in ("telemetry.jsonl", "state.json", "metrics.jsonl"):
        with contextlib.suppress(OSError):
            times.append((experiment.folder / name).stat().st_mtime)
    return times


def is_alive(experiment: Experiment) -> bool:
    folder = experiment.folder / "heartbeat"
    if processes.rank_processes(folder):
        return True
    is_here, activities = (
        {beat.host for beat in processes.heartbeats(folder)} == {platform.node()},
        _activities(experiment),
    )
    silent = abs(time.time() - max(activities, default=0.0))
    if is_here or silent < SILENT_SECONDS_ELSEWHERE or silent > CLOCKS_APART_SECONDS:
        return silent < (SILENT_SECONDS if is_here else SILENT_SECONDS_ELSEWHERE)
    end = time.monotonic() + WATCH_SECONDS
    while _activities(experiment) == activities and time.monotonic() < end:
        time.sleep(WATCH_SECONDS / 10)
    return _activities(experiment) != activities


def _progress(row: Row) -> Row:
    # Add the progress of the experiment to the row; unchanged if it cannot be read.
    if row.run is None or row.experiment is None:
        return row
    with contextlib.suppress(*DAMAGE):
        experiment = Experiment(row.experiment, row.run / f"experiment_{row.experiment}")
        benchmark = catalogue.choose(RunFolder(row.run).metadata()["name"]).benchmark
        summary = evaluate.evaluate_experiment(experiment, benchmark)
        if summary.planned_epochs:
            row = replace(
                row,
                epoch=summary.epochs,
                epochs=summary.planned_epochs,
                qualities=summary.qualities,
                targets=summary.targets,
                position=summary.position if summary.planned_epochs == 1 else "",
            )
            if row.state == "running":
                row = replace(row, forecast=forecast_of(experiment), slow=follow.slow_rank(experiment.folder))
    return row


def forecast_of(experiment: Experiment) -> Forecast | None:
    """Predict when a running experiment reaches its target; None if the log has too little data."""
    # Imported here because NumPy takes 0.1 s to load and most runs have finished.
    from encore.results.compare.forecast import forecast_runs

    run = experiment.folder.parent
    finished = [read_run(path) for path in sorted(run.glob("result_*.txt"))]
    name = f"{experiment.folder.name}/"
    return next((forecast for forecast in forecast_runs(finished, run) if forecast.run.startswith(name)), None)


# -- one run --------------------------------------------------------------------------------------------


def number_of(folder: RunFolder) -> str:
    # Number of the Slurm job that created the folder; empty outside Slurm.
    match = JOB_MARK.search(folder.path.name)
    return match.group(1) if match else ""


def is_of_array(folder: RunFolder) -> bool:
    return "_" in str((folder.metadata().get("slurm") or {}).get("job", ""))


def job_of(folder: RunFolder, experiment: Experiment, jobs: Queue) -> str:
    """Return the name of the experiment's last or future job; empty outside Slurm."""
    state = experiment.state()
    recorded, number = state.job, number_of(folder)
    if state.status not in run_folder.FINISHED:
        resuming = [job for job in jobs.resuming(folder.path) if job.task in (None, experiment.number)]
        if resuming and recorded not in {job.name for job in jobs.jobs if not job.is_finished}:
            return resuming[0].name
    if recorded or not number or not is_of_array(folder):
        return recorded or number
    tasks = jobs.tasks(number)
    if len(tasks) == len(folder.experiments()):
        return tasks[experiment.number].name
    return f"{number}_{experiment.number}"


def rows_of(folder: RunFolder, jobs: Queue) -> list[Row]:
    # One row per run, or per array task; without progress.
    try:
        experiments = folder.experiments()
        groups = [[experiment] for experiment in experiments] if is_of_array(folder) else [experiments]
        return [_row(folder, group, jobs) for group in groups]
    except DAMAGE as error:
        text = error.found if isinstance(error, EncoreError) else f"{type(error).__name__}: {error}"
        return [Row(state="damaged", when=created_at(folder.path), job=number_of(folder), run=folder.path, reason=text)]


def _row(folder: RunFolder, experiments: Sequence[Experiment], jobs: Queue) -> Row:
    if not experiments:
        raise EncoreError("no experiments found")
    verdicts = [
        (member, name, *state_of(member, jobs.find(name), jobs.answers))
        for member, name in zip(experiments, [job_of(folder, member, jobs) for member in experiments], strict=True)
    ]
    reached = sum(state == "reached" for _, _, state, _ in verdicts)
    experiment, name, state, reason = _decisive(verdicts)
    states = [member.state() for member in experiments]
    job, end = jobs.find(name), time.time() if state in ALIVE else 0.0
    if state == "queued" and job is not None:
        seconds: float | None = end - job.submitted_at
    else:
        seconds = _seconds(
            states, end or max((time for member in experiments for time in _activities(member)), default=0.0)
        )
    return Row(
        state=state,
        when=created_at(folder.path),
        job=name,
        run=folder.path,
        reason=reason,
        experiment=None if state == "not started" else experiment.number,
        experiments=len(folder.experiments()),
        reached=reached,
        nodes=folder.metadata().get("nodes"),
        seconds=seconds,
        user=_owner(folder.path),
        benchmark=str(folder.metadata()["name"]),
        partition=job.partition if job else str((folder.metadata().get("slurm") or {}).get("partition") or ""),
    )


Verdict = tuple[Experiment, str, State, str]

# The first of these states that an experiment has is the state of the run.
ORDER: tuple[State, ...] = (
    "running", "failed", "lost", "interrupted", "starting", "queued", "not started", "not reached", "reached",
)  # fmt: skip


def _decisive(verdicts: Sequence[Verdict]) -> Verdict:
    decisive = min(verdicts, key=lambda entry: ORDER.index(entry[2]))
    experiment, name, state, _ = decisive
    # If the process exited between two experiments, the rest were lost.
    if state == "not started" and any(entry[2] in ("reached", "not reached") for entry in verdicts):
        return experiment, name, "interrupted", f"experiment {experiment.number + 1} was never started"
    if state in ("reached", "not reached"):
        last = verdicts[-1]
        return last[0], last[1], state, ""
    return decisive


def _seconds(states: Sequence[ExperimentState], otherwise: float) -> float | None:
    # Seconds from the first start to the last end; ``otherwise`` replaces a missing end.
    begun = [state for state in states if state.started]
    starts = [files.unix_time(state.started) or otherwise for state in begun]
    ends = [files.unix_time(state.ended) or otherwise for state in begun]
    return max(max(ends) - min(starts), 0.0) if begun else None


def created_at(path: Path) -> float:
    """Return a run folder's creation time from its name, else from its files."""
    with contextlib.suppress(ValueError):
        stamp = datetime.strptime(path.name.partition("-")[0], run_folder.STAMP)
        return stamp.replace(tzinfo=timezone.utc).timestamp()
    for candidate in (path / "run.json", path):
        with contextlib.suppress(OSError):
            return candidate.stat().st_mtime
    return 0.0


def run_folders(results: Path) -> list[RunFolder]:
    """Return everything in ``results``, and in the studies there, that is or was a run folder, the newest first."""
    # A study has one folder per point, which contains the run folder of the point.
    parents = [results, *(point for study in results.glob("*/study.json") for point in study.parent.iterdir())]
    paths = [path for parent in parents for path in parent.glob("[!.]*") if _is_run(path)]
    return [RunFolder(path) for path in sorted(paths, key=lambda path: (-created_at(path), path.name))]


def elsewhere(job: Job, results: Path) -> RunFolder | None:
    """Return the run folder that a job created in a different results folder, named in the job's comment."""
    if job.resumes is not None:
        return RunFolder(job.resumes) if job.resumes.parent != results and _is_run(job.resumes) else None
    if job.results is None or job.results == results:
        return None
    return next((folder for folder in run_folders(job.results) if number_of(folder) == job.array), None)


def _is_run(path: Path) -> bool:
    return (path / "run.json").exists() or (path / "experiment_0").is_dir()


# -- overview -----------------------------------------------------------------------------------------


def overview(results: Path, jobs: Queue, limit: int | None) -> list[Row]:
    """Return all that lives, and ``limit`` of the rest (None: all); the newest first."""
    folders = run_folders(results)
    jobs = in_pods(folders, jobs)
    rows = [row for folder in folders for row in rows_of(folder, jobs)]
    listed = {row.job.partition("_")[0] for row in rows if row.job}
    listed |= {number for folder in folders for number in _jobs_of(folder)}
    present = {job.name for job in jobs.jobs}
    finished = [job for job in queue.finished_jobs() if job.name not in present]
    # Runs in a point's folder result from its jobs: a job cancelled in the queue has a successor.
    here, me = {folder.path for folder in folders}, queue.this_user()
    points = {folder.path.parent for folder in folders} - {results}
    unlisted = [
        job
        for job in (*jobs.jobs, *finished)
        if job.array not in listed
        and job.resumes not in here
        and not (job.is_finished and job.results in points)
        and (job.user == me or results in (job.results, *(job.results.parents if job.results else ())))
    ]
    made_elsewhere = {job.array: folder for job in unlisted if (folder := elsewhere(job, results)) is not None}
    # Several jobs may have resumed the same run.
    runs = {folder.path: folder for folder in made_elsewhere.values()}
    rows += [row for folder in runs.values() for row in rows_of(folder, jobs)]
    rows += without_folder([job for job in unlisted if job.array not in made_elsewhere])
    # Array tasks have equal times: the sort is stable.
    rows.sort(key=lambda row: -row.when)
    visible = [row for index, row in enumerate(rows) if limit is None or index < limit or row.state in ALIVE]
    return [_progress(row) for row in visible]


def in_pods(folders: Sequence[RunFolder], jobs: Queue) -> Queue:
    """Add the workloads of Kubernetes runs to the queue, after updating their states."""
    workload_jobs, note = workloads.jobs_of(folders)
    return replace(jobs, jobs=(*jobs.jobs, *workload_jobs), note=jobs.note or note)


def _jobs_of(folder: RunFolder) -> set[str]:
    # Numbers of all jobs and arrays known to have worked on a run.
    numbers = {number_of(folder)}
    for experiment in folder.experiments():
        with contextlib.suppress(*DAMAGE):
            numbers.add(experiment.state().job.partition("_")[0])
    return numbers - {""}


def without_folder(jobs: Iterable[Job]) -> list[Row]:
    # Encore's jobs without a visible run folder, grouped by array.
    groups: dict[tuple[str, State, str], list[Job]] = {}
    for job in jobs:
        if job.is_encore_job:
            groups.setdefault((job.array, *_of_job(job)), []).append(job)
    return [
        Row(
            state=state,
            when=first.submitted_at,
            job=array if rest else first.name,
            reason=reason,
            experiments=1 + len(rest),
            nodes=first.nodes,
            seconds=time.time() - first.submitted_at if state == "queued" else first.seconds,
            user=first.user,
            benchmark=first.title.removeprefix(queue.NAME).lstrip("-"),
            partition=first.partition,
        )
        for (array, state, reason), (first, *rest) in groups.items()
    ]


def _of_job(job: Job) -> tuple[State, str]:
    if job.is_pending:
        return "queued", job.reason
    if not job.is_finished:
        return "starting", "no run folder yet"
    if job.resumes is not None:
        return "cancelled" if job.state == "CANCELLED" else "ended", f"was to resume {job.resumes}; Slurm: {job.state}"
    if job.state == "CANCELLED":
        return "cancelled", f"no run folder in {job.results}" if job.results else "its run folder, if any, is elsewhere"
    if job.results is None:
        # The result is only in the run folder.
        return "ended", f"Slurm: {job.state}; its run folder, if any, is elsewhere"
    return "failed", f"no run folder in {job.results}; Slurm: {job.state}"
