"""Measure study points with the study's program: config.json in, measurement.json and output.txt out.

from encore.lab.studies.measurement import measure
measure(folder.create(load("multi-gpu", small=True), "study-multi-gpu", Path("results")), print)
"""

import contextlib
import fcntl
import os
import signal
import statistics
import time
from collections.abc import Callable, Mapping
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
    """Return the estimated duration of the unfinished passes.

    Estimates are means over the measured points with the most axis values in common; before the first measurement,
    the study's default.
    """
    measured = [
        (point, measurement["wall_seconds"])
        for point in folder.study.points()
        for measurement in folder.measurements(point)
        if measurement.get("wall_seconds")
    ]
    if not measured:
        return len(folder.unfinished()) * folder.study.program.seconds
    total = 0.0
    for _, point in folder.unfinished():
        common = [len(other_point.axes.items() & point.axes.items()) for other_point, _ in measured]
        pairs = zip(measured, common, strict=True)
        total += statistics.fmean(seconds for (_, seconds), number in pairs if number == max(common))
    return total


def command(folder: Folder[Study], point: Point, python: Path | None, number: int = 1) -> Command:
    """Return the command that measures a pass; ``python`` None: the default path of the framework's environment."""
    program, request = folder.study.program, folder.study.request
    output = folder.point_folder(point, number).absolute()
    ranks = int(point.axes[program.ranks])
    is_single_process = any(point.axes.get(axis) in values for axis, values in program.one_process.items())
    launch = launchers.on_one_node(program.framework, 1 if is_single_process else ranks, str(output))
    on_cpu = point.config.get("device") == "cpu"
    # All points use the same number of cores per device, so that speed-ups come from devices only. Contexts in a single
    # process have separate threads, like processes; spinning threads would take cores from other ranks.
    max_ranks = max(int(other_point.axes[program.ranks]) for other_point in folder.study.points())
    threads = {"OMP_NUM_THREADS": str(max(1, node.cores() // max_ranks)), "OMP_WAIT_POLICY": "PASSIVE"}
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
        environment={"PYTHONUNBUFFERED": "1", **launch.environment, **(threads if on_cpu else {})},
        mounts=(Mount(output, str(output), False),),
        ranks=1 if is_single_process else ranks,
        gpus=0 if on_cpu else ranks,
    )
    if request.runtime == "host":
        return renderers.host(job, python or Path("python"), os.environ, is_user_python=request.python is not None)
    choice = catalogue.choose(program.image)
    device = str(point.config.get("device", ""))
    target = runtimes.choose(request.runtime or "host", choice, node.this_node(), device, request.image)
    return runtimes.render(target, job, runtimes.container_name(output), os.environ)


def resume_command(folder: Folder[Study]) -> str:
    return hints.command("study", "run", "--resume", folder.path.absolute())


def measure(folder: Folder[Study], on_point: Callable[[Point, str], None], only: str | None = None) -> ExitCode:
    """Measure all unfinished passes, or only passes of point ``only``; failed passes are repeated."""
    python = folder.study.request.python
    if folder.study.request.runtime == "host" and python is None:
        python = environment.ensure_environment(folder.study.program.framework, lambda text: None)

    def measure_point(point: Point, number: int) -> ExitCode:
        problem = _measure_pass(folder, point, number, command(folder, point, python, number))
        on_point(point, problem or "done")
        return ExitCode.FAILED if problem else ExitCode.REACHED

    return folders.measure(folder, measure_point, resume_command(folder), only)


def _measure_pass(folder: Folder[Study], point: Point, number: int, command: Command) -> str:
    # Measure a pass; return the failure reason, or an empty string.
    output = folder.point_folder(point, number)
    output.mkdir(exist_ok=True, parents=True)
    with (output / ".lock").open("wb") as lock:
        # The measuring program inherits the lock: if this process is killed, the next one waits for its child.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (output / MEASUREMENT).is_file():
            return ""
        (output / FAILURE).unlink(missing_ok=True)
        files.write_json(output / "config.json", dict(point.config))
        began, other_seconds = time.monotonic(), _background_cpu_seconds()
        code = _run(command, output / "output.txt", lock.fileno())
    if code == 0 and (output / MEASUREMENT).is_file():
        measurement = files.read_json(output / MEASUREMENT)
        seconds = time.monotonic() - began
        measurement["wall_seconds"] = round(seconds, 2)
        if folder.study.request.runtime == "host":
            used = max(0.0, (_background_cpu_seconds() - other_seconds) / seconds)
            measurement |= {"cores": psutil.cpu_count(), "others_cores": round(used, 3)}
        files.write_json(output / MEASUREMENT, measurement)
        return ""
    files.write_json(output / FAILURE, {"exit_code": code})
    return f"exit code {code}: {last_line(output / 'output.txt')}"


def _background_cpu_seconds() -> float:
    """Return the CPU time used on this machine by processes other than this one and its reaped children.

    Includes steal time of the hypervisor. Engine containers are not descendants: their time would be included, too.
    """
    times, process_times = psutil.cpu_times(), os.times()
    total = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    return float(
        total - process_times.user - process_times.system - process_times.children_user - process_times.children_system
    )


def last_line(path: Path) -> str:
    """Return the last line with an error, else the last non-blank line; empty if all lines are blank."""
    lines = [line for line in path.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line.lower()]
    return (errors or lines or [""])[-1].strip()


def _run(command: Command, output: Path, lock: int) -> int:
    # Run a command, and kill its process group if interrupted.
    with output.open("wb") as file:
        try:
            child = processes.start(command, file, keep=(lock,))
        except OSError as error:
            raise EncoreError(f"{command.argv[0]} cannot be started: {error.strerror}") from error
        try:
            return child.wait()
        except BaseException:
            processes.end(processes.family(child.pid), _END_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # Orphans in the process group are no longer descendants
            raise


def script(folder: Folder[Study], per_point: Mapping[str, str]) -> str:
    """Return a batch script: a Slurm array with a job per unfinished point, one at a time per node.

    ``per_point``: additional sbatch options by name, such as {"partition": "gpu"}.
    """
    remaining = [(number, point) for number, point in enumerate(folder.study.points()) if folder.state(point) != "done"]
    if not remaining:
        raise EncoreError(f"every point of {folder.path} is done", hint="encore study report FOLDER")
    max_ranks = max(int(point.axes[folder.study.program.ranks]) for _, point in remaining)
    numbers = ",".join(str(number) for number, _ in remaining)
    on_gpu = any(point.config.get("device") == "gpu" for _, point in remaining)
    options = {
        "job-name": f"study-{folder.study.name}", "array": numbers, "nodes": "1", "exclusive": "",
        **({"gpus-per-node": str(max_ranks)} if on_gpu else {}), "output": f"{folder.path}/slurm-%a.txt", **per_point,
    }  # fmt: skip
    lines = [f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}" for name, value in options.items()]
    again = f'{resume_command(folder)} --point "$SLURM_ARRAY_TASK_ID"'
    return "\n".join(["#!/usr/bin/env bash", *lines, "set -euo pipefail", again, ""])


def submit(folder: Folder[Study], per_point: Mapping[str, str]) -> str:
    """Submit the unfinished points as a Slurm array; return the output of sbatch."""
    path = folder.path / "array.sh"
    with files.replaced(path) as file:
        file.write(script(folder, per_point).encode())
    return commands.call("sbatch", str(path)).strip()
