"""From an export to a server: the backend and image of its format, the command, and what is asked of the server."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore import environment, names, paths
from encore.containers import engines, images, runtimes
from encore.containers.images import Server
from encore.containers.runtimes import Target
from encore.errors import EncoreError, ExitCode
from encore.job import Command, Job, Mount
from encore.lab.serving import wheel
from encore.lab.serving.export import Export, Model
from encore.lab.serving.model_config import PYTHON_BACKEND, Backend, Settings
from encore.lab.serving.repository import SERVED, Repository
from encore.lab.serving.server import Ports

ENVIRONMENT = "serving"
PORTABLE = "onnx"  # the format that the environment of `encore serve` runs; any other needs the framework that wrote it
MODELS = "/models"  # the model repository in a container


@dataclass(frozen=True, kw_only=True)
class Place:
    runtime: str
    backend: Backend
    command: Command
    problem: EncoreError | None = None  # why nothing can be started there; a dry run shows the command all the same
    image: str = ""
    found: wheel.Wheel | None = None
    python: wheel.Python | None = None  # on the host: runs the model


def release_for(export: Export) -> Server:
    """Return the image's release that serves the export's format; EncoreError if none does."""
    servers = images.catalogue().server
    for each in servers:
        if export.format in each.backends:
            return each
    raise names.unknown("format", export.format, {name for each in servers for name in each.backends})


def in_container(
    runtime: str, export: Export, repository: Repository, settings: Settings, ports: Ports, image: str | None = None
) -> Place:
    """Return the server in NGC's image, or in ``image``; never raises for what the engine lacks."""
    release = release_for(export)
    backend = Backend(release.backends[export.format], release.platforms.get(export.format, ""))
    problem = _missing(release, export, image)
    engine = None
    reference = image or release.reference
    try:
        engine = engines.connect(runtime)
        if engines.inspect(engine, reference) is None:
            problem = problem or EncoreError(f"{runtime} has no {reference}", hint=f"{runtime} pull {reference}")
    except EncoreError as error:
        problem = problem or error
    mount = Mount(repository.models.absolute(), MODELS, True)
    job = Job(
        argv=("tritonserver", f"--model-repository={MODELS}", *ports.options("0.0.0.0")),
        environment={},
        mounts=(mount,),
        ranks=1,
        gpus=1 if settings.device == "gpu" else 0,
    )
    target = Target(runtime=runtime, engine=engine, image=reference)
    command = runtimes.render(target, job, runtimes.container_name(repository.folder.absolute()), os.environ)
    return Place(runtime=runtime, backend=backend, command=command, problem=problem, image=reference)


def _missing(release: Server, export: Export, image: str | None) -> EncoreError | None:
    lacks = release.lacks.get(export.format)
    if not lacks or image:
        return None
    return EncoreError(
        f"{release.reference} serves {export.format} with its {release.backends[export.format]} backend, "
        f"but has no {lacks}",
        expected=f"an image made from it that has {lacks}",
        hint=f"--image NAME, or export the model again with --format {PORTABLE}",
    )


def on_host(
    export: Export, repository: Repository, ports: Ports, python: Path | None, report: environment.OnStep | None
) -> Place:
    """Return the server of nvidia-pytriton, which runs the model by model.py; makes the environments if need be.

    Without ``report`` nothing is made: what is missing is the place's problem.
    """
    release_for(export)
    server, server_problem = _python(ENVIRONMENT, report) if python is None else (python, None)
    own = export.format == PORTABLE
    model, model_problem = (server, None) if own else _python(export.framework, report)
    problem = server_problem or model_problem
    backend, options = Backend(PYTHON_BACKEND), ports.options("127.0.0.1")
    if problem is not None:
        argv = ("tritonserver", f"--model-repository={repository.models}", *options)
        shown = Command(argv=argv, environment={}, working_directory=paths.ROOT)
        return Place(runtime="host", backend=backend, command=shown, problem=problem)
    asked = wheel.ask(model)
    found = wheel.find(asked if own else wheel.ask(server), asked)
    command = wheel.command(found, asked, repository, options, os.environ)
    return Place(runtime="host", backend=backend, command=command, found=found, python=asked)


def _python(name: str, report: environment.OnStep | None) -> tuple[Path, EncoreError | None]:
    if report is not None:
        return environment.ensure_environment(name, report), None
    found = environment.describe(name)
    missing = EncoreError(f"no {name} environment yet", hint="the same command without --dry-run makes it")
    return found.python, None if found.is_ready else missing


def prepare(place: Place, repository: Repository) -> None:
    """Make what the server on the host needs besides the repository."""
    if place.found is not None and place.python is not None:
        wheel.link_backend(place.found, place.python.version, repository)


def client_python(python: Path | None, report: environment.OnStep) -> Path:
    """Return a Python with tritonclient: the caller's, or that of the environment, which is made if need be."""
    return python or environment.ensure_environment(ENVIRONMENT, report)


def ask(python: Path, folder: Path, ports: Ports) -> dict[str, list[dict[str, Any]]]:
    """Return what the client found of each model over HTTP and over gRPC, with the export's samples."""
    client = folder / "client.py"
    return {
        protocol: _json([str(python), str(client), "--json", "--url", url, "--protocol", protocol])
        for protocol, url in (("http", f"127.0.0.1:{ports.http}"), ("grpc", f"127.0.0.1:{ports.grpc}"))
    }


@dataclass(frozen=True, kw_only=True)
class Load:
    batches: Sequence[int]
    clients: Sequence[int]
    requests: int
    protocol: str = "grpc"


def measure(python: Path, model: Model, folder: Path, ports: Ports, load: Load) -> list[dict[str, Any]]:
    """Return throughput and latency through the server, and of ONNX Runtime called directly where it runs the model.

    ``folder`` has the example that is sent.
    """
    port = ports.grpc if load.protocol == "grpc" else ports.http
    words = [str(python), "-m", f"benchmarks.common.{SERVED.name}.measure", "--protocol", load.protocol]
    words += ["--url", f"127.0.0.1:{port}", "--folder", str(folder.absolute())]
    words += ["--batches", ",".join(map(str, load.batches)), "--clients", ",".join(map(str, load.clients))]
    words += ["--requests", str(load.requests)]
    if model.export.format == PORTABLE:
        words += ["--model", str((model.folder / model.export.model).absolute())]
    found: list[dict[str, Any]] = _json(words)
    return found


def _json(words: Sequence[str]) -> Any:
    with_code = {**os.environ, "PYTHONPATH": str(paths.ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=with_code, cwd=paths.ROOT)
    try:
        return json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1].removeprefix("error: ")
        raise EncoreError(f"the client failed: {last}", exit_code=ExitCode.FAILED) from None
