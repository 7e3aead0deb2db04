"""Triton server for an export: image or wheel, command, start and stop, and requests.

Without a container the server is the wheel nvidia-pytriton with its Python backend. The wheel contains the binary,
the backend library, a stub per Python version, and the libraries that they load (in nvidia_pytriton.libs). The stub
loads the shared library of the Python version that it was built for, which must be found.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore import environment, paths
from encore.containers import engines, images, runtimes
from encore.containers.images import Server
from encore.containers.runtimes import Target
from encore.errors import EncoreError, ExitCode, unknown_name
from encore.job import PASSED_ON, Command, Job, Mount
from encore.lab.serving.export import ENVIRONMENT, Export, Model
from encore.lab.serving.repository import PYTHON_BACKEND, SERVED, Backend, Repository, Settings
from encore.machine import processes

PORTABLE = "onnx"  # the format that the environment of `encore serve` runs; any other needs the framework that wrote it
MODELS = "/models"  # the model repository in a container


POLL_SECONDS = 0.2
STOP_SECONDS = 40.0  # Triton's default grace period for requests in flight is 30 s (--exit-timeout-secs)


@dataclass(frozen=True)
class Ports:
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002  # 0: no metrics

    def options(self, address: str) -> tuple[str, ...]:
        metrics = (f"--metrics-port={self.metrics}",) if self.metrics else ("--allow-metrics=false",)
        endpoints = (f"--http-address={address}", f"--grpc-address={address}")
        return (*endpoints, f"--http-port={self.http}", f"--grpc-port={self.grpc}", *metrics)


# -- where it runs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Deployment:
    runtime: str
    backend: Backend
    command: Command
    problem: EncoreError | None = None  # reason that the server cannot be started; a dry run still prints the command
    image: str = ""
    backend_files: tuple[Path, ...] = ()  # on the host: files from two locations of the wheel that the server loads


def release_for(export: Export) -> Server:
    """Return the image's release that serves the export's format; EncoreError if none does."""
    releases = {name: release for release in reversed(images.catalogue().server) for name in release.backends}
    if export.format not in releases:
        raise unknown_name("format", export.format, releases)
    return releases[export.format]


def in_container(
    runtime: str, export: Export, repository: Repository, settings: Settings, ports: Ports, image: str | None = None
) -> Deployment:
    """Return the server in the NGC image or in ``image``; never raises for missing features of the engine."""
    release, engine = release_for(export), None
    problem: EncoreError | None = None
    backend = Backend(release.backends[export.format], release.platforms.get(export.format, ""))
    lacks, reference = release.lacks.get(export.format), image or release.reference
    if lacks and not image:
        problem = EncoreError(
            f"{reference} serves {export.format} with its {backend.name} backend, but has no {lacks}",
            expected=f"an image based on it with {lacks}",
            hint=f"--image NAME, or re-export the model with --format {PORTABLE}",
        )
    try:
        engine = engines.connect(runtime)
        if engines.inspect(engine, reference) is None:
            problem = problem or EncoreError(f"{runtime} lacks {reference}", hint=f"{runtime} pull {reference}")
    except EncoreError as error:
        problem = problem or error
    job = Job(
        argv=("tritonserver", f"--model-repository={MODELS}", *ports.options("0.0.0.0")),
        environment={},
        mounts=(Mount(repository.models.absolute(), MODELS, True),),
        ranks=1,
        gpus=1 if settings.device == "gpu" else 0,
    )
    target = Target(runtime=runtime, engine=engine, image=reference)
    command = runtimes.render(target, job, runtimes.container_name(repository.folder.absolute()), os.environ)
    return Deployment(runtime=runtime, backend=backend, command=command, problem=problem, image=reference)


def on_host(
    export: Export, repository: Repository, ports: Ports, python: Path | None, report: environment.OnStep | None
) -> Deployment:
    """Return the server of nvidia-pytriton, which runs the model with model.py; creates the environments if necessary.

    Without ``report`` no environment is created; ``problem`` is the reason if one is missing.
    """
    release_for(export)
    is_portable, backend, options = export.format == PORTABLE, Backend(PYTHON_BACKEND), ports.options("127.0.0.1")
    pythons = {ENVIRONMENT: python} if python else {}
    programs = []
    for name in (ENVIRONMENT,) if is_portable else (ENVIRONMENT, export.framework):
        described = environment.describe(name)
        if name not in pythons and report is None and not described.is_ready:
            argv = ("tritonserver", f"--model-repository={repository.models}", *options)
            placeholder = Command(argv=argv, environment={}, working_directory=paths.ROOT)
            problem = EncoreError(f"no {name} environment yet", hint="the same command without --dry-run makes it")
            return Deployment(runtime="host", backend=backend, command=placeholder, problem=problem)
        programs.append(
            pythons.get(name) or (environment.ensure_environment(name, report) if report else described.python)
        )
    model = inspect_python(programs[-1])
    wheel = find_wheel(model if is_portable else inspect_python(programs[0]), model)
    files = (*(wheel / BACKEND).iterdir(), wheel / STUBS / model.version / STUB)
    libraries = (model.library, str(wheel.parent / LIBRARIES), os.environ.get("LD_LIBRARY_PATH", ""))
    # The Python backend starts its stub by `bash -c` without quoting paths: relative paths avoid spaces in user paths.
    # The stub finds its standard library through the first `python3` on PATH.
    command = Command(
        argv=(
            str(wheel / SERVER),
            f"--model-repository={repository.models.relative_to(repository.folder)}",
            "--backend-directory=backends",
            *options,
        ),
        environment={
            **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
            "PATH": os.pathsep.join([str(model.program.parent), os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join(model.packages),
            "PYTHONNOUSERSITE": "1",
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        },
        working_directory=repository.folder.absolute(),
    )
    return Deployment(runtime="host", backend=backend, command=command, backend_files=files)


ASK = """
import importlib.util, json, os, sys, sysconfig
found = importlib.util.find_spec("pytriton")
folders = [sysconfig.get_config_var("LIBDIR"), os.path.join(sys.base_prefix, "lib")]
name = "libpython%d.%d.so.1.0" % sys.version_info[:2]
print(json.dumps({
    "version": "%d.%d" % sys.version_info[:2],
    "packages": [path for path in sys.path if path.endswith("-packages")],
    "wheel": os.path.dirname(found.origin) if found and found.origin else "",
    "library": next((folder for folder in folders if folder and os.path.exists(os.path.join(folder, name))), ""),
}))
"""
STUB = "triton_python_backend_stub"
PYTRITON = "pip install --no-deps nvidia-pytriton, or leave --python out: encore makes the environment"


@dataclass(frozen=True)
class Python:
    program: Path
    version: str
    packages: tuple[str, ...]
    wheel: str  # folder of the package pytriton; empty: not installed
    library: str  # folder of libpython; empty: the interpreter was built without it


def inspect_python(program: Path) -> Python:
    try:
        done = subprocess.run([str(program), "-c", ASK], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = str((error.stderr if isinstance(error, subprocess.CalledProcessError) else "") or error).strip()[-200:]
        raise EncoreError(f"{program} does not run: {reason}", hint="--python FILE: a Python") from error
    answer = json.loads(done.stdout)
    return Python(program, answer["version"], tuple(answer["packages"]), answer["wheel"], answer["library"])


SERVER, BACKEND = "tritonserver/bin/tritonserver", "tritonserver/backends/python"
STUBS = "tritonserver/python_backend_stubs"  # the program that runs model.py, by the version of Python
LIBRARIES = "nvidia_pytriton.libs"  # libraries of all of these; sibling of the package


def find_wheel(server: Python, runs_model: Python) -> Path:
    """Return the package in ``server``; EncoreError if it is missing or does not support the model's Python."""
    if not server.wheel:
        raise EncoreError(f"{server.program} lacks nvidia-pytriton", expected="its tritonserver", hint=PYTRITON)
    wheel, version = Path(server.wheel), runs_model.version
    needed = (wheel / SERVER, wheel / BACKEND, wheel.parent / LIBRARIES)
    missing = [path for path in needed if not path.exists()]
    if missing:
        raise EncoreError(f"no {missing[0]}", expected="the wheel of nvidia-pytriton 0.7", hint=PYTRITON)
    if not (wheel / STUBS / version / STUB).exists():
        raise EncoreError(
            f"nvidia-pytriton does not support Python {version}",
            expected=f"Python {', '.join(sorted(path.parent.name for path in wheel.glob(f'{STUBS}/*/{STUB}')))}",
            hint="--python FILE: one of these",
        )
    if not runs_model.library:
        raise EncoreError(
            f"{runs_model.program} was built without libpython{version}.so.1.0, which Triton's Python backend loads",
            expected="a Python with a shared library",
            hint=f"apt-get install libpython{version} python{version}-venv (Debian, Ubuntu), or --runtime docker",
        )
    return wheel


