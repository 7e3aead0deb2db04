"""Measure an implementation with its own bench.py, in its environment."""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore import catalogue, configuration, data, environment, launchers, paths
from encore.containers import checks, renderers
from encore.errors import EncoreError, ExitCode
from encore.job import Job, rank_environment
from encore.machine import node
from encore.run import planning


@dataclass(frozen=True, kw_only=True)
class Request:
    name: str
    system: str | None
    round: str | None
    data: Path | None
    steps: int
    repeats: int
    settings: tuple[str, ...]
    python: Path | None = None  # The user's own; None: that of the framework's environment


def measure(request: Request, on_step: Callable[[str], None], on_update: data.OnUpdate) -> dict[str, Any]:
    """Run bench.py on one rank that has the whole machine; return its JSON result."""
    counts = ("--steps", str(request.steps), "--repeats", str(request.repeats))
    return run_program(request, "{module}.bench", counts, on_step, on_update)


def run_program(
    request: Request, program: str, options: Sequence[str], on_step: Callable[[str], None], on_update: data.OnUpdate
) -> dict[str, Any]:
    """Run a program of the training code that takes --config and --data; return the JSON of its last line.

    ``program`` is what comes after ``python -m``, with {module} for the implementation's package.
    """
    choice = catalogue.choose(request.name)
    machine = node.this_node()
    system = planning.choose_system(choice, 1, machine, request.system, request.round)
    resolved = configuration.resolve(choice, system, 1, 1, list(request.settings))
    if request.python is not None:
        python = checks.named_python(request.python, resolved)
    else:
        python = environment.ensure_environment(choice.implementation.framework, on_step)
    folder = (request.data or paths.default_data(choice.benchmark.name)).absolute()
    if request.data is None and system.kind == "small" and not (folder / "dataset.json").exists():
        data.prepare(choice.benchmark.name, folder, data.Preparation(), python, on_update)
    data.check_data(folder, choice.benchmark.name)
    with tempfile.TemporaryDirectory(prefix="encore-bench-") as temporary:
        config = Path(temporary) / "config.json"
        config.write_text(json.dumps(resolved.plain()), encoding="utf-8")
        arguments = ("--config", str(config), "--data", str(folder))
        alone = launchers.on_one_node(choice.implementation.framework, 1, temporary)
        job = Job(
            argv=("python", "-m", *program.format(module=choice.implementation.module).split(), *arguments, *options),
            environment=rank_environment(resolved, alone, {}, node.cores()),
            mounts=(),
            ranks=1,
            gpus=1 if resolved.get("device") == "gpu" else 0,
        )
        command = renderers.host(job, python, os.environ, given=request.python is not None)
        done = subprocess.run(
            command.argv,
            env=dict(command.environment),
            cwd=command.working_directory,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise EncoreError(
            f"the measurement failed with exit code {done.returncode}",
            hint="read its output above",
            exit_code=ExitCode.FAILED,
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
