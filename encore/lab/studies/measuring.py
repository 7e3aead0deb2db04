"""Measure the points of a study into a folder, and resume: only what is missing is measured.

results/20261120T101500Z-study-multi-gpu/
    study.json            the study as it was read, and where it is measured
    POINT/                the values of the point's axes
        config.json       what the measuring program reads
        measurement.json  what it found; a pass that has it is done
        output.txt        its output; failed.json next to it: its exit code
        pass-2/           the same of the second pass
    report/
"""

from __future__ import annotations

import fcntl
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import psutil
from filelock import FileLock, Timeout

from encore import catalogue, environment, files, launchers
from encore.containers import runtimes
from encore.containers.renderers import host
from encore.errors import EncoreError, ExitCode
from encore.job import Command, Job, Mount
from encore.lab.studies import definition
from encore.lab.studies.definition import Point, Study
from encore.machine import node, processes
from encore.run import hints, run_folder
from encore.slurm import commands

STUDY, MEASUREMENT, FAILURE = "study.json", "measurement.json", "failed.json"
State = Literal["to do", "failed", "done"]
_END_SECONDS = 10.0


@dataclass(frozen=True)
class Place:
    """Where points are measured."""

    runtime: str = "host"
    image: str | None = None
    python: str | None = None


@dataclass(frozen=True)
class Folder:
    """A folder of a study."""

    path: Path
    study: Study
    place: Place

    def points(self) -> list[Point]:
        """Return the points of the grid."""
        return definition.points(self.study)

    def at(self, point: Point, number: int = 1) -> Path:
        """Return the folder of a point's pass."""
        return self.path / point.key / (f"pass-{number}" if number > 1 else "")

    def left(self) -> list[tuple[int, Point]]:
        """Return the passes that are not done, each with its point, in the order in which they are measured."""
        return [(number, each) for number, each in definition.order(self.study) if not self.is_done(each, number)]

    def is_done(self, point: Point, number: int) -> bool:
        """Return whether a pass of a point was measured."""
        return (self.at(point, number) / MEASUREMENT).is_file()

    def state(self, point: Point) -> State:
        """Return the state of a point, by the files in the folders of its passes."""
        missing = [number for number in self._passes() if not self.is_done(point, number)]
        if not missing:
            return "done"
        failed = any((self.at(point, number) / FAILURE).is_file() for number in missing)
        return "failed" if failed else "to do"

    def measurements(self, point: Point) -> list[dict[str, Any]]:
        """Return what each pass that is done has measured."""
        done = [number for number in self._passes() if self.is_done(point, number)]
        return [files.read_json(self.at(point, number) / MEASUREMENT) for number in done]

    def _passes(self) -> range:
        return range(1, self.study.passes + 1)

    def seconds_left(self) -> float:
        """Return how long the passes take that are not done.

        Each as long as the points that were measured and have most values in common with it, in the mean; before any
        was measured, what the study says.
        """
        known = [
            (each, found["wall_seconds"])
            for each in self.points()
            for found in self.measurements(each)
            if found.get("wall_seconds")
        ]
        if not known:
            return len(self.left()) * self.study.program.seconds
        return sum(_seconds_like(each, known) for _, each in self.left())


def _seconds_like(point: Point, known: Sequence[tuple[Point, float]]) -> float:
    common = [sum(each.axes.get(axis) == value for axis, value in point.axes.items()) for each, _ in known]
    return statistics.fmean(
        seconds for (_, seconds), number in zip(known, common, strict=True) if number == max(common)
    )


