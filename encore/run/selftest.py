"""Run the checks of ``encore selftest``: all implementations on this machine, one process per check.

The checks are programs of the training code (``benchmarks/common/checks/selftest.py``) and bench.py. They run in the
same place as a training: in an image, in the user's Python, or in the framework's environment on CPUs.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from encore import catalogue, configuration, data, environment, files, launchers
from encore.configuration import Configuration
from encore.containers import renderers, runtimes
from encore.errors import EncoreError, unknown_name
from encore.job import Command, Job, Mount, rank_environment
from encore.machine import links, node, processes, telemetry
from encore.results import peaks
from encore.run import planning, published_speed

# Checks that apply to every implementation
BENCH, ALL_REDUCE, IMPORTS, EVALUATION, INPUT, TELEMETRY = (
    "bench", "all-reduce", "imports", "evaluation", "input", "telemetry",
)  # fmt: skip
# Run first for all implementations: the most informative checks, in case time runs out.
FIRST = (
    "device", "defaults", "defaults on all GPUs", ALL_REDUCE, BENCH, INPUT, EVALUATION, "overflow", "resume",
    "two ranks",
)  # fmt: skip
CHECK_SECONDS = 150.0  # For one check; a compiler may take a minute of it
FULL = "full.json"  # Configuration of the nearest submitted system
LAST_LINES = 8
# A line of the stack that PyTorch prints with an error in C++.
FRAME = re.compile(r"\s*(frame #\d+:|C\+\+ CapturedTraceback)")


@dataclass(frozen=True, kw_only=True)
class Request:
    benchmarks: tuple[str, ...] = ()  # Names as on the command line; empty: all
    device: Literal["gpu", "cpu"] = "gpu"
    runtime: str | None = None
    image: str | None = None
    python: Path | None = None  # Runs all implementations whose framework this Python has, on the host
    only: tuple[str, ...] = ()  # Names or prefixes of checks; empty: all
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
    cut: bool = False  # Whether the time limit prevented or interrupted the check


@dataclass(frozen=True, kw_only=True)
class CheckEnv:
    choice: catalogue.Choice
    configuration: Configuration  # The small one, on one rank
    request: Request
    target: runtimes.Target
    python: Path | None  # On the host
    data: Path
    work: Path
    gpus: int

    @property
    def all_ranks(self) -> int:
        return self.gpus or 2

    def launch(self, ranks: int) -> launchers.Launch:
        return launchers.on_one_node(self.choice.implementation.framework, ranks, str(self.work))

    def command(self, program: str, *arguments: str) -> Command:
        # Command for an implementation's program, with access to the data and the work folder.
        return self.render("python", "-m", f"{self.choice.implementation.module}.{program}", *arguments)

    def render(self, *argv: str) -> Command:
        # Threads that wait for each other slow down on a busy machine. CPUs in a GPU machine are idle.
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
        return renderers.host(job, self.python, os.environ, is_user_python=self.request.python is not None)

    def selftest(self, *arguments: str) -> Command:
        two, all_ranks = (shlex.join(self.launch(ranks).inner) for ranks in (2, self.all_ranks))
        configs = ("--config", str(self.work / "config.json"), "--full", str(self.work / FULL))
        folders = ("--data", str(self.data), "--work", str(self.work))
        machine = (
            "--device",
            self.request.device,
            "--gpus",
            str(self.gpus),
            "--launch",
            two,
            "--launch-all",
            all_ranks,
        )
        program = ("benchmarks.common.checks.selftest", self.choice.implementation.module)
        return self.render("python", "-m", *program, *configs, *folders, *machine, *arguments)


# -- one process -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Completed:
    code: int | None
    lines: tuple[str, ...]  # Last lines of the output; the last line of stdout is the answer
    answer: Any


def execute(command: Command, work: Path, seconds: float) -> Completed:
    # Run a command with a time limit. Terminate all its processes, also on interruption.
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
                # Processes left by a program that crashed.
                os.killpg(child.pid, signal.SIGKILL)
    printed, messages = (files.text_of(work / name).splitlines() for name in ("stdout.txt", "stderr.txt"))
    answer = None
    with contextlib.suppress(ValueError, IndexError):
        answer = json.loads(printed[-1]) if code == 0 else None
    return Completed(code, _last([*printed, *messages]), answer)


def _last(lines: Sequence[str]) -> tuple[str, ...]:
    # Skip C++ stack frames: the error message precedes them.
    return tuple([line.rstrip() for line in lines if line.strip() and not FRAME.match(line)][-LAST_LINES:])


def result_row(process: Completed, work: Path, seconds: float, row: Row) -> Row:
    if process.code is None:
        # The check hangs in the training that wrote last
        latest = max(work.glob("*/output.txt"), key=lambda path: path.stat().st_mtime, default=work / "none")
        lines = (*process.lines, *_last(files.text_of(latest).splitlines()))[-LAST_LINES:]
        return replace(row, result="FAIL", found=f"no result after {seconds:.0f} s", lines=lines)
    answer = process.answer
    if not isinstance(answer, dict) or answer.get("result") not in ("OK", "FAIL", "SKIPPED"):
        how = f"signal {-process.code}" if process.code < 0 else f"exit code {process.code}"
        return replace(row, result="FAIL", found=f"ended with {how} and without a result", lines=process.lines)
    return replace(row, result=answer["result"], found=answer["found"], lines=tuple(answer.get("lines", ())))


# -- where -------------------------------------------------------------------------------------------


def find_target(request: Request, choice: catalogue.Choice, machine: node.Node) -> tuple[runtimes.Target, Path | None]:
    # Where an implementation runs, with the Python if that is the host; EncoreError if nowhere.
    if request.python is not None:
        file = request.python.expanduser().absolute()
        return runtimes.Target(python=file), file
    runtime = request.runtime or ("host" if request.device == "cpu" else "auto")
    target = runtimes.choose(runtime, choice, machine, request.device, request.image)
    if target.problem is not None:
        raise target.problem
    if target.runtime != "host":
        return target, None
    if request.device == "gpu":
        hint = f"make build-{choice.name}, or name a Python that has the framework with CUDA: --python FILE"
        raise EncoreError(f"the host runtime's framework is built for CPUs ({target.reason})", hint=hint)
    framework = environment.describe(choice.implementation.framework)
    if not framework.is_ready:
        raise EncoreError("the framework's environment does not exist yet", hint="make environments")
    return target, framework.python


def make_env(request: Request, choice: catalogue.Choice, machine: node.Node, work: Path) -> CheckEnv:
    target, python = find_target(request, choice, machine)
    small = catalogue.find_system(choice, choice.benchmark.small_data.system, None)
    systems, folder = {"config.json": small, FULL: full_system(request, choice, machine)}, work / choice.name
    folder.mkdir(parents=True, exist_ok=True)
    resolved = {name: configuration.resolve(choice, system, 1, 1, []) for name, system in systems.items()}
    for name, config in resolved.items():
        (folder / name).write_text(json.dumps(config.plain()), encoding="utf-8")
    return CheckEnv(
        choice=choice,
        configuration=resolved["config.json"],
        request=request,
        target=target,
        python=python,
        data=work / "data" / choice.benchmark.name,
        work=folder,
        gpus=len(machine.gpus) if request.device == "gpu" else 0,
    )


def full_system(request: Request, choice: catalogue.Choice, machine: node.Node) -> catalogue.System:
    # Submitted system closest to one GPU of this machine; on CPUs the smallest, preferably of the current round.
    if request.device == "gpu":
        return planning.choose_system(choice, 1, machine, None, None)
    systems, latest = catalogue.systems(choice), choice.benchmark.default_round
    fitting = [system for system in systems if system.kind in planning.FITTING] or systems
    return min(fitting, key=lambda system: (system.round != latest, system.nodes * system.gpus_per_node))


def prepare(env: CheckEnv) -> None:
    # Prepare the toy data set if missing. EncoreError if the implementation's imports fail.
    process = execute(env.command("train", "--help"), env.work, CHECK_SECONDS)
    if process.code != 0:
        raise EncoreError(process.lines[-1] if process.lines else "no answer")
    if not (env.data / data.PASSPORT).exists():
        env.data.mkdir(parents=True, exist_ok=True)
        small = data.Preparation()
        python = env.python or runtimes.preparation(env.target, env.data.name, env.data, small)
        data.prepare(env.data.name, env.data, small, python)


# -- measurements ------------------------------------------------------------------------------------


def measure(env: CheckEnv, seconds: float, row: Row) -> dict[str, Any] | Row:
    # Run bench.py, on GPUs with the sizes of the closest submitted system. Return its answer, or a failed row.
    on_gpu, config = env.request.device == "gpu", env.work / "config.json"
    if on_gpu:
        config, real = env.work / FULL, env.work / "real"
        sizes = execute(env.selftest("--real-sizes", str(real)), env.work, seconds)
        if not isinstance(sizes.answer, bool):
            return result_row(sizes, env.work, seconds, row)
        env = replace(env, data=real if sizes.answer else env.data)
    counts = ("--steps", "20" if on_gpu else "2", "--repeats", "3" if on_gpu else "1")
    command = env.command("bench", "--config", str(config), "--data", str(env.data), "--any-data", *counts)
    process = execute(command, env.work, seconds)
    return process.answer if isinstance(process.answer, dict) else result_row(process, env.work, seconds, row)


def speed_row(name: str, result: Mapping[str, Any], choice: catalogue.Choice, gpu: str | None, row: Row) -> Row:
    """Format a row from bench.py: training step, evaluation of the full network, or input of full-size JPEGs.

    On GPUs it is compared with published and previous measurements; the input must keep up with the training step.
    """
    speeds = {loop: figures["median"] for loop, figures in result["measured"].items()}
    loop = "synthetic" if "synthetic" in speeds else "real"
    if gpu is None:
        return replace(row, result="OK", found=f"{speeds[loop]:,.0f} samples/s: {result['title']}")
    starves = False
    if name == EVALUATION:
        loop, summary = EVALUATION, f"{speeds[EVALUATION]:,.0f} samples/s with the full network"
    elif name == INPUT:
        read, step, loop = speeds["input"], speeds["synthetic"], "real"
        starves = read < published_speed.LEAST_SHARE * step
        share = f"{read / step:.0%}" + (f", less than {published_speed.LEAST_SHARE:.0%}" if starves else "")
        summary = f"{read:,.0f} images/s of real size; the step takes {step:,.0f}: {share}; both {speeds[loop]:,.0f}, "
        summary += f"{result['input_share']:.0%} of the time waiting"
    else:
        published = published_speed.next_to_published(choice.benchmark.name, gpu, speeds[loop])
        published = "; a part of the network, without published results" if result["is_part"] else published
        flops, peak = result["measured"][loop].get("flops_per_second"), peaks.peak_of(gpu, result["precision"])
        utilization = f"; MFU {flops / peak[0]:.1%} of the data sheet peak" if flops and peak else ""
        summary = f"{speeds[loop]:,.0f} samples/s: {result['title']}{published}{utilization}"
    is_slow, comparison = False, ""
    if not result["is_part"]:
        is_slow, comparison = published_speed.compare_measured(choice, gpu, loop, speeds[loop])
    return replace(row, result="FAIL" if is_slow or starves else "OK", found=summary + comparison)


def all_reduce_row(env: CheckEnv, server: links.Server, machine: node.Node, seconds: float, row: Row) -> Row:
    # Measure the framework's all-reduce over all GPUs and compare it with the minimum for their links.
    if env.all_ranks < 2:
        return replace(row, found="one GPU: all-reduce needs at least two")
    framework, file = env.choice.implementation.framework, env.work / "all_reduce.json"
    options = ("--framework", framework, "--device", env.request.device, "--output", str(file))
    command = env.render(
        *env.launch(env.all_ranks).inner, "python", "-m", "benchmarks.common.checks.all_reduce", *options
    )
    process = execute(command, env.work, seconds)
    if process.code != 0 or not file.is_file():
        return result_row(process, env.work, seconds, row)
    rate = json.loads(file.read_text(encoding="utf-8"))["rate"]
    summary = f"{rate / 1e9:,.2f} GB/s bus bandwidth between {env.all_ranks} ranks"
    # Links of GPUs hidden from CUDA do not apply to the visible ones.
    floor = (
        links.all_reduce_floor(server, machine.gpus[0].compute_capability) if env.gpus == len(server.gpus) > 1 else None
    )
    if floor is None:
        return replace(row, result="OK", found=f"{summary}; no floor known for these links")
    min_rate, links_text = floor
    summary = f"{summary}; at least {min_rate / 1e9:,.1f} by {links_text}"
    return replace(row, result="OK" if rate >= min_rate else "FAIL", found=summary)


def telemetry_row(path: Path, device: str) -> Row:
    row = Row(name="", check=TELEMETRY, result="SKIPPED", found="")
    readings = [json.loads(line) for line in (path.read_text(encoding="utf-8").splitlines() if path.exists() else [])]
    if not readings:
        return replace(row, result="FAIL", found="no reading")
    gpus = [reading["gpus"] for reading in readings]
    if device == "cpu":
        return replace(row, result="OK", found=f"{len(readings)} readings of the machine, none of a GPU (--device cpu)")
    names_of_none = {name for sample in gpus for gpu in sample for name, value in gpu.items() if value is None}
    busy = max((gpu["use_percent"] or 0 for sample in gpus for gpu in sample), default=0)
    used = max((gpu["memory_mib"] or 0 for sample in gpus for gpu in sample), default=0)
    summary = f"{len(readings)} readings; a GPU was used up to {busy} % with {used:,} MiB"
    if names_of_none:
        summary += f"; not reported by NVML: {', '.join(sorted(names_of_none))}"
    return replace(row, result="OK" if busy and used else "FAIL", found=summary)


# -- all checks --------------------------------------------------------------------------------------


class Selftest:
    """All checks for a request: ``plan`` collects them, ``run`` runs them one by one."""

    def __init__(self, request: Request, work: Path, machine: node.Node, on_step: Callable[[str], None]) -> None:
        self._request, self._work, self._machine, self._on_step = request, work, machine, on_step
        self._ends = time.monotonic() + request.time_limit
        # Answer of bench.py or failed row, by implementation.
        self._benches: dict[str, dict[str, Any] | Row] = {}
        self._measured: set[str] = set()  # Frameworks with a planned all-reduce check
        self.skipped: list[Row] = []  # Rows of checks that were skipped during planning

    def plan(self) -> list[tuple[CheckEnv, str]]:
        # Checks with their environments, in order. Implementations that cannot run are added to ``skipped``.
        choices = [catalogue.choose(name) for name in self._request.benchmarks] or list(catalogue.choices().values())
        checks: list[tuple[CheckEnv, str]] = []
        for choice in choices:
            self._on_step(f"{choice.name}: listing its checks")
            checks += self._checks_of(choice)
        order = {name: number for number, name in enumerate(FIRST)}
        checks.sort(key=lambda check: order.get(check[1], len(order)))
        if not checks and not self.skipped:
            raise unknown_name("check", ", ".join(self._request.only), [*FIRST, TELEMETRY])
        return checks

    def _checks_of(self, choice: catalogue.Choice) -> list[tuple[CheckEnv, str]]:
        try:
            env = make_env(self._request, choice, self._machine, self._work)
            prepare(env)
        except EncoreError as error:
            hint = f"; hint: {error.hint}" if error.hint else ""
            self.skipped.append(Row(name=choice.name, check=IMPORTS, result="SKIPPED", found=f"{error.found}{hint}"))
            return []
        listed = execute(env.selftest("--list"), env.work, CHECK_SECONDS)
        if not isinstance(listed.answer, list):
            problem = f"its checks cannot be listed: exit code {listed.code}"
            self.skipped.append(Row(name=choice.name, check=IMPORTS, result="FAIL", found=problem, lines=listed.lines))
            return []
        # Collectives are the framework's, whatever it trains.
        framework = choice.implementation.framework
        measurements = (BENCH,) if framework in self._measured else (BENCH, ALL_REDUCE)
        self._measured.add(framework)
        return [(env, name) for name in (*listed.answer, *measurements) if self._wants(name)]

    def _wants(self, name: str) -> bool:
        return not self._request.only or name.startswith(self._request.only)

    def run(self, plan: Sequence[tuple[CheckEnv, str]], on_start: Callable[[str, str], None]) -> Iterator[Row]:
        # Yield one row per finished check, then the telemetry row.
        ran, samples = False, self._work / "telemetry.jsonl"
        with telemetry.sample_nodes(samples):
            for env, name in plan:
                on_start(env.choice.name, name)
                row = self._row(env, name)
                ran = ran or row.result == "OK"
                yield row
        if self._wants(TELEMETRY) and ran:
            yield telemetry_row(samples, self._request.device)

    def _row(self, env: CheckEnv, name: str) -> Row:
        remaining = self._ends - time.monotonic()
        row = Row(name=env.choice.name, check=name, result="SKIPPED", found="")
        limit = f"the time limit of {self._request.time_limit:.0f} s"
        if remaining <= 0:
            return replace(row, found=f"{limit} was reached", cut=True)
        seconds = min(remaining, self._request.check_seconds)
        started = time.monotonic()
        if name == BENCH or (name in (EVALUATION, INPUT) and self._request.device == "gpu"):
            row = self._measured_row(env, name, seconds, row)
        elif name == ALL_REDUCE:
            row = all_reduce_row(env, links.this_server(self._machine), self._machine, seconds, row)
        else:
            row = result_row(execute(env.selftest("--check", name), env.work, seconds), env.work, seconds, row)
        if row.result == "FAIL" and time.monotonic() >= self._ends:
            row = replace(row, result="SKIPPED", found=f"stopped by {limit}", lines=(), cut=True)
        return replace(row, seconds=time.monotonic() - started)

    def _measured_row(self, env: CheckEnv, name: str, seconds: float, row: Row) -> Row:
        # bench.py runs once for all rows with the same implementation
        choice, ran = env.choice, env.choice.name in self._benches
        result = self._benches.get(choice.name) or measure(env, seconds, row)
        self._benches[choice.name] = result
        if isinstance(result, Row):
            return replace(row, found=f"{BENCH} failed") if ran else result
        gpu = self._machine.gpus[0].name if self._request.device == "gpu" else None
        return speed_row(name, result, choice, gpu, row)
