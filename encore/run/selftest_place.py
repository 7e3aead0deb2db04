"""Where the checks of `encore selftest` run: an image, a Python of the user's, or the framework's environment."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from encore import catalogue, configuration, data, environment, launchers
from encore.catalogue import Choice, System
from encore.configuration import Configuration
from encore.containers import renderers, runtimes
from encore.containers.runtimes import Target
from encore.errors import EncoreError
from encore.files import text_of
from encore.job import Command, Job, Mount, rank_environment
from encore.launchers import Launch
from encore.machine import node, processes
from encore.machine.node import Node
from encore.run import planning

CHECK_SECONDS = 150.0  # For one check; a compiler may take a minute of it
FULL = "full.json"  # Configuration of the nearest submitted system
LAST_LINES = 8
# A line of the stack that PyTorch prints with an error in C++.
FRAME = re.compile(r"\s*(frame #\d+:|C\+\+ CapturedTraceback)")


@dataclass(frozen=True, kw_only=True)
class Request:
    benchmarks: tuple[str, ...] = ()  # Names as the command line takes them; empty: all
    device: Literal["gpu", "cpu"] = "gpu"
    runtime: str | None = None
    image: str | None = None
    python: Path | None = None  # Runs all implementations whose framework it has, on the host
    only: tuple[str, ...] = ()  # Names of checks, or beginnings of them; empty: all
    time_limit: float = 600.0
    check_seconds: float = CHECK_SECONDS


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    check: str
    result: Literal["OK", "FAIL", "SKIPPED"]
    found: str
    seconds: float = 0.0
    lines: tuple[str, ...] = ()  # Last lines of the output, after a failure
    cut: bool = False  # Whether the time limit left no time for it, or ended it


@dataclass(frozen=True, kw_only=True)
class Place:
    choice: Choice
    configuration: Configuration  # The small one, on one rank
    request: Request
    target: Target
    python: Path | None  # On the host
    data: Path
    work: Path
    gpus: int

    @property
    def all_ranks(self) -> int:
        return self.gpus or 2

    def launch(self, ranks: int) -> Launch:
        return launchers.on_one_node(self.choice.implementation.framework, ranks, str(self.work))

    def command(self, program: str, *arguments: str) -> Command:
        """Return the command of a program of the implementation; it sees the data and the work folder."""
        return self.render("python", "-m", f"{self.choice.implementation.module}.{program}", *arguments)

    def render(self, *argv: str) -> Command:
        # Threads that wait for each other take the more time the busier a machine is; a GPU machine's CPU is idle.
        threads = {"OMP_NUM_THREADS": "1"} if self.request.device == "cpu" else {}
        # With --ipc host for two ranks.
        job = Job(
            argv=argv,
            environment=rank_environment(self.configuration, self.launch(1), threads, node.cores()),
            mounts=(Mount(self.data, str(self.data), True), Mount(self.work, str(self.work), False)),
            ranks=max(2, self.gpus),
            gpus=self.gpus,
        )
        if self.python is None:
            return runtimes.render(self.target, job, runtimes.container_name(self.work), os.environ)
        return renderers.host(job, self.python, os.environ, given=self.request.python is not None)

    def selftest(self, *what: str) -> Command:
        two, every = (shlex.join(self.launch(ranks).inner) for ranks in (2, self.all_ranks))
        configs = ("--config", str(self.work / "config.json"), "--full", str(self.work / FULL))
        folders = ("--data", str(self.data), "--work", str(self.work))
        where = ("--device", self.request.device, "--gpus", str(self.gpus), "--launch", two, "--launch-all", every)
        return self.command("selftest", *configs, *folders, *where, *what)


# -- one process -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a process ended: code None if it was stopped after its time."""

    code: int | None
    lines: tuple[str, ...]  # The last ones of its output; the very last of the standard output is its answer
    answer: Any


def execute(command: Command, work: Path, seconds: float) -> Ended:
    """Run a command for at most so long; leave no process of it, also when this one is interrupted."""
    with (work / "stdout.txt").open("wb") as output, (work / "stderr.txt").open("wb") as errors:
        child = processes.start(command, output, errors)
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(timeout=max(seconds, 0.1))
        finally:
            if code is None:
                processes.end(processes.family(child.pid), grace_seconds=1.0)
                child.wait()
                processes.clean_up(command)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # What a program leaves that crashed.
                os.killpg(child.pid, signal.SIGKILL)
    printed, said = (text_of(work / name).splitlines() for name in ("stdout.txt", "stderr.txt"))
    answer = None
    with contextlib.suppress(ValueError, IndexError):
        answer = json.loads(printed[-1]) if code == 0 else None
    return Ended(code, _last([*printed, *said]), answer)


