"""Container engines of this machine: detection, capabilities, and explanation of errors."""

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encore.containers.renderers import GpuAccess
from encore.errors import EncoreError

BUILDERS = ("docker", "podman")  # Engines that build images; the others run image files converted from them
ENGINES = (*BUILDERS, "apptainer", "enroot")
INSTALL = {
    "docker": "install Docker (apt-get install docker.io), or use another runtime: --runtime podman or host",
    "podman": "install Podman (apt-get install podman), or use another runtime: --runtime docker or host",
    "apptainer": "install Apptainer, or load its module, or use another runtime: --runtime docker or host",
    "enroot": "install Enroot, or use another runtime: --runtime docker or host",
}
NO_TOOLKIT = "install the NVIDIA Container Toolkit and run `nvidia-ctk runtime configure` or `nvidia-ctk cdi generate`"

# Error pattern, meaning, and hint; the first match applies
SYMPTOMS: tuple[tuple[str, str, str], ...] = (
    (
        r"permission denied while trying to connect|dial unix .*permission denied",
        "no permission on the engine's socket",
        "add yourself to its group and log in again: sudo usermod --append --groups docker $USER",
    ),
    (
        r"Cannot connect to the Docker daemon|Is the docker daemon running|connection refused.*docker\.sock",
        "the engine is not running",
        "start it: sudo systemctl start docker",
    ),
    (
        r"newuidmap|subuid|not enough (unused )?ID|insufficient UIDs|cannot find UID/GID",
        "this user has no subordinate IDs for rootless containers",
        "add them: sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 $USER, "
        "then podman system migrate",
    ),
    (
        r"could not select device driver|unresolvable CDI|nvidia-container-cli|runtime.*nvidia|nvidia\.com",
        "the engine cannot pass GPUs to containers",
        NO_TOOLKIT,
    ),
    (r"no space left on device", "the engine's disk is full", "free some space: docker system prune"),
    (
        r"rlimit|ulimit|setting.*limits",
        "the engine cannot raise the limits that the job requests",
        "start the engine with CAP_SYS_RESOURCE, or lower default_ulimits in containers.conf (Podman)",
    ),
    (
        r"unauthorized|authentication required|denied: requested access|403 Forbidden",
        "the registry requires a login",
        "log in: docker login nvcr.io, with $oauthtoken as the user and an NGC API key as the password",
    ),
    (
        r"no such host|i/o timeout|unreachable|connection (refused|reset)|TLS handshake|x509|resolution|EOF$",
        "the registry cannot be reached",
        "check network and proxy, transfer the image with `docker save` and `docker load`, or build on the CPU "
        "base: make standin, then BASE=standin",
    ),
    (
        r"no such image|image not known|unable to find image|manifest unknown|not found: manifest",
        "no such image",
        "build it: make build-BENCHMARK",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Engine:
    name: str
    program: str
    rootless: bool = False
    gpu_access: GpuAccess | None = None  # None: it cannot hand out GPUs
    data: Path | None = None  # Storage folder of images; None if unknown


@dataclass(frozen=True, kw_only=True)
class Image:
    id: str
    digests: tuple[str, ...]  # ``name@sha256:...`` of the registries that it was pulled from or pushed to
    labels: Mapping[str, str]
    user: str
    bytes: int


def explain(output: str, doing: str) -> EncoreError:
    """Explain an engine's output as an error with a hint."""
    for pattern, meaning, hint in SYMPTOMS:
        if re.search(pattern, output, re.IGNORECASE | re.MULTILINE):
            return EncoreError(f"{doing}: {meaning}", hint=hint)
    last = [line.strip() for line in output.splitlines() if line.strip()][-1:]
    return EncoreError(f"{doing}: {' '.join(last) or 'no output from the engine'}", hint="encore doctor")


def programs(name: str, path: str | None = None) -> list[str]:
    """Return every client of this name on PATH, the first first."""
    folders = (path if path is not None else os.environ.get("PATH", os.defpath)).split(os.pathsep)
    paths = [shutil.which(name, path=folder) for folder in folders if folder]
    return list(dict.fromkeys(program for program in paths if program))


def find(name: str) -> str:
    paths = programs(name)
    if not paths:
        raise EncoreError(f"no {name} on PATH", hint=INSTALL[name])
    return paths[0]


def ask(argv: Sequence[str], timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a short engine command; EncoreError if it does not respond."""
    try:
        return subprocess.run(
            list(argv), capture_output=True, text=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EncoreError(f"{argv[0]} does not answer: {error}", hint="restart the engine") from error


def _srun_with_pyxis() -> str:
    # srun, if Slurm has the plugin, whose options are then listed in srun's help
    paths = programs("srun")
    if paths and "--container-image" in ask([paths[0], "--help"]).stdout:
        return paths[0]
    raise EncoreError(
        "srun has no --container-image: Pyxis is not installed here" if paths else "no srun on PATH",
        hint="use another runtime: --runtime apptainer, docker or host",
    )


@functools.cache
def _info(program: str) -> subprocess.CompletedProcess[str]:
    # Cached: a sweep plans many points, and ``podman info`` takes most of a second
    return ask([program, "info", "--format", "{{json .}}"])


def connect(name: str) -> Engine:
    """Return an engine that responds; EncoreError with the reason otherwise."""
    if name not in BUILDERS:
        program = _srun_with_pyxis() if name == "pyxis" else find(name)
        return Engine(name=name, program=program, rootless=True, gpu_access="gpus")
    program = find(name)
    done = _info(program)
    properties: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        properties = json.loads(done.stdout)
    # Docker's client prints its own facts even if the daemon does not respond.
    problems = properties.get("ServerErrors") or []
    if done.returncode != 0 or problems:
        raise explain("\n".join([*problems, done.stderr]), name)
    if name == "podman":
        rootless = bool(properties.get("host", {}).get("security", {}).get("rootless"))
        access: GpuAccess | None = "cdi" if _has_cdi() else None
        data = properties.get("store", {}).get("graphRoot")
    else:
        rootless = any("rootless" in option for option in properties.get("SecurityOptions") or ())
        access = "cdi" if _has_cdi() and properties.get("CDISpecDirs") else None
        access = "gpus" if "nvidia" in properties.get("Runtimes", {}) else access
        data = properties.get("DockerRootDir")
    return Engine(name=name, program=program, rootless=rootless, gpu_access=access, data=Path(data) if data else None)


def _has_cdi() -> bool:
    # Whether a description of NVIDIA GPUs for the Container Device Interface is where engines look
    folders = (Path("/etc/cdi"), Path("/var/run/cdi"))
    return any("nvidia" in path.name for folder in folders if folder.is_dir() for path in folder.iterdir())


def inspect(engine: Engine, reference: str) -> Image | None:
    done = ask([engine.program, "image", "inspect", reference])
    if done.returncode != 0:
        error = explain(done.stderr, engine.name)
        if "no such image" in error.found:
            return None
        raise error
    properties = json.loads(done.stdout)[0]
    config = properties.get("Config") or {}
    return Image(
        id=properties["Id"],
        digests=tuple(properties.get("RepoDigests") or ()),
        labels=config.get("Labels") or {},
        user=config.get("User") or "",
        bytes=int(properties.get("Size") or 0),
    )


def infiniband() -> tuple[str, ...]:
    folder = Path("/dev/infiniband")
    return tuple(sorted(str(path) for path in folder.iterdir())) if folder.is_dir() else ()
