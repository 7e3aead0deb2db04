"""The folder of a study: its grid, the state of each point, and what is left to measure.

results/20261120T101500Z-sweep-resnet/
    study.json              the study as it was asked for, its machine, and the jobs that points were submitted as
    1x2/                    a point, named after the values of its axes
        <run folder>        of a training, as `encore run` makes it; its state is the point's
        measurement.json    of a measuring program; failed.json instead where it failed
        pass-2/             the same of the second pass
    report/
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """A point of a grid: the name of its folder, and the values that make it."""

    @property
    def key(self) -> str: ...

    @property
    def axes(self) -> Mapping[str, Any]: ...


class Definition(Strict):
    """What a study measures, as study.json keeps it."""

    passes: int = 1  # how often each point is measured

    def points(self) -> Sequence[Any]:
        raise NotImplementedError

    def order(self) -> list[tuple[int, Any]]:
        """Return each pass's number, from 1, with its points in the order in which they are measured."""
        return [(1, point) for point in self.points()]


Defined = TypeVar("Defined", bound=Definition)


class StudyJson(TypedDict):
    """A study and its points."""

    study: str  # Its folder
    points: list[dict[str, Any]]  # Each with ``point``, its name, ``state`` and the values that make it


@dataclass(frozen=True)
class Folder(Generic[Defined]):
    path: Path
    study: Defined

    def at(self, point: Keyed, number: int = 1) -> Path:
        return self.path / point.key / (f"pass-{number}" if number > 1 else "")

    def run_of(self, point: Keyed) -> RunFolder | None:
        found = sorted(path.parent for path in self.at(point).glob("[!.]*/run.json"))
        return RunFolder(found[-1]) if found else None

    def jobs(self) -> dict[str, str]:
        """Return the job of each point that was submitted, by its key; none before the study is written."""
        file = self.path / STUDY
        return dict(files.read_json(file)["jobs"]) if file.is_file() else {}

    def keep_job(self, point: Keyed, job: str) -> None:
        """Write down the job of a point; at once, because one that is forgotten would be submitted twice."""
        stored = files.read_json(self.path / STUDY)
        files.write_json(self.path / STUDY, {**stored, "jobs": {**stored["jobs"], point.key: job}})

    def state_of_pass(self, point: Keyed, number: int) -> State:
        """Return the state of a point's pass, by the files in its folder."""
        run, place = self.run_of(point), self.at(point, number)
        if run is not None:
            states = {experiment.state().status for experiment in run.experiments()}
            if states <= set(run_folder.FINISHED):
                return "done"
            return "failed" if "failed" in states else "running" if "running" in states else "interrupted"
        if (place / MEASUREMENT).is_file():
            return "done"
        return "failed" if (place / FAILURE).is_file() else "submitted" if point.key in self.jobs() else "to do"

    def state(self, point: Keyed) -> State:
        return min((self.state_of_pass(point, number) for number in self._passes()), key=_WORST_FIRST.index)

    def measurements(self, point: Keyed) -> list[dict[str, Any]]:
        found = [self.at(point, number) / MEASUREMENT for number in self._passes()]
        return [files.read_json(path) for path in found if path.is_file()]

    def _passes(self) -> range:
        return range(1, self.study.passes + 1)

    def left(self) -> list[tuple[int, Any]]:
        """Return the passes that are not done, each with its point, in the order in which they are measured."""
        return [(number, each) for number, each in self.study.order() if self.state_of_pass(each, number) != "done"]

    def may_resume(self) -> bool:
        """Return whether a point has not ended and would not end again as it did, such as for want of memory."""
        runs = [self.run_of(point) for _, point in self.left()]
        return any(run is None or not any(each.state().is_final for each in run.experiments()) for run in runs)

    def as_json(self) -> StudyJson:
        points = [{"point": each.key, "state": self.state(each), **each.axes} for each in self.study.points()]
        return {"study": str(self.path), "points": points}

    def summary(self) -> str:
        """Return how many points are in which state, such as "38 done, 2 to do"."""
        states = [self.state(each) for each in self.study.points()]
        return ", ".join(f"{states.count(name)} {name}" for name in dict.fromkeys(sorted(states)))

    def machine(self) -> dict[str, Any]:
        return dict(files.read_json(self.path / STUDY)["machine"])


def create(study: Defined, label: str, results: Path) -> Folder[Defined]:
    """Make the folder of a study, called after the time and the ``label``."""
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
            hint="give a folder that you may write to: --results DIR",
        ) from error
    return Folder(path, study)


def open_folder(path: Path, of: type[Defined]) -> Folder[Defined]:
    """Return the study in ``path``; EncoreError where there is none of this kind, or another version wrote it."""
    if not (path / STUDY).is_file():
        raise EncoreError(
            f"{path} is no folder of a study",
            expected=f"a folder with {STUDY}, such as results/20261120T101500Z-sweep-resnet",
            hint="give the path that was printed when it began",
        )
    try:
        return Folder(path.absolute(), of.model_validate(files.read_json(path / STUDY).get("study")))
    except ValidationError as error:
        raise EncoreError(
            f"{path / STUDY} has other fields than this version of Encore writes for such a study",
            hint="start the study again",
        ) from error


def measure(
    folder: Folder[Defined], one: Callable[[Any, int], ExitCode], again: str, only: str | None = None
) -> ExitCode:
    """Measure each pass that is not done, or those of the point ``only``, by ``one``; ``again`` resumes the study.

    Continues after a point that fails, and stops when interrupted.
    """
    codes = set()
    with _alone(folder, again, only):
        for number, point in folder.left():
            if only not in (None, point.key):
                continue
            try:
                codes.add(one(point, number))
            except KeyboardInterrupt:
                codes.add(ExitCode.INTERRUPTED)
            if ExitCode.INTERRUPTED in codes:
                return ExitCode.INTERRUPTED
    return ExitCode.FAILED if ExitCode.FAILED in codes else ExitCode.REACHED


@contextmanager
def _alone(folder: Folder[Defined], again: str, only: str | None) -> Iterator[None]:
    # Hold the lock of the study, or of one point: two processes on one machine would measure each other.
    try:
        with FileLock(folder.path / (".lock" if only is None else f".lock-{only}"), timeout=0):
            yield
    except Timeout as error:
        raise EncoreError(
            f"another process measures {folder.path}", hint=f"wait for it, or stop it and resume: {again}"
        ) from error
