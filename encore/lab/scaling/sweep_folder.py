"""Run a grid of points one after the other into a study folder, and resume an interrupted one.

results/20261120T101500Z-sweep-resnet/
    study.json          the grid, and the jobs that points were submitted as
    1x2/                point: nodes x GPUs, with the precision where that is swept
        <run folder>    as `encore run` makes it; its state is the point's state
    report/             tables and figures of the points that have ended
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from encore import files
from encore.errors import EncoreError, ExitCode
from encore.lab.scaling.grid import Grid, GridPoint, points, request_of
from encore.machine.preflight import Check
from encore.run import hints, passport, planning, run_folder, runner
from encore.run.run_folder import RunFolder
from encore.run.supervise import Limits

STUDY = "study.json"
PointState = Literal["to do", "submitted", "running", "interrupted", "failed", "done"]


@dataclass(frozen=True)
class Submitter:
    """How points are handed to a scheduler; what its job makes is a run folder in the request's ``results``."""

    submit: Callable[[GridPoint, planning.Request], str]
    """Submits a point, returns the job's name."""
    is_live: Callable[[str], bool]
    """Whether a job is still queued or running: its point is then left alone."""
    check: Callable[[GridPoint, planning.Request], None]
    """Refuses a point that the scheduler would not run."""
    resume: Callable[[RunFolder], str]
    """Submits what is left of a run, returns the job's name."""


@dataclass(frozen=True)
class Here:
    """How points are run on this machine."""

    hooks: Callable[[GridPoint, RunFolder | None], runner.Hooks]
    """Reports what a run does; without a folder, what comes before it."""
    limits: Limits


@dataclass(frozen=True)
class Study:
    """A study folder that exists."""

    path: Path
    grid: Grid

    def folder(self, point: GridPoint) -> Path:
        """Return where the run folder of a point goes."""
        return self.path / point.key

    def run_of(self, point: GridPoint) -> RunFolder | None:
        """Return the run folder of a point, None before there is one."""
        found = sorted(path.parent for path in self.folder(point).glob("[!.]*/run.json"))
        return RunFolder(found[-1]) if found else None

    def jobs(self) -> dict[str, str]:
        """Return the job by key of the points that were submitted."""
        return dict(files.read_json(self.path / STUDY).get("jobs", {}))

    def state(self, point: GridPoint) -> PointState:
        """Return the state of a point, by its run folder."""
        run = self.run_of(point)
        if run is None:
            return "submitted" if point.key in self.jobs() else "to do"
        states = {experiment.state().status for experiment in run.experiments()}
        if states <= set(run_folder.FINISHED):
            return "done"
        return "failed" if "failed" in states else "running" if "running" in states else "interrupted"

    def may_resume(self) -> bool:
        """Return whether a point has not ended and would not end again as it did, such as for want of memory."""
        left = [self.run_of(point) for point in points(self.grid) if self.state(point) != "done"]
        return any(run is None or not any(each.state().is_final for each in run.experiments()) for run in left)


def create(grid: Grid, results: Path) -> Study:
    """Make the study folder."""
    # The values of secrets are never kept: whoever resumes the study has them in the environment.
    kept = passport.redact(dict(setting.split("=", 1) for setting in grid.environment if "=" in setting))
    environment = tuple(
        name if kept.get(name := setting.partition("=")[0]) == passport.REDACTED else setting
        for setting in grid.environment
    )
    stored = {**asdict(replace(grid, environment=environment)), "jobs": {}}
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    try:
        results.mkdir(parents=True, exist_ok=True)
        path = run_folder.free_name(results, f"{stamp}-sweep-{grid.benchmark}")
        path.mkdir()
        files.write_json(path / STUDY, stored)
    except OSError as error:
        raise EncoreError(
            f"the study cannot be written to {results}: {error.strerror or error}",
            remedy="give a folder that you may write to: --results DIR",
        ) from error
    return Study(path, grid)


