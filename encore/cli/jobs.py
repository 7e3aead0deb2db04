"""``encore status``, ``encore follow``, ``encore cancel``: show, follow and stop runs and jobs."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from typing_extensions import TypedDict

from encore import paths
from encore.cli import options, progress_display
from encore.cli.layout import console, show, text, write_json
from encore.cli.run import finish
from encore.errors import EncoreError, ExitCode
from encore.results.format import against_targets
from encore.run import control, hints, run_folder, runner, status, workloads
from encore.run.follow import Progress, SlowRankWatch, Tail
from encore.run.status import Row, State
from encore.slurm import cluster as clusters
from encore.slurm import commands, queue

MOST = 20
POLL_SECONDS = 0.5
QUEUE_SECONDS = 5.0  # Time between two questions to Slurm's controller, which all users share
FORECAST_SECONDS = 30.0  # Interval between two forecasts
START_SECONDS = 15.0  # Maximum pause between two experiments
COLOURS: dict[State, str] = {
    "running": "cyan", "queued": "cyan", "starting": "cyan", "reached": "green", "not reached": "yellow",
    "interrupted": "yellow", "cancelled": "yellow", "not started": "yellow", "ended": "yellow",
}  # fmt: skip


class Status(TypedDict):
    """Jobs and runs."""

    results: str  # The folder of the run folders
    note: str  # Reason why the queue cannot be queried; empty if it can
    runs: list[dict[str, Any]]  # Rows, the newest first


def _folder(results: Path | None) -> Path:
    return (results or clusters.load()[0].results or paths.default_results()).absolute()


# -- status ---------------------------------------------------------------------------------------------


def show_status(
    results: options.Results = None,
    everything: Annotated[bool, typer.Option("--all", help="All runs, not only the newest.")] = False,
    as_json: options.Json = False,
) -> None:
    """List jobs and runs with their states.

    Examples:

      encore status                 the newest 20 runs, and all running or queued ones

      encore status --all --json

    States: queued, starting, running, reached, not reached, interrupted, failed, lost (started, but no longer
    running). Jobs without a run folder: cancelled, ended, failed. damaged: the run folder is unreadable.
    """
    folder = _folder(results)
    snapshot = status.ask()
    rows = status.overview(folder, snapshot, None if everything else MOST)
    if as_json:
        write_json("status", Status(results=str(folder), note=snapshot.note, runs=[row.as_json() for row in rows]))
        return
    screen = console(soft_wrap=not rows)
    if snapshot.note:
        screen.print(f"[yellow]warning[/] {escape(snapshot.note)}")
    if not rows:
        screen.print(f"no runs in {folder}")
        return
    with_jobs = any(row.job for row in rows)
    varied = varied_columns(rows)
    columns = (*(["job"] if with_jobs else []), "run", *varied, "state", "nodes", "time")
    cells = (
        (
            *([row.job] if with_jobs else []),
            # Argument for ``follow`` and ``cancel``
            row.run.relative_to(folder) if row.run and row.run.is_relative_to(folder) else row.run,
            *(getattr(row, column) for column in varied),
            Text.assemble((row.state, COLOURS.get(row.state, "red")), text(f" {describe(row)}".rstrip())),
            row.nodes or "",
            None if row.seconds is None else progress_display.clock(row.seconds),
        )
        for row in rows
    )
    show(screen, str(folder), columns, cells, numbers=("nodes", "time"), least=("nodes",), one_line="state")


def varied_columns(rows: Sequence[Row]) -> list[str]:
    defaults = {"user": {queue.this_user()}, "benchmark": set[str](), "partition": set[str]()}
    return [name for name, values in defaults.items() if len(values | {getattr(row, name) for row in rows}) > 1]


def describe(row: Row) -> str:
    # ``quality 0.9259 of 0.95  epoch 3/12  run 2/5  1 reached``, after the reason for a failure: a narrow terminal
    # shows the start.
    is_one = row.run is not None and row.experiment is not None
    number = f"run {(row.experiment or 0) + 1}/{row.experiments}" if is_one else f"{row.experiments} runs"
    parts = (
        row.slow,
        row.reason,
        against_targets(row.qualities, row.targets) if row.qualities else "",
        (row.position or f"epoch {row.epoch or 1:.4g}/{row.epochs}") if row.epochs else "",
        row.forecast.text() if row.forecast and row.forecast.minutes is not None else "",
        number if row.experiments > 1 else "",
        f"{row.reached} reached" if row.experiments > 1 and row.reached else "",
    )
    return "  ".join(filter(None, parts))


# -- follow ---------------------------------------------------------------------------------------------


def follow(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB|RUN]", help="Slurm job, run folder or the start of its name; default: the newest run."
        ),
    ] = None,
    results: options.Results = None,
) -> None:
    """Follow a run until it finishes.

    Examples:

      encore follow                 the newest run

      encore follow 12              the run of a Slurm job, which may be pending

      encore follow 12_3            one array task

      encore follow results/20261120T101500Z-resnet-mxnet-cpu        also a run on Kubernetes

    Ctrl-C stops following; the run continues. Exit codes are the same as for encore run.
    """
    folder = _folder(results)
    subject = control.find_subject(name or str(control.newest(folder).path), folder)
    screen = console(soft_wrap=True)
    notice = Notices(screen)
    try:
        if subject.folder is not None and workloads.is_in_pods(subject.folder):
            _follow_pods(screen, notice, subject.folder)
        run = subject.folder or _wait_for_folder(notice, subject, folder)
        states = _follow_all(screen, notice, subject, run)
    except KeyboardInterrupt:
        again = hints.follow(subject.folder.path) if subject.folder else hints.command("follow", subject.job)
        screen.print(f"stopped following; the run continues. To follow it: {again}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    finish(screen, run, runner.Ending(exit_code(states)), as_json=False)


def exit_code(states: Sequence[State]) -> ExitCode:
    if all(state == "reached" for state in states):
        return ExitCode.REACHED
    if all(state in ("reached", "not reached") for state in states):
        return ExitCode.NOT_REACHED
    return ExitCode.FAILED if {"failed", "lost"} & set(states) else ExitCode.INTERRUPTED


class Notices:
    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._last = ""

    def __call__(self, text: str) -> None:
        if text != self._last:
            self._last = text
            self._screen.print(escape(text))


def _wait_for_folder(notice: Notices, subject: control.Subject, results: Path) -> run_folder.RunFolder:
    # Wait until a job has created its run folder. EncoreError if the job ends before.
    while True:
        snapshot = status.ask(subject.job)
        folder = control.folder_of(subject.job, results, snapshot.jobs)
        if folder is not None:
            return folder
        alive = [job for job in snapshot.jobs if not job.is_finished]
        if snapshot.note:
            notice(snapshot.note)
        elif not alive:
            first = snapshot.jobs[0] if snapshot.jobs else None
            # First task in an array; the array job does not have an output file.
            output = commands.show_job(first.name if first else subject.job).get("StdOut")
            raise EncoreError(
                f"job {subject.job} finished without a run folder in {results}: "
                + (first.state if first else "unknown to Slurm"),
                hint=f"see {output or 'slurm-JOB.out where it was submitted'}; "
                "if the runs are in a different folder: --results DIR",
                exit_code=ExitCode.FAILED,
            )
        elif all(job.is_pending for job in alive):
            notice(_queued(subject.job, alive[0].reason))
        else:
            notice(f"job {subject.job} is running; no run folder in {results} yet")
        time.sleep(QUEUE_SECONDS)


def _queued(job: str, reason: str) -> str:
    return f"job {job} is queued: {reason}" if reason else f"job {job} is queued"


def _follow_all(
    screen: Console, notice: Notices, subject: control.Subject, folder: run_folder.RunFolder
) -> list[State]:
    # Follow the experiments in sequence and return their final states.
    experiments = control.experiments(subject.job, folder, _ask(subject))
    if not experiments:
        folder.metadata()  # refuses a damaged folder
        whose = f" of job {subject.job}" if subject.job else ""
        raise EncoreError(f"{folder.path.name} has no experiments{whose}", hint=f"see: {hints.command('status')}")
    count = len(folder.experiments())
    states: list[State] = []
    with progress_display.RunView(screen) as view:
        for experiment in experiments:
            view.start(f"experiment {experiment.number + 1}/{count}")
            state, reason = _follow_one(view, notice, folder, subject, experiment)
            states.append(state)
            if state in ("reached", "not reached"):
                continue
            notice(f"experiment {experiment.number + 1} {state}" + (f": {reason}" if reason else ""))
            # Array tasks run independently.
            if not status.is_of_array(folder):
                break
    return states


def _ask(subject: control.Subject) -> status.Queue:
    # Query only the job of the subject; empty without Slurm.
    return status.ask(subject.job) if subject.job else status.Queue()


def _follow_one(
    view: progress_display.RunView,
    notice: Notices,
    folder: run_folder.RunFolder,
    subject: control.Subject,
    experiment: run_folder.Experiment,
) -> tuple[State, str]:
    # Follow an experiment until it has finished and will not be resumed by its job.
    tail, progress, slow = Tail(experiment.metrics), Progress(), SlowRankWatch(experiment.folder)
    start = last_query = time.monotonic()
    snapshot, pace, due = _ask(subject), "", start + FORECAST_SECONDS

    def verdict() -> tuple[State, str]:
        job = snapshot.find(status.job_of(folder, experiment, snapshot))
        return status.state_of(experiment, job, snapshot.answers)

    while True:
        for record in tail.read():
            progress.add(record)
        if time.monotonic() > due:
            forecast, due = status.forecast_of(experiment), time.monotonic() + FORECAST_SECONDS
            pace = forecast.text() if forecast and forecast.minutes is not None else ""
        progress.slow = slow.look()
        view.update(progress, pace)
        state, reason = verdict()
        if state in ("reached", "not reached"):
            return state, reason
        if state not in status.ALIVE or time.monotonic() - last_query > QUEUE_SECONDS:
            snapshot, last_query = _ask(subject), time.monotonic()
            state, reason = verdict()
            # A run outside of Slurm may still be between two experiments
            is_early = state == "not started" and time.monotonic() - start < START_SECONDS
            if state not in status.ALIVE and not is_early:
                return state, reason
        if reason:
            notice(_queued(subject.job, reason) if state == "queued" else reason)
        time.sleep(POLL_SECONDS)


def _follow_pods(screen: Console, notice: Notices, folder: run_folder.RunFolder) -> NoReturn:
    # Follow a run on Kubernetes by the log of the rank 0 pod, then exit with the run's exit code.
    experiments = folder.experiments()
    connection, outcomes = workloads.connect(folder), []
    with progress_display.RunView(screen) as view:
        for experiment in experiments:
            view.start(f"experiment {experiment.number + 1}/{len(experiments)}")
            progress, line_counts = Progress(), dict[str, int]()
            while True:
                workload = workloads.look(connection, folder, experiment)
                workloads.settle(folder, experiment, workload)
                if workload.state not in ("waiting", "running") or experiment.has_finished:
                    break
                if workload.state == "running":
                    # Continue after the lines of the pod log that were already shown
                    for number, record in enumerate(workloads.records(connection.log(workload.pod))):
                        if number < line_counts.get(workload.pod, 0):
                            continue
                        line_counts[workload.pod] = number + 1
                        if isinstance(record, dict):
                            progress.add(record)
                            view.update(progress, "")
                        elif record.strip():
                            screen.print(record, markup=False, highlight=False)
                else:
                    notice(_queued(workloads.name_of(folder, experiment), workload.reason))
                time.sleep(POLL_SECONDS)
            state = experiment.state()
            outcomes.append(state.status if state.status != "interrupted" else progress.outcome or state.status)
            if state.status not in run_folder.FINISHED:
                notice(f"experiment {experiment.number + 1} {state.status}: {state.reason}")
    code = exit_code([cast("State", outcome.replace("_", " ")) for outcome in outcomes])
    if any(experiment.state().reason == workloads.RESULTS_THERE for experiment in experiments):
        screen.print("copy the results to this machine, and print them:")
        for line in workloads.copy_commands(folder):
            screen.print(f"  {line}", markup=False, highlight=False)
        raise typer.Exit(code)
    finish(screen, folder, runner.Ending(code), as_json=False)


# -- cancel ---------------------------------------------------------------------------------------------


def cancel(
    name: Annotated[str, typer.Argument(metavar="JOB|RUN", help="Slurm job or run folder.")],
    results: options.Results = None,
    trust_owner: options.TrustOwner = False,
) -> None:
    """Stop a job or run. It writes a checkpoint and can be resumed.

    Examples:

      encore cancel 12              a Slurm job, or all tasks of an array

      encore cancel 12_3            one task

      encore cancel results/20261120T101500Z-resnet-mxnet-cpu
    """
    screen = console(soft_wrap=True)
    for line in control.cancel(control.find_subject(name, _folder(results)), trust_owner):
        screen.print(escape(line))
