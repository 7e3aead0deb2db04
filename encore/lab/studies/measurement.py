"""Measure the points of a study by its program: config.json in, measurement.json and output.txt out.

from encore.lab.studies.measurement import measure
measure(folder.create(load("multi-gpu", small=True), "study-multi-gpu", Path("results")), print)
"""

import contextlib
import fcntl
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from encore import catalogue, environment, files, launchers
from encore.containers import renderers, runtimes
from encore.errors import EncoreError, ExitCode
from encore.job import Command, Job, Mount
from encore.lab.studies import folder as folders
from encore.lab.studies.definition import Point, Study
from encore.lab.studies.folder import FAILURE, MEASUREMENT, Folder
from encore.machine import node, processes
from encore.run import hints
from encore.slurm import commands

_END_SECONDS = 10.0


def seconds_left(folder: Folder[Study]) -> float:
    """Return how long the passes take that are not done.

    Each as long as the points that were measured and have most values in common with it, in the mean; before any
    was measured, what the study says.
    """
    known = [
        (each, found["wall_seconds"])
        for each in folder.study.points()
        for found in folder.measurements(each)
        if found.get("wall_seconds")
    ]
    if not known:
        return len(folder.left()) * folder.study.program.seconds
    return sum(_seconds_like(each, known) for _, each in folder.left())


def _seconds_like(point: Point, known: Sequence[tuple[Point, float]]) -> float:
    common = [sum(each.axes.get(axis) == value for axis, value in point.axes.items()) for each, _ in known]
    return statistics.fmean(
        seconds for (_, seconds), number in zip(known, common, strict=True) if number == max(common)
    )


def command(folder: Folder[Study], point: Point, python: Path | None, number: int = 1) -> Command:
    """Return what measures a point's pass; ``python`` None: that of the framework's environment, by its usual name."""
    program, place = folder.study.program, folder.study.request
    output = folder.at(point, number).absolute()
    ranks = int(point.axes[program.ranks])
    one = any(point.axes.get(axis) in values for axis, values in program.one_process.items())
    launch = launchers.on_one_node(program.framework, 1 if one else ranks, str(output))
    on_cpu = point.config.get("device") == "cpu"
    # A device has as many cores in each point, as a GPU is as large: a speed-up is that of more devices. Contexts of
    # one process have threads of their own, as processes do; threads that spin while they wait take the others' cores.
    most = max(int(each.axes[program.ranks]) for each in folder.study.points())
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
        return renderers.host(job, python or Path("python"), os.environ, is_user_python=place.python is not None)
    choice = catalogue.choose(program.image)
    device = str(point.config.get("device", ""))
    target = runtimes.choose(place.runtime or "host", choice, node.this_node(), device, place.image)
    return runtimes.render(target, job, runtimes.container_name(output), os.environ)


def resume_command(folder: Folder[Study]) -> str:
    return hints.command("study", "run", "--resume", folder.path.absolute())


def measure(folder: Folder[Study], on_point: Callable[[Point, str], None], only: str | None = None) -> ExitCode:
    """Measure every pass that is not done, or those of the point ``only``; one that has failed is tried again."""
    request = folder.study.request
    python = request.python
    if request.runtime == "host" and python is None:
        python = environment.ensure_environment(folder.study.program.framework, lambda text: None)

    def one(point: Point, number: int) -> ExitCode:
        problem = _measure_one(folder, point, number, command(folder, point, python, number))
        on_point(point, problem or "done")
        return ExitCode.FAILED if problem else ExitCode.REACHED

    return folders.measure(folder, one, resume_command(folder), only)


def _measure_one(folder: Folder[Study], point: Point, number: int, wanted: Command) -> str:
    # Measure a pass of a point; return what went wrong, or nothing.
    output = folder.at(point, number)
    output.mkdir(exist_ok=True, parents=True)
    with (output / ".lock").open("wb") as lock:
        # Inherited by the measuring program: where this process is killed, the next one waits for what it left running.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (output / MEASUREMENT).is_file():
            return ""
        (output / FAILURE).unlink(missing_ok=True)
        files.write_json(output / "config.json", dict(point.config))
        began, others = time.monotonic(), _others_seconds()
        code = _run(wanted, output / "output.txt", lock.fileno())
    if code == 0 and (output / MEASUREMENT).is_file():
        found = files.read_json(output / MEASUREMENT)
        seconds = time.monotonic() - began
        found["wall_seconds"] = round(seconds, 2)
        if folder.study.request.runtime == "host":
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
    # Run a command, and end all its processes if this one is interrupted.
    with output.open("wb") as file:
        try:
            child = processes.start(wanted, file, keep=(kept,))
        except OSError as error:
            raise EncoreError(f"{wanted.argv[0]} cannot be started: {error.strerror}") from error
        try:
            return child.wait()
        except BaseException:
            processes.end(processes.family(child.pid), _END_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # Members of its group whose parents have ended are no family
            raise


def script(folder: Folder[Study], per_point: Mapping[str, str]) -> str:
    """Return a batch script: a Slurm array with a job for each point that is not done, one at a time on a node.

    ``per_point``: more options of sbatch by name, such as {"partition": "gpu"}.
    """
    left = [(number, point) for number, point in enumerate(folder.study.points()) if folder.state(point) != "done"]
    if not left:
        raise EncoreError(f"every point of {folder.path} is done", hint="encore study report FOLDER")
    most = max(int(point.axes[folder.study.program.ranks]) for _, point in left)
    numbers = ",".join(str(number) for number, _ in left)
    on_gpu = any(point.config.get("device") == "gpu" for _, point in left)
    options = {
        "job-name": f"study-{folder.study.name}", "array": numbers, "nodes": "1", "exclusive": "",
        **({"gpus-per-node": str(most)} if on_gpu else {}), "output": f"{folder.path}/slurm-%a.txt", **per_point,
    }  # fmt: skip
    lines = [f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}" for name, value in options.items()]
    again = f'{resume_command(folder)} --point "$SLURM_ARRAY_TASK_ID"'
    return "\n".join(["#!/usr/bin/env bash", *lines, "set -euo pipefail", again, ""])


def submit(folder: Folder[Study], per_point: Mapping[str, str]) -> str:
    """Submit the points that are not done as one Slurm array; return what sbatch said."""
    path = folder.path / "array.sh"
    with files.replaced(path) as file:
        file.write(script(folder, per_point).encode())
    if not commands.is_installed():
        raise EncoreError("--submit, and there is no Slurm here", hint=f"on a login node: sbatch {path}")
    done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EncoreError(f"sbatch refused: {done.stderr.strip()}", hint=f"change {path} and give it to sbatch")
    return done.stdout.strip()