def open_study(path: Path) -> Study:
    """Return the study at ``path``; EncoreError if there is none, or another version of Encore made it."""
    if not (path / STUDY).is_file():
        raise EncoreError(
            f"{path} is no study folder",
            expected=f"a folder with {STUDY}, such as results/20261120T101500Z-sweep-resnet",
            remedy="give the path that the sweep printed",
        )
    stored = files.read_json(path / STUDY)
    stored.pop("jobs", None)
    if set(stored) != {field.name for field in fields(Grid)}:
        raise EncoreError(
            f"{path / STUDY} has other fields than this version of Encore writes", remedy="start a new sweep"
        )
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
    }
    return Study(path.absolute(), Grid(**values))


def refuse(grid: Grid, results: Path, submitter: Submitter | None, submit_all: bool) -> list[tuple[GridPoint, Check]]:
    """Refuse a grid with a point that cannot be run; return the warnings of the points for this machine."""
    warnings = []
    for point in points(grid):
        if is_submitted(grid, point, submit_all):
            if submitter is None:
                wanted = f"a point of {point.nodes} nodes" if point.nodes > 1 else "--submit"
                raise EncoreError(
                    f"{wanted} needs a scheduler, and there is no Slurm here",
                    expected="points on this machine, or a login node of a cluster",
                    remedy="leave out --nodes and --submit, or name the nodes: --hosts n1:4,n2:4",
                )
            submitter.check(point, request_of(grid, point, results))
            continue
        plan = planning.make_plan(request_of(grid, point, results))
        if point.image is not None and plan.target.runtime == "host":
            raise EncoreError(
                f"point {point.key} needs a container engine: {plan.target.why}",
                remedy=f"encore images build {grid.benchmark} --base {point.image}, on a machine with an engine",
            )
        warnings += [(point, check) for check in planning.refuse(planning.asked(plan))]
    return warnings


def is_submitted(grid: Grid, point: GridPoint, submit_all: bool) -> bool:
    """Return whether a scheduler runs a point: of several nodes without hosts, or every one."""
    return submit_all or (point.nodes > 1 and not grid.hosts)


def run(study: Study, here: Here, submitter: Submitter | None, submit_all: bool = False) -> ExitCode:
    """Run or submit every point that has not ended; continue after a point that fails, stop when interrupted."""
    failed = False
    with _alone(study):
        for point in points(study.grid):
            if study.state(point) == "done":
                continue
            # What a job has begun only a job resumes: this machine may be a login node.
            if is_submitted(study.grid, point, submit_all) or point.key in study.jobs():
                _submit(study, point, submitter)
                continue
            code = _run_here(study, point, here)
            if code == ExitCode.INTERRUPTED:
                return code
            failed = failed or code == ExitCode.FAILED
    return ExitCode.FAILED if failed else ExitCode.REACHED


@contextmanager
def _alone(study: Study) -> Iterator[None]:
    """Hold the study's lock: two processes that run the same points would measure each other."""
    try:
        with FileLock(study.path / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise EncoreError(
            f"another process runs {study.path}",
            remedy=f"wait for it, or stop it and resume: {hints.command('sweep', '--resume', study.path.absolute())}",
        ) from error


def _run_here(study: Study, point: GridPoint, here: Here) -> ExitCode:
    existing = study.run_of(point)
    if existing is not None:
        return runner.resume(existing, here.hooks(point, existing), here.limits).code
    plan = planning.asked(planning.make_plan(request_of(study.grid, point, study.folder(point))))
    folder, python = runner.prepare_and_create(plan, here.hooks(point, None))
    return runner.execute(plan, folder, python, here.hooks(point, folder), here.limits).code


def _submit(study: Study, point: GridPoint, submitter: Submitter | None) -> None:
    jobs = study.jobs()
    if submitter is None:
        raise EncoreError(f"point {point.key} needs a scheduler, and there is no Slurm here")
    if point.key in jobs and submitter.is_live(jobs[point.key]):
        return
    run = study.run_of(point)
    if run is not None:
        job = submitter.resume(run)
    else:
        job = submitter.submit(point, request_of(study.grid, point, study.folder(point)))
    stored = files.read_json(study.path / STUDY)
    # Written after each submission: a job that is forgotten would be submitted twice.
    files.write_json(study.path / STUDY, {**stored, "jobs": {**jobs, point.key: job}})