def link_backend(deployment: Deployment, repository: Repository) -> None:
    """Link the files that the server on the host loads into one folder, in the repository's parent."""
    folder = repository.folder.absolute() / "backends" / "python"
    for path in deployment.backend_files:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / path.name).unlink(missing_ok=True)
        (folder / path.name).symlink_to(path)


# -- start and stop -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(
    command: Command, ports: Ports, models: Sequence[str], log: Path, seconds: float
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the server and wait until all ``models`` are ready; its output goes to ``log``.

    EncoreError if it exits or is not ready after ``seconds``.
    """
    try:
        with log.open("wb") as output:
            child = processes.start(command, output)
    except OSError as error:
        raise EncoreError(f"{command.argv[0]} does not start: {error}", exit_code=ExitCode.FAILED) from error
    try:
        _wait(child, ports, models, log, seconds)
        yield child
    finally:
        _stop(child, command)


def _wait(child: subprocess.Popen[bytes], ports: Ports, models: Sequence[str], log: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not all(_is_ready(ports, model) for model in models):
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)
            raise explain(log, f"the server stopped with exit code {child.returncode}")
        # Triton does not detect that its backend process failed to start, and waits for it.
        if STUB_FAILED.search(log.read_text(encoding="utf-8", errors="replace")):
            raise explain(log, "the server cannot start the backend")
        if time.monotonic() > end:
            raise explain(log, f"the server is not ready after {seconds:g} s")


def _is_ready(ports: Ports, model: str) -> bool:
    url = f"http://127.0.0.1:{ports.http}/v2/models/{model}/ready"
    # Ignore proxy variables of the environment.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


# Output of the shell and the loader if the stub of the Python backend cannot be started.
STUB_FAILED = re.compile(r"^(?:bash: .+|.+: error while loading shared libraries: .+)$", re.MULTILINE)

# Harmless error of all servers on machines without GPUs.
WITHOUT_GPU = "CudaDriverHelper has not been initialized."

# Server message, meaning, fix; the first match counts.
SYMPTOMS = (
    (r"failed to (?:start|listen).*|[Aa]ddress already in use", "a port is taken", "--http-port and --grpc-port"),
    (
        r"No space left on device|[Uu]nable to (?:create|initialize) shared memory",
        "/dev/shm is full",
        "free some of it",
    ),
    (r"unable to find backend library for backend '[^']*'", "the image lacks the backend", "--image NAME: one with it"),
    (r"cannot open shared object file|unable to load shared library", "a library is missing", "see the last lines"),
)


def explain(log: Path, status: str) -> EncoreError:
    """Return the failure reason from the server's log."""
    text = log.read_text(encoding="utf-8", errors="replace")
    reasons = re.findall(r"^(?:E\d.*\] |error: )\"?(.+?)\"?$", text, re.MULTILINE)
    reasons = STUB_FAILED.findall(text)[:1] or [reason for reason in reasons if reason != WITHOUT_GPU]
    loading = re.findall(r"failed to load '[^']*' version \d+: (.+?)(?:\\n|\"?$)", text, re.MULTILINE)
    message = (loading or reasons or [" ".join(text.split()[-20:])])[-1]
    for pattern, meaning, hint in SYMPTOMS:
        if re.search(pattern, text):
            problem = f"{status}: {meaning}: {message}"
            return EncoreError(problem, hint=f"{hint}; output in {log}", exit_code=ExitCode.FAILED)
    return EncoreError(f"{status}: {message}", hint=f"read {log}", exit_code=ExitCode.FAILED)


