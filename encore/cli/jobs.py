"""``encore status``, ``encore follow``, ``encore cancel``: see and end what runs or waits."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from typing_extensions import TypedDict

from encore import paths
from encore.cli import live, options
from encore.cli.layout import console, show, text, write_json
from encore.cli.run import finish
from encore.errors import EncoreError, ExitCode
from encore.kubernetes.api import Connection
from encore.results.format import against_targets
from encore.run import control, hints, run_folder, runner, status, workloads
from encore.run.follow import Progress, SlowRankWatch, Tail
from encore.run.status import Row, State
from encore.slurm import cluster as clusters
from encore.slurm import commands, queue

MOST = 20
POLL_SECONDS = 0.5
QUEUE_SECONDS = 5.0  # Time between two questions to Slurm's controller, which all users share
FORECAST_SECONDS = 30.0  # Between two forecasts of a run that is followed
START_SECONDS = 15.0  # Longest time from the end of an experiment to the start of the next one
COLOURS: dict[State, str] = {
    "running": "cyan", "queued": "cyan", "starting": "cyan", "reached": "green", "not reached": "yellow",
    "interrupted": "yellow", "cancelled": "yellow", "not started": "yellow", "ended": "yellow",
}  # fmt: skip


class Status(TypedDict):
    """Jobs and runs."""

    results: str  # The folder of the run folders
    note: str  # Why the queue cannot be seen; else empty
    runs: list[dict[str, Any]]  # Rows, the newest first


def _folder(results: Path | None) -> Path:
    return (results or clusters.load()[0].results or paths.default_results()).absolute()


# -- status ---------------------------------------------------------------------------------------------


def show_status(
    results: options.Results = None,
    everything: Annotated[bool, typer.Option("--all", help="All runs, not only the newest.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show jobs and runs: queued, running, ended and how.

    Examples:

      encore status                 the newest 20 runs, and all that run or wait

      encore status --all --json

    States: queued, starting, running, reached, not reached, interrupted, failed, lost (begun, and nothing runs any
    more); before there was a run folder: cancelled, ended, failed; damaged: the run folder cannot be read.
    """
    folder = _folder(results)
    seen = status.ask()
    rows = status.overview(folder, seen, None if everything else MOST)
    if as_json:
        content: Status = {"results": str(folder), "note": seen.note, "runs": [row.as_json() for row in rows]}
        write_json("status", content)
        return
    screen = console(soft_wrap=not rows)
    if seen.note:
        screen.print(f"[yellow]warning[/] {escape(seen.note)}")
    if not rows:
        screen.print(f"no runs in {folder}")
        return
    with_jobs = any(row.job for row in rows)
    varied = varied_columns(rows)
    columns = (*(["job"] if with_jobs else []), "run", *varied, "state", "nodes", "time")
    cells = (
        (
            *([row.job] if with_jobs else []),
            _name(row.run, folder) if row.run else "",
            *(getattr(row, each) for each in varied),
            Text.assemble((row.state, COLOURS.get(row.state, "red")), text(f" {describe(row)}".rstrip())),
            row.nodes or "",
            None if row.seconds is None else live.clock(row.seconds),
        )
        for row in rows
    )
    show(screen, str(folder), columns, cells, numbers=("nodes", "time"), least=("nodes",), one_line="state")


def varied_columns(rows: Sequence[Row]) -> list[str]:
    known = {"user": {queue.this_user()}, "benchmark": set[str](), "partition": set[str]()}
    return [name for name, own in known.items() if len(own | {getattr(row, name) for row in rows}) > 1]


def _name(run: Path, results: Path) -> str:
    # What ``follow`` and ``cancel`` take: by the results folder, or the whole path of a run elsewhere.
    return str(run.relative_to(results)) if run.is_relative_to(results) else str(run)


def describe(row: Row) -> str:
    # ``quality 0.9259 of 0.95  epoch 3/12  run 2/5  1 reached``, after the reason for a failure: a narrow terminal
    # shows the start.
    parts = [against_targets(row.qualities, row.targets)] if row.qualities else []
    if row.epochs:
        parts.append(f"epoch {row.epoch or 1:.4g}/{row.epochs}")
    if row.forecast and row.forecast.minutes is not None:
        parts.append(row.forecast.text())
    if row.experiments > 1:
        single = row.run is not None and row.experiment is not None
        parts.append(f"run {(row.experiment or 0) + 1}/{row.experiments}" if single else f"{row.experiments} runs")
    if row.experiments > 1 and row.reached:
        parts.append(f"{row.reached} reached")
    return "  ".join([*filter(None, (row.slow, row.reason)), *parts])