def create(study: Study, results: Path, place: Place) -> Folder:
    """Make the folder of a study."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    try:
        results.mkdir(parents=True, exist_ok=True)
        path = run_folder.free_name(results, f"{stamp}-study-{study.name}")
        path.mkdir()
        content = {"study": study.model_dump(mode="json"), "place": vars(place), "machine": node.this_node().as_json()}
        files.write_json(path / STUDY, content)
    except OSError as error:
        raise EncoreError(
            f"the study cannot be written to {results}: {error.strerror or error}",
            remedy="give a folder that you may write to: --results DIR",
        ) from error
    return Folder(path, study, place)


def open_folder(path: Path) -> Folder:
    """Return the study in ``path``; EncoreError where there is none."""
    if not (path / STUDY).is_file() or "place" not in (content := files.read_json(path / STUDY)):
        raise EncoreError(f"{path} is no folder of a study", remedy="give the path that encore study printed")
    try:
        # A folder from before there were passes has one of each point.
        study = Study.model_validate({"passes": 1, **content["study"]})
        return Folder(path.absolute(), study, Place(**content["place"]))
    except (ValueError, TypeError) as error:
        raise EncoreError(
            f"{path / STUDY} has other fields than this version of Encore writes", remedy="start the study again"
        ) from error


def command(folder: Folder, point: Point, python: Path | None, number: int = 1) -> Command:
    """Return what measures a point's pass; ``python`` None: that of the framework's environment, by its usual name."""
    program, place = folder.study.program, folder.place
    output = folder.at(point, number).absolute()
    ranks = int(point.axes[program.ranks])
    one = any(point.axes.get(axis) in values for axis, values in program.one_process.items())
    launch = launchers.on_one_node(program.framework, 1 if one else ranks, str(output))
    on_cpu = point.config.get("device") == "cpu"
    # A device has as many cores in each point, as a GPU is as large: a speed-up is that of more devices. Contexts of
    # one process have threads of their own, as processes do; threads that spin while they wait take the others' cores.
    most = max(int(each.axes[program.ranks]) for each in folder.points())
    threads = {"OMP_NUM_THREADS": str(max(1, node.cores() // most)), "OMP_WAIT_POLICY": "PASSIVE"}
    variables = threads if on_cpu else {}
    job = Job(
        argv=(
            *launch.inner,
            "python",
            "-m",
            program.module,
            "--config",
            f"{output}/config.json",
            "--output",
            str(output),
        ),
        environment={"PYTHONUNBUFFERED": "1", **launch.environment, **variables},
        mounts=(Mount(output, str(output), False),),
        ranks=1 if one else ranks,
        gpus=0 if on_cpu else ranks,
    )
    if place.runtime == "host":
        return host.render(job, python or Path("python"), os.environ, given=place.python is not None)
    choice = catalogue.choose(program.image)
    device = str(point.config.get("device", ""))
    target = runtimes.choose(place.runtime, choice, node.this_node(), device, place.image)
    return runtimes.render(target, job, runtimes.container_name(output), os.environ)


def python_of(folder: Folder, on_step: Callable[[str], None]) -> Path | None:
    """Return the Python for the host, making the framework's environment if need be; None in a container."""
    if folder.place.runtime != "host":
        return None
    if folder.place.python is not None:
        return Path(folder.place.python)
    return environment.ensure_environment(folder.study.program.framework, on_step)


def measure(folder: Folder, on_point: Callable[[Point, str], None], only: str | None = None) -> ExitCode:
    """Measure every pass that is not done, or those of the point ``only``; continue after one that fails.

    One that has failed is tried again. KeyboardInterrupt ends the point that is being measured and passes on.
    """
    python = python_of(folder, lambda text: None)
    failed = False
    with _alone(folder, only):
        for number, point in folder.left():
            if only is not None and point.key != only:
                continue
            on_point(point, "begins")
            problem = _measure_one(folder, point, number, command(folder, point, python, number))
            on_point(point, problem or "done")
            failed = failed or bool(problem)
    return ExitCode.FAILED if failed else ExitCode.REACHED


@contextmanager
def _alone(folder: Folder, only: str | None) -> Iterator[None]:
    """Hold the lock of the study, or of one point where a scheduler measures each in a job of its own."""
    name = ".lock" if only is None else f".lock-{only}"
    try:
        with FileLock(folder.path / name, timeout=0):
            yield
    except Timeout as error:
        again = hints.command("study", "run", "--resume", folder.path)
        raise EncoreError(
            f"another process measures {folder.path}", remedy=f"wait for it, or stop it and resume: {again}"
        ) from error