def _stop(child: subprocess.Popen[bytes], command: Command) -> None:
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(STOP_SECONDS)
    # The Python backend's processes are in the server's group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    processes.clean_up(command)


# -- requests -----------------------------------------------------------------------------------------------------


def ask(python: Path, folder: Path, ports: Ports) -> dict[str, list[dict[str, Any]]]:
    """Return the client's results per model over HTTP and gRPC, with the samples of the export."""
    client = folder / "client.py"
    return {
        protocol: _json([str(python), str(client), "--json", "--url", url, "--protocol", protocol])
        for protocol, url in (("http", f"127.0.0.1:{ports.http}"), ("grpc", f"127.0.0.1:{ports.grpc}"))
    }


def measure(
    python: Path,
    model: Model,
    folder: Path,
    ports: Ports,
    batches: Sequence[int],
    clients: Sequence[int],
    requests: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return throughput and latency through the server, and of ONNX Runtime called directly for ONNX models.

    All combinations of batch size and client count are measured; ``folder`` has the example input.
    """
    options = {
        "protocol": "grpc", "url": f"127.0.0.1:{ports.grpc}", "folder": str(folder.absolute()),
        "batches": ",".join(map(str, batches)), "clients": ",".join(map(str, clients)), "requests": str(requests),
    }  # fmt: skip
    if model.export.format == PORTABLE:
        options["model"] = str((model.folder / model.export.model).absolute())
    arguments = (word for name, value in options.items() for word in (f"--{name}", value))
    return list(_json([str(python), "-m", f"benchmarks.common.{SERVED.name}.measure", *arguments]))


def _json(argv: Sequence[str]) -> Any:
    with_code = {**os.environ, "PYTHONPATH": str(paths.ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=with_code, cwd=paths.ROOT)
    try:
        return json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1].removeprefix("error: ")
        raise EncoreError(f"the client failed: {last}", exit_code=ExitCode.FAILED) from None
