"""Run an implementation's program in its environment: bench.py, export.py, or a game player."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore import catalogue, configuration, data, environment, launchers, paths
from encore.containers import checks, renderers
from encore.errors import EncoreError, ExitCode
from encore.job import Job, rank_environment
from encore.machine import interpreters, node
from encore.run import planning, run_folder

OnStep = Callable[[str], None]
EXPORT = "export"  # An implementation's export module, and environment with packages for the formats
PLAYER = "gtp"  # Player module for a game; speaks the Go Text Protocol on stdin and stdout


# -- bench.py ----------------------------------------------------------------------------------------


def measure(
    request: planning.Request, program: str, options: Sequence[str], on_step: OnStep, on_update: data.OnUpdate
) -> dict[str, Any]:
    """Run a program with --config and --data on one rank with all cores; return the JSON in its last line of output.

    ``program`` follows ``python -m``; {module} is replaced by the implementation's package.
    """
    choice = catalogue.choose(request.name)
    framework, benchmark = choice.implementation.framework, choice.benchmark.name
    system = planning.choose_system(choice, 1, node.this_node(), request.system, request.round)
    manifest = data.read_manifest(request.data, benchmark) if request.data else {}
    resolved = configuration.resolve(choice, system, 1, 1, list(request.settings), manifest)
    if request.python is not None:
        python = checks.named_python(request.python, resolved)
    else:
        python = environment.ensure_environment(framework, on_step)
    folder = (request.data or paths.default_data(benchmark)).absolute()
    if request.data is None and system.kind == "small" and not (folder / data.PASSPORT).exists():
        data.prepare(benchmark, folder, data.Preparation(), python, on_update)
    data.check_data(folder, benchmark)
    with tempfile.TemporaryDirectory(prefix="encore-bench-") as temporary:
        config = Path(temporary) / "config.json"
        config.write_text(json.dumps(resolved.plain()), encoding="utf-8")
        args = (*program.format(module=choice.implementation.module).split(), "--config", str(config))
        job = Job(
            argv=("python", "-m", *args, "--data", str(folder), *options),
            environment=rank_environment(resolved, launchers.on_one_node(framework, 1, temporary), {}, node.cores()),
            mounts=(),
            ranks=1,
            gpus=1 if resolved.get("device") == "gpu" else 0,
        )
        command = renderers.host(job, python, os.environ, is_user_python=request.python is not None)
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


# -- a player ----------------------------------------------------------------------------------------


def player(name: str, model: str, arguments: Sequence[str], python: Path | None, on_step: OnStep) -> list[str]:
    """Return the command that plays against a model.

    Raises:
        EncoreError: the benchmark has no game to play.
    """
    choice = catalogue.choose(name)
    games = {candidate.benchmark.name for candidate in catalogue.choices().values() if _is_game(candidate)}
    if not _is_game(choice):
        raise EncoreError(
            f"{choice.benchmark.name} has no game to play",
            expected="a game: " + (", ".join(sorted(games)) or "none found"),
        )
    module = choice.implementation.module
    interpreter = interpreters.find_or_create(python, choice.implementation.framework, on_step)
    args = ("--model", model, "--implementation", module)
    return [str(interpreter), "-m", f"{module.rpartition('.')[0]}.{PLAYER}", *args, *arguments]


def _is_game(choice: catalogue.Choice) -> bool:
    return (choice.folder.parent / f"{PLAYER}.py").exists()


def play(command: Sequence[str]) -> int:
    # Run the player on this terminal or pipe; return its exit code.
    path = os.pathsep.join(filter(None, (str(paths.ROOT), os.environ.get("PYTHONPATH", ""))))
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode


# -- export.py ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Export:
    run: Path
    to: Path
    format: str | None = None  # None: the first that the framework has
    experiment: int | None = None  # None: the first experiment that reached the target, else the first
    below_target: bool = False  # Whether to export a model that did not reach the target
    data: Path | None = None  # None: where the run had it
    python: Path | None = None  # Interpreter; None: the framework's environment


def export(request: Export, on_step: OnStep) -> dict[str, Any]:
    """Export a model to the folder ``request.to``, atomically; return the export.json content.

    Raises:
        EncoreError: run or checkpoint not found, target not reached, different data set, existing folder, or outputs
            that differ from the training code.
    """
    run = run_folder.open_run(request.run)
    metadata = run.metadata()
    choice = catalogue.choose(metadata["name"])
    formats = catalogue.framework(choice.implementation.framework).exports
    if request.format is not None and request.format not in formats:
        raise EncoreError(f"{choice.name} is not exported as {request.format!r}", expected=" or ".join(formats))
    file_format = request.format or formats[0]
    experiment = chosen_experiment(run, request.experiment)
    folder = data_set(request.data, metadata["data"], choice)
    if request.to.exists():
        raise EncoreError(
            f"{request.to} exists", expected="a new folder", hint="choose a different folder, or remove it: -o DIR"
        )
    added = [EXPORT] if file_format in catalogue.framework(EXPORT).exports else []
    variables = variables_of(choice, request.python, added, on_step)
    try:
        request.to.absolute().parent.mkdir(parents=True, exist_ok=True)
        writing = Path(tempfile.mkdtemp(prefix=f".{request.to.name}.", dir=request.to.absolute().parent))
    except OSError as error:
        raise EncoreError(
            f"{request.to} cannot be written: {error.strerror}", hint="choose a different folder: -o DIR"
        ) from error
    try:
        description = {
            **{key: metadata[key] for key in ("name", "benchmark", "implementation", "round")},
            "framework": choice.implementation.framework,
            "run": {"name": run.path.absolute().name, "id": metadata["sha256"], "experiment": experiment.number},
            **{key: metadata["code"][key] for key in ("commit", "uncommitted_sha256")},
        }
        options = (
            "--format",
            file_format,
            "--facts",
            json.dumps(description),
            *(["--below-target"] * request.below_target),
        )
        folders = ("--experiment", str(experiment.folder.absolute()), "--data", str(folder), "-o", str(writing))
        on_step(f"exporting {experiment.folder} as {file_format}")
        content = call(choice, (*folders, *options), variables)
        writing.chmod(0o755)
        writing.rename(request.to)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return content


def chosen_experiment(run: run_folder.RunFolder, number: int | None) -> run_folder.Experiment:
    # Select the given experiment, else the first that reached the target, else the first.
    experiments = run.experiments()
    candidates = [experiment for experiment in experiments if number in (None, experiment.number)]
    if not candidates:
        numbers = ", ".join(str(experiment.number) for experiment in experiments)
        raise EncoreError(f"{run.path.name} has no experiment {number}", expected=f"--experiment {numbers}")
    experiment = next((candidate for candidate in candidates if candidate.state().status == "reached"), candidates[0])
    if experiment.state().status == "running":
        raise EncoreError(
            f"experiment {experiment.number} of {run.path.name} is running",
            expected="a finished or stopped experiment",
            hint=f"wait until it finishes: encore follow {run.path}",
        )
    return experiment


def data_set(directory: Path | None, trained_on: Mapping[str, Any], choice: catalogue.Choice) -> Path:
    # The folder of the data set that the run was trained on: ``directory``, or where the run had it.
    folder = (directory or Path(trained_on["folder"])).absolute()
    manifest = data.check_data(folder, choice.benchmark.name)
    if manifest.id != trained_on["id"]:
        raise EncoreError(
            f"{folder} has id {manifest.id[:12]}",
            expected=f"the data set that the run was trained on, {trained_on['id'][:12]}",
            hint="pass its folder: --data DIR",
        )
    return folder


def variables_of(
    choice: catalogue.Choice, python: Path | None, added: Sequence[str], on_step: OnStep
) -> dict[str, str]:
    """Return the environment variables for `call`: framework and packages of ``added`` on PYTHONPATH.

    Packages from the environments ``added`` follow the framework's packages; the user's ``python`` must have them
    installed.
    """
    framework = choice.implementation.framework
    base = interpreters.find_or_create(python, framework, on_step)
    job = Job(argv=(), environment={}, mounts=(), ranks=1, gpus=0)
    command = renderers.host(job, base, os.environ, is_user_python=python is not None)
    names = added if python is None else ()
    pythons = [environment.ensure_environment(name, on_step, beside=framework) for name in names]
    # After the framework's packages, so that its version of shared packages such as NumPy takes precedence.
    both = [base, *pythons] if pythons else []
    packages = [
        str(folder) for interpreter in both for folder in interpreter.parent.parent.glob("lib/python*/site-packages")
    ]
    search = os.pathsep.join([command.environment["PYTHONPATH"], *packages])
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(node.cores()))}
    return {**command.environment, "PYTHONPATH": search, "ENCORE_PYTHON": str(base), **threads}


def call(choice: catalogue.Choice, options: Sequence[str], variables: Mapping[str, str]) -> dict[str, Any]:
    # Run the implementation's export.py. Return its output, or raise its error.
    command = [variables["ENCORE_PYTHON"], "-m", f"{choice.implementation.module}.{EXPORT}", *options]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    last = (done.stdout.splitlines() or [""])[-1]
    content: dict[str, Any] = json.loads(last) if last.startswith("{") else {}
    if "problem" in content:
        problem = content["problem"]
        code = ExitCode.REFUSED if done.returncode == ExitCode.REFUSED else ExitCode.FAILED
        raise EncoreError(problem["found"], expected=problem["expected"], hint=problem["hint"], exit_code=code)
    if done.returncode != 0 or not content:
        raise EncoreError(
            f"export.py failed with exit code {done.returncode}:\n{done.stderr[-4000:]}",
            hint="try a different --format, or report a bug",
            exit_code=ExitCode.FAILED,
        )
    return content