def _measure_one(folder: Folder, point: Point, number: int, wanted: Command) -> str:
    """Measure a pass of a point; return what went wrong, or nothing."""
    output = folder.at(point, number)
    output.mkdir(exist_ok=True, parents=True)
    with (output / ".lock").open("wb") as lock:
        # Inherited by the measuring program: where this process is killed, the next one waits for what it left running.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_done(point, number):
            return ""
        (output / FAILURE).unlink(missing_ok=True)
        files.write_json(output / "config.json", dict(point.config))
        began, others = time.monotonic(), _others_seconds()
        code = _run(wanted, output / "output.txt", lock.fileno())
    if code == 0 and (output / MEASUREMENT).is_file():
        found = files.read_json(output / MEASUREMENT)
        seconds = time.monotonic() - began
        found["wall_seconds"] = round(seconds, 2)
        if folder.place.runtime == "host":
            used = max(0.0, (_others_seconds() - others) / seconds)
            found |= {"cores": psutil.cpu_count(), "others_cores": round(used, 3)}
        files.write_json(output / MEASUREMENT, found)
        return ""
    files.write_json(output / FAILURE, {"exit_code": code})
    return f"exit code {code}: {last_line(output / 'output.txt')}"


def _others_seconds() -> float:
    """Return the CPU time that was spent on this machine, without that of this process and of what it waited for.

    Time that a hypervisor gave to other machines counts. An engine's containers are no descendants: theirs would too.
    """
    times, own = psutil.cpu_times(), os.times()
    total = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    return float(total - own.user - own.system - own.children_user - own.children_system)


def last_line(path: Path) -> str:
    """Return the last line of an output that says something; empty where there is none."""
    lines = [line for line in path.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line.lower()]
    return (errors or lines or [""])[-1].strip()


def _run(wanted: Command, output: Path, kept: int) -> int:
    """Run a command in a group of its own, and end the whole group if this process is interrupted."""
    with output.open("wb") as file:
        try:
            child = processes.start(wanted, file, keep=(kept,))
        except OSError as error:
            raise EncoreError(f"{wanted.argv[0]} cannot be started: {error.strerror}") from error
        try:
            return child.wait()
        except BaseException:
            _end(child)
            raise


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a command and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_END_SECONDS)
            return


def script(folder: Folder, per_point: Mapping[str, str]) -> str:
    """Return a batch script: a Slurm array with a job for each point that is not done, one at a time on a node.

    ``per_point``: more options of sbatch by name, such as {"partition": "gpu"}.
    """
    left = [(number, point) for number, point in enumerate(folder.points()) if folder.state(point) != "done"]
    if not left:
        raise EncoreError(f"every point of {folder.path} is done", remedy="encore study report FOLDER")
    most = max(int(point.axes[folder.study.program.ranks]) for _, point in left)
    numbers = ",".join(str(number) for number, _ in left)
    on_gpu = any(point.config.get("device") == "gpu" for _, point in left)
    options = {
        "job-name": f"study-{folder.study.name}", "array": numbers, "nodes": "1", "exclusive": "",
        **({"gpus-per-node": str(most)} if on_gpu else {}), "output": f"{folder.path}/slurm-%a.txt", **per_point,
    }  # fmt: skip
    lines = [f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}" for name, value in options.items()]
    again = hints.command("study", "run", "--resume", folder.path.absolute())
    return "\n".join(
        ["#!/usr/bin/env bash", *lines, "set -euo pipefail", f'{again} --point "$SLURM_ARRAY_TASK_ID"', ""]
    )


def submit(folder: Folder, per_point: Mapping[str, str]) -> str:
    """Submit the points that are not done as one Slurm array; return what sbatch said."""
    path = folder.path / "array.sh"
    path.write_text(script(folder, per_point), encoding="utf-8")
    if not commands.is_installed():
        raise EncoreError("--submit, and there is no Slurm here", remedy=f"on a login node: sbatch {path}")
    done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EncoreError(f"sbatch refused: {done.stderr.strip()}", remedy=f"change {path} and give it to sbatch")
    return done.stdout.strip()


def as_json(folder: Folder) -> dict[str, Any]:
    """Return the state of a study as plain data."""
    return {
        "study": str(folder.path),
        "points": [{"point": each.key, "state": folder.state(each), **each.axes} for each in folder.points()],
    }


def summary(folder: Folder) -> str:
    """Return how many points are in which state, such as "38 done, 2 to do"."""
    states = [folder.state(each) for each in folder.points()]
    return ", ".join(f"{states.count(name)} {name}" for name in dict.fromkeys(sorted(states)))
