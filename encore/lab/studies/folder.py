"""Study folders: grid, state of the points, and remaining measurements.

results/20261120T101500Z-sweep-resnet/
    study.json              study definition, machine, and submitted jobs by point
    1x2/                    a point, named after its axis values
        <run folder>        a training, as created by `encore run`; its state is the point's state
        measurement.json    from a measuring program; failed.json if it failed
        pass-2/             the same for the second pass
    report/
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from filelock import FileLock, Timeout
from pydantic import ValidationError
from typing_extensions import TypedDict

from encore import files
from encore.catalogue import Strict
from encore.errors import EncoreError, ExitCode
from encore.machine import node
from encore.run import run_folder
from encore.run.run_folder import RunFolder

STUDY, MEASUREMENT, FAILURE = "study.json", "measurement.json", "failed.json"
State = Literal["failed", "running", "interrupted", "submitted", "to do", "done"]
_WORST_FIRST: tuple[State, ...] = ("failed", "running", "interrupted", "submitted", "to do", "done")


class Keyed(Protocol):
    """Grid point: folder name and axis values."""

    @property
    def key(self) -> str: ...

    @property
    def axes(self) -> Mapping[str, Any]: ...


class Definition(Strict):
    """Definition of a study, as stored in study.json."""

    passes: int = 1  # measurements per point

    def points(self) -> Sequence[Any]:
        raise NotImplementedError

    def order(self) -> list[tuple[int, Any]]:
        """Return pass numbers, starting at 1, with points in measuring order."""
        return [(1, point) for point in self.points()]


Defined = TypeVar("Defined", bound=Definition)


class StudyJson(TypedDict):
    """Study and its points."""

    study: str  # Study folder
    points: list[dict[str, Any]]  # Points with ``point`` (name), ``state`` and axis values


@dataclass(frozen=True)
class Folder(Generic[Defined]):
    path: Path
    study: Defined

    def point_folder(self, point: Keyed, number: int = 1) -> Path:
        return self.path / point.key / (f"pass-{number}" if number > 1 else "")

    def run_of(self, point: Keyed) -> RunFolder | None:
        run_dirs = sorted(path.parent for path in self.point_folder(point).glob("[!.]*/run.json"))
        return RunFolder(run_dirs[-1]) if run_dirs else None

    def jobs(self) -> dict[str, str]:
        """Return the submitted jobs by point key; empty before study.json exists."""
        file = self.path / STUDY
        return dict(files.read_json(file)["jobs"]) if file.is_file() else {}

    def record_job(self, point: Keyed, job: str) -> None:
        """Record a point's job immediately; an unrecorded job would be submitted twice."""
        stored = files.read_json(self.path / STUDY)
        files.write_json(self.path / STUDY, {**stored, "jobs": {**stored["jobs"], point.key: job}})

    def state_of_pass(self, point: Keyed, number: int) -> State:
        """Return the pass state, determined from the files in the pass folder."""
        run, pass_dir = self.run_of(point), self.point_folder(point, number)
        if run is not None:
            states = {experiment.state().status for experiment in run.experiments()}
            if states <= set(run_folder.FINISHED):
                return "done"
            return "failed" if "failed" in states else "running" if "running" in states else "interrupted"
        if (pass_dir / MEASUREMENT).is_file():
            return "done"
        return "failed" if (pass_dir / FAILURE).is_file() else "submitted" if point.key in self.jobs() else "to do"

    def state(self, point: Keyed) -> State:
        return min((self.state_of_pass(point, number) for number in self._passes()), key=_WORST_FIRST.index)

    def measurements(self, point: Keyed) -> list[dict[str, Any]]:
        paths = [self.point_folder(point, number) / MEASUREMENT for number in self._passes()]
        return [files.read_json(path) for path in paths if path.is_file()]

    def _passes(self) -> range:
        return range(1, self.study.passes + 1)

    def unfinished(self) -> list[tuple[int, Any]]:
        """Return the unfinished passes with their points, in measuring order."""
        return [(number, point) for number, point in self.study.order() if self.state_of_pass(point, number) != "done"]

    def may_resume(self) -> bool:
        """Return whether an unfinished point may succeed when resumed (unlike, for example, after out of memory)."""
        runs = [self.run_of(point) for _, point in self.unfinished()]
        return any(
            run is None or not any(experiment.state().is_final for experiment in run.experiments()) for run in runs
        )

    def as_json(self) -> StudyJson:
        points = [{"point": point.key, "state": self.state(point), **point.axes} for point in self.study.points()]
        return {"study": str(self.path), "points": points}

    def summary(self) -> str:
        """Return the number of points by state, such as "38 done, 2 to do"."""
        states = [self.state(point) for point in self.study.points()]
        return ", ".join(f"{states.count(name)} {name}" for name in dict.fromkeys(sorted(states)))

    def machine(self) -> dict[str, Any]:
        return dict(files.read_json(self.path / STUDY)["machine"])


def create(study: Defined, label: str, results: Path) -> Folder[Defined]:
    """Create the study folder, named after the time and the ``label``."""
    stamp = datetime.now(timezone.utc).strftime(run_folder.STAMP)
    content = {"study": study.model_dump(mode="json"), "machine": node.this_node(), "jobs": {}}
    try:
        results.mkdir(parents=True, exist_ok=True)
        path = run_folder.free_name(results, f"{stamp}-{label}")
        path.mkdir()
        files.write_json(path / STUDY, content)
    except OSError as error:
        raise EncoreError(
            f"the study cannot be written to {results}: {error.strerror or error}",
            hint="choose a writable folder: --results DIR",
        ) from error
    return Folder(path, study)


def open_folder(path: Path, of: type[Defined]) -> Folder[Defined]:
    """Return the study in ``path``; EncoreError if it has a different kind, or was written by another version."""
    if not (path / STUDY).is_file():
        raise EncoreError(
            f"{path} is not a study folder",
            expected=f"a folder with {STUDY}, such as results/20261120T101500Z-sweep-resnet",
            hint="use the path printed at the start",
        )
    try:
        return Folder(path.absolute(), of.model_validate(files.read_json(path / STUDY).get("study")))
    except ValidationError as error:
        raise EncoreError(
            f"{path / STUDY} has other fields than this version of Encore writes for such a study",
            hint="restart the study",
        ) from error


def measure(
    folder: Folder[Defined], measure_point: Callable[[Any, int], ExitCode], again: str, only: str | None = None
) -> ExitCode:
    """Measure all unfinished passes, or only passes of point ``only``; ``again`` is the command that resumes the study.

    Continues after a failed point, and stops when interrupted.
    """
    # Lock the study, or a single point: concurrent measurements on a machine would disturb each other.
    lock = FileLock(folder.path / (".lock" if only is None else f".lock-{only}"), timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        hint = f"wait for it, or stop it and resume: {again}"
        raise EncoreError(f"another process measures {folder.path}", hint=hint) from error
    codes = set()
    try:
        for number, point in folder.unfinished():
            if only in (None, point.key):
                codes.add(measure_point(point, number))
            if ExitCode.INTERRUPTED in codes:
                return ExitCode.INTERRUPTED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    finally:
        lock.release()
    return ExitCode.FAILED if ExitCode.FAILED in codes else ExitCode.REACHED