# -- follow ---------------------------------------------------------------------------------------------


def follow(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[JOB|RUN]", help="Slurm job or run folder; default: the newest run."),
    ] = None,
    results: options.Results = None,
) -> None:
    """Watch a run until it ends.

    Examples:

      encore follow                 the newest run

      encore follow 12              the run of a Slurm job, which may still wait in the queue

      encore follow 12_3            one task of an array

      encore follow results/20261120T101500Z-resnet-mxnet-cpu        also one in the pods of a Kubernetes cluster

    Ctrl-C ends the view; the run continues. Exit codes are those of the run.
    """
    folder = _folder(results)
    subject = control.named(name or str(control.newest(folder).path), folder)
    screen = console(soft_wrap=True)
    notice = Notices(screen)
    try:
        if subject.folder is not None and workloads.is_in_pods(subject.folder):
            _follow_pods(screen, notice, subject.folder)
        run = subject.folder or _wait_for_folder(notice, subject, folder)
        states = _follow_all(screen, notice, subject, run)
    except KeyboardInterrupt:
        screen.print(f"no longer watched; it continues. Watch it again with: {_again(subject)}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    finish(screen, run, runner.Ending(exit_code(states)), as_json=False)


def _again(subject: control.Subject) -> str:
    return hints.follow(subject.folder.path) if subject.folder else hints.command("follow", subject.job)


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
    # Wait until a job has made its run folder; EncoreError if it ends before that.
    while True:
        seen = status.ask(subject.job)
        folder = control.folder_of(subject.job, results, seen.jobs)
        if folder is not None:
            return folder
        alive = [job for job in seen.jobs if not job.has_ended]
        if seen.note:
            notice(seen.note)
        elif not alive:
            raise _ended_without_folder(subject.job, seen.jobs, results)
        elif all(job.waits for job in alive):
            notice(_queued(subject.job, alive[0].reason))
        else:
            notice(f"job {subject.job} has begun; no run folder in {results} yet")
        time.sleep(QUEUE_SECONDS)


def _queued(job: str, reason: str) -> str:
    return f"job {job} is queued: {reason}" if reason else f"job {job} is queued"


def _ended_without_folder(job: str, found: Sequence[queue.Job], results: Path) -> EncoreError:
    state = found[0].state if found else "no longer known to Slurm"
    # The first task of an array: the whole has no output of its own.
    output = commands.show_job(found[0].name if found else job).get("StdOut")
    output = output or "slurm-JOB.out where it was submitted"
    return EncoreError(
        f"job {job} ended without a run folder in {results}: {state}",
        hint=f"see its output in {output}; if its runs are elsewhere: --results DIR",
        exit_code=ExitCode.FAILED,
    )


def _follow_all(
    screen: Console, notice: Notices, subject: control.Subject, folder: run_folder.RunFolder
) -> list[State]:
    # Show one experiment after the other to its end; return their states then.
    chosen = control.experiments(subject.job, folder, _ask(subject))
    if not chosen:
        folder.metadata()  # refuses a damaged folder
        whose = f" of job {subject.job}" if subject.job else ""
        raise EncoreError(f"{folder.path.name} has no experiment{whose}", hint=f"see: {hints.command('status')}")
    count = len(folder.experiments())
    states: list[State] = []
    with live.RunView(screen) as view:
        for experiment in chosen:
            view.start(f"experiment {experiment.number + 1}/{count}")
            state, reason = _follow_one(view, notice, Following(folder, subject, experiment))
            states.append(state)
            if state in ("reached", "not reached"):
                continue
            notice(f"experiment {experiment.number + 1} {state}" + (f": {reason}" if reason else ""))
            # The tasks of an array do not wait for each other.
            if not status.is_of_array(folder):
                break
    return states


def _ask(subject: control.Subject) -> status.Queue:
    # The jobs of the subject alone; none outside of Slurm.
    return status.ask(subject.job) if subject.job else status.Queue()


@dataclass(frozen=True)
class Following:
    folder: run_folder.RunFolder
    subject: control.Subject
    experiment: run_folder.Experiment

    def verdict(self, seen: status.Queue) -> tuple[State, str]:
        job = seen.find(status.job_of(self.folder, self.experiment, seen))
        return status.verdict(self.experiment, job, seen.answers)


def _follow_one(view: live.RunView, notice: Notices, watched: Following) -> tuple[State, str]:
    # Show an experiment until it has ended and its job will not resume it.
    tail, progress, slow = Tail(watched.experiment.metrics), Progress(), SlowRankWatch(watched.experiment.folder)
    begun = asked = time.monotonic()
    seen, pace, due = _ask(watched.subject), "", begun + FORECAST_SECONDS
    while True:
        for record in tail.read():
            progress.add(record)
        if time.monotonic() > due:
            forecast, due = status.forecast_of(watched.experiment), time.monotonic() + FORECAST_SECONDS
            pace = forecast.text() if forecast and forecast.minutes is not None else ""
        progress.slow = slow.look()
        view.update(progress, pace)
        state, reason = watched.verdict(seen)
        if state in ("reached", "not reached"):
            return state, reason
        if state not in status.ALIVE or time.monotonic() - asked > QUEUE_SECONDS:
            seen, asked = _ask(watched.subject), time.monotonic()
            state, reason = watched.verdict(seen)
            if state not in status.ALIVE and not (state == "not started" and _is_early(begun)):
                return state, reason
        if reason:
            notice(_queued(watched.subject.job, reason) if state == "queued" else reason)
        time.sleep(POLL_SECONDS)


def _follow_pods(screen: Console, notice: Notices, folder: run_folder.RunFolder) -> NoReturn:
    # Show a run in the pods of a Kubernetes cluster by the log of rank 0's pod, to its end; leave with its exit code.
    every = folder.experiments()
    connection, outcomes = workloads.connect(folder), []
    with live.RunView(screen) as view:
        for experiment in every:
            view.start(f"experiment {experiment.number + 1}/{len(every)}")
            progress, shown = Progress(), dict[str, int]()
            while True:
                seen = workloads.look(connection, folder, experiment)
                workloads.settle(folder, experiment, seen)
                if seen.state not in ("waiting", "running") or experiment.state().status in run_folder.FINISHED:
                    break
                if seen.state == "running":
                    _relay(screen, view, connection, seen.pod, progress, shown)
                else:
                    notice(_queued(workloads.name_of(folder, experiment), seen.reason))
                time.sleep(POLL_SECONDS)
            state = experiment.state()
            outcomes.append(state.status if state.status != "interrupted" else progress.outcome or state.status)
            if state.status not in run_folder.FINISHED:
                notice(f"experiment {experiment.number + 1} {state.status}: {state.reason}")
    if any(each.state().reason == workloads.RESULTS_THERE for each in every):
        screen.print("copy them here, and see the result:")
        for line in workloads.copying(folder):
            screen.print(f"  {line}", markup=False, highlight=False)
        raise typer.Exit(exit_code([cast("State", each.replace("_", " ")) for each in outcomes]))
    finish(
        screen, folder, runner.Ending(exit_code([cast("State", each.replace("_", " ")) for each in outcomes])), False
    )
    raise typer.Exit()


def _relay(
    screen: Console,
    view: live.RunView,
    connection: Connection,
    pod: str,
    progress: Progress,
    shown: dict[str, int],
) -> None:
    # What a pod prints, from where an earlier look at it ended
    for number, record in enumerate(workloads.records(connection.log(pod))):
        if number < shown.get(pod, 0):
            continue
        shown[pod] = number + 1
        if isinstance(record, dict):
            progress.add(record)
            view.update(progress, "")
        elif record.strip():
            screen.print(record, markup=False, highlight=False)


def _is_early(begun: float) -> bool:
    # Whether a run outside of Slurm may still be between two experiments.
    return time.monotonic() - begun < START_SECONDS


# -- cancel ---------------------------------------------------------------------------------------------


def cancel(
    name: Annotated[str, typer.Argument(metavar="JOB|RUN", help="Slurm job or run folder.")],
    results: options.Results = None,
    trust_owner: options.TrustOwner = False,
) -> None:
    """End a job or run; it writes a checkpoint and can be resumed.

    Examples:

      encore cancel 12              a Slurm job, or all tasks of an array

      encore cancel 12_3            one task

      encore cancel results/20261120T101500Z-resnet-mxnet-cpu
    """
    screen = console(soft_wrap=True)
    for line in control.cancel(control.named(name, _folder(results)), trust_owner):
        screen.print(escape(line))