def _last(lines: Sequence[str]) -> tuple[str, ...]:
    # Where in C++ an error came up says less than the error, which is above that.
    return tuple([line.rstrip() for line in lines if line.strip() and not FRAME.match(line)][-LAST_LINES:])


def latest_output(work: Path) -> tuple[str, ...]:
    """Return the last lines of the training that wrote last: what a check hangs in."""
    latest = max(work.glob("*/output.txt"), key=lambda path: path.stat().st_mtime, default=work / "none")
    return _last(text_of(latest).splitlines())


def judged(ended: Ended, work: Path, seconds: float, row: Row) -> Row:
    """Return the row of a check's process: its own answer, or how it ended without one."""
    if ended.code is None:
        lines = (*ended.lines, *latest_output(work))[-LAST_LINES:]
        return replace(row, result="FAIL", found=f"no result after {seconds:.0f} s", lines=lines)
    answer = ended.answer
    if not isinstance(answer, dict) or answer.get("result") not in ("OK", "FAIL", "SKIPPED"):
        how = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
        return replace(row, result="FAIL", found=f"ended with {how} and without a result", lines=ended.lines)
    lines = tuple(answer.get("lines", ()))
    return replace(row, result=answer["result"], found=answer["found"], lines=lines)


# -- where -------------------------------------------------------------------------------------------


def find_target(request: Request, choice: Choice, machine: Node) -> tuple[Target, Path | None]:
    """Return where an implementation runs, with the Python if that is the host; EncoreError if nowhere."""
    if request.python is not None:
        file = request.python.expanduser().absolute()
        return Target(python=file), file
    runtime = request.runtime or ("host" if request.device == "cpu" else "auto")
    target = runtimes.choose(runtime, choice, machine, request.device, request.image)
    if target.problem is not None:
        raise target.problem
    if target.runtime != "host":
        return target, None
    if request.device == "gpu":
        hint = f"make build-{choice.name}, or name a Python that has the framework with CUDA: --python FILE"
        raise EncoreError(f"the host runtime's framework is built for CPUs ({target.why})", hint=hint)
    made = environment.describe(choice.implementation.framework)
    if not made.is_ready:
        raise EncoreError("the framework's environment is not made yet", hint="make environments")
    return target, made.python


def make_place(request: Request, choice: Choice, machine: Node, work: Path) -> Place:
    target, python = find_target(request, choice, machine)
    small = catalogue.find_system(choice, choice.benchmark.small_data.system, None)
    systems, folder = {"config.json": small, FULL: full_system(request, choice, machine)}, work / choice.name
    folder.mkdir(parents=True, exist_ok=True)
    resolved = {name: configuration.resolve(choice, system, 1, 1, []) for name, system in systems.items()}
    for name, each in resolved.items():
        (folder / name).write_text(json.dumps(each.plain()), encoding="utf-8")
    return Place(
        choice=choice,
        configuration=resolved["config.json"],
        request=request,
        target=target,
        python=python,
        data=work / "data" / choice.benchmark.name,
        work=folder,
        gpus=visible_gpus(machine, os.environ) if request.device == "gpu" else 0,
    )


def full_system(request: Request, choice: Choice, machine: Node) -> System:
    """Return the nearest submitted system to one GPU of this machine; on a CPU the smallest one of its round."""
    if request.device == "gpu":
        return planning.choose_system(choice, 1, machine, None, None)
    of_round = [each for each in catalogue.systems(choice) if each.round == choice.benchmark.default_round]
    fitting = [each for each in of_round if each.kind in planning.FITTING]
    return min(fitting, key=lambda each: each.nodes * each.gpus_per_node)


def visible_gpus(machine: Node, caller: Mapping[str, str]) -> int:
    chosen = caller.get("CUDA_VISIBLE_DEVICES")
    every = len(machine.gpus)
    return every if chosen is None else min(every, len([word for word in chosen.split(",") if word.strip()]))


def prepare(place: Place) -> None:
    """Make the toy data set, unless it is there; EncoreError if the place lacks what the implementation imports."""
    ended = execute(place.command("train", "--help"), place.work, CHECK_SECONDS)
    if ended.code != 0:
        raise EncoreError(ended.lines[-1] if ended.lines else "no answer")
    if not (place.data / data.PASSPORT).exists():
        place.data.mkdir(parents=True, exist_ok=True)
        small = data.Preparation()
        by = place.python or runtimes.preparation(place.target, place.data.name, place.data, small)
        data.prepare(place.data.name, place.data, small, by)
