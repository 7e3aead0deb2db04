"""Selection of the runtime: host, or an image in a container engine, with the reason."""

import contextlib
import hashlib
import os
import re
import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from encore import data, files, paths
from encore.catalogue import Choice
from encore.containers import building, engines, images, renderers
from encore.containers.engines import Engine, Image
from encore.containers.renderers import Container, check_image
from encore.errors import EncoreError, unknown_name
from encore.job import Command, Job, Mount
from encore.launchers import ALONE, Launch
from encore.machine import interpreters
from encore.machine.interpreters import PythonInfo
from encore.machine.node import Node

RENDERERS = {
    "pyxis": renderers.pyxis,
    "docker": renderers.docker,
    "podman": renderers.podman,
    "apptainer": renderers.apptainer,
    "enroot": renderers.enroot,
}
RUNTIMES = ("auto", "host", *RENDERERS)


class UsedImage(TypedDict):
    """Image of a container."""

    name: str
    id: str | None
    digests: list[str]
    base: str | None
    revision: str | None
    code: str | None  # Hash of the code in it


@dataclass(frozen=True, kw_only=True)
class Target:
    """A runtime with its engine, image, and Python."""

    runtime: str = "host"
    reason: str = "requested"
    engine: Engine | None = None
    image: str = ""  # Name or file of the image
    image_info: Image | None = None
    problem: EncoreError | None = None  # Why the runtime cannot start a run; a dry run still shows the command
    # The user's Python on the host; None: that of the framework's environment
    python: Path | None = None
    python_info: PythonInfo | None = None  # Answer of the Python; None before it was queried

    def python_json(self) -> dict[str, Any] | None:
        if self.python is None:
            return None
        info = asdict(self.python_info) if self.python_info else {}
        return {"file": str(self.python), **info}

    def as_json(self) -> UsedImage | None:
        if self.runtime == "host":
            return None
        labels = dict(self.image_info.labels) if self.image_info else {}
        return {
            "name": self.image,
            "id": self.image_info.id if self.image_info else None,
            "digests": list(self.image_info.digests) if self.image_info else [],
            "base": labels.get("org.opencontainers.image.base.name"),
            "revision": labels.get("org.opencontainers.image.revision"),
            "code": labels.get("encore.code"),
        }


ON_HOST = Target()


def choose(
    runtime: str,
    choice: Choice,
    machine: Node,
    device: str,
    image: str | None = None,
    in_slurm: bool = False,
    python: Path | None = None,
) -> Target:
    """Return the requested runtime; for ``auto`` the first one with an image of the benchmark.

    ``python`` is the user's interpreter for the host.
    """
    if runtime not in RUNTIMES:
        raise unknown_name("runtime", runtime, RUNTIMES)
    check_image(image or "")
    if runtime == "host":
        return Target(runtime="host", python=python)
    if runtime != "auto":
        return _look(runtime, choice, "requested", image)
    here = [name for name in RENDERERS if _is_here(name, in_slurm)]
    tried = [_look(name, choice, f"{name} has the image", image) for name in here]
    for target in tried:
        if target.problem is None:
            return target
    if python is not None:
        return Target(
            runtime="host", reason=f"no container engine has an image of {choice.name}; {python}", python=python
        )
    if tried and machine.gpus and device == "gpu":
        return tried[0]
    return Target(runtime="host", reason=f"no container engine has an image of {choice.name}")


def _is_here(name: str, in_slurm: bool) -> bool:
    if name == "pyxis":
        with contextlib.suppress(EncoreError):
            return in_slurm and bool(engines.connect(name))
        return False
    return bool(engines.programs(name))


def _look(runtime: str, choice: Choice, reason: str, image: str | None) -> Target:
    # Inspect a runtime. Errors are stored in the target, so that a dry run shows the command on any machine
    built = runtime in engines.BUILDERS
    reference = image or (building.image_name(choice) if built else str(building.image_file(choice, runtime)))
    engine = image_info = problem = None
    try:
        engine = engines.connect(runtime)
        image_info = engines.inspect(engine, reference) if built else None
        if built and image_info is None:
            problem = building.not_built(choice, runtime)
        # Pyxis imports images from a registry: ``nvcr.io#nvidia/mxnet:24.06-py3``; image files are absolute paths.
        elif not built and (runtime != "pyxis" or reference.startswith(("/", "."))) and not Path(reference).exists():
            hint = f"encore images convert {choice.name} --runtime {'enroot' if runtime == 'pyxis' else runtime}"
            problem = EncoreError(f"no image file {reference}", hint=hint)
    except EncoreError as error:
        problem = error
    return Target(
        runtime=runtime, reason=reason, engine=engine, image=reference, image_info=image_info, problem=problem
    )


def render(target: Target, job: Job, name: str, caller: Mapping[str, str]) -> Command:
    container = Container(
        image=target.image,
        name=name,
        user=os.getuid(),
        group=os.getgid(),
        caller=caller,
        program=target.engine.program if target.engine else "",
        rootless=target.engine.rootless if target.engine else False,
        gpu_access=(target.engine.gpu_access if target.engine else None) or "gpus",
        infiniband=engines.infiniband() if job.gpus else (),
        limits=_limits(),
    )
    return RENDERERS[target.runtime](job, container)


def preparation(target: Target, benchmark: str, directory: Path, settings: data.Preparation) -> Command:
    """Return the command that prepares a data set in a container; it sees the raw data and the folder to write."""
    folder = directory.absolute()
    mounts: tuple[Mount, ...] = (Mount(folder, str(folder), False),)
    paths = data.paths_in(settings.options).values()
    read = dict.fromkeys([*([settings.source.absolute()] if settings.source else []), *paths])
    mounts = (*mounts, *(Mount(path, str(path), True) for path in read if path != folder))
    prepare = data.prepare_command("python", benchmark, folder, settings)
    job = Job(argv=(*prepare, "--progress", "json"), environment={}, mounts=mounts, ranks=1, gpus=0)
    return render(target, job, container_name(folder), os.environ)


def _limits() -> dict[str, int]:
    # The caller's hard limits of open files and processes
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    # Podman reduces the limit to the kernel's pid_max.
    max_pids = int(files.text_of("/proc/sys/kernel/pid_max") or processes)
    processes = max_pids if processes == resource.RLIM_INFINITY else min(processes, max_pids)
    return {"nofile": open_files, "nproc": processes}


def container_name(folder: Path) -> str:
    """Return a unique container name that identifies the run."""
    # Run folders of two results folders may have the same name.
    distinction = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]
    name = re.sub(r"[^a-zA-Z0-9_.-]", "-", f"{folder.parent.name}-{folder.name.rsplit('_', 1)[-1]}")
    return f"encore-{name}-{distinction}"


IMPORT_SECONDS = 600  # Pyxis and Enroot may have to unpack an image of 20 GB first


def query_python(
    target: Target,
    choice: Choice,
    extra: Mapping[str, str],
    gpus: int = 0,
    start: bool = True,
    outer: tuple[str, ...] = (),
) -> Target:
    """Query a target's Python; return the target with the answer, or with the reason why it cannot be used.

    ``extra`` are additional variables of the ranks. Images without a cached answer are started on ``gpus``, with the
    prefix ``outer`` in Slurm, unless ``start`` is False.
    """
    if target.python_info is not None or target.problem is not None:
        return target
    if target.runtime != "host":
        return replace(target, python_info=_ask_image(target, choice, gpus, start, outer))
    if target.python is None:
        return target
    try:
        return replace(target, python_info=_ask_python(target.python, choice, extra))
    except EncoreError as error:
        return replace(target, problem=error)


def _ask_python(python: Path, choice: Choice, extra: Mapping[str, str]) -> PythonInfo:
    # Query the user's Python in the environment of the ranks. The build of Horovod takes the longest and is cached
    # until Horovod is reinstalled
    nothing = Job(argv=(), environment=extra, mounts=(), ranks=1, gpus=0)
    environment = renderers.host(nothing, python, os.environ, is_user_python=True).environment
    cached = _build_cache(python)
    build: dict[str, Any] = files.read_json(cached) if cached.exists() else {"horovod": 0, "check_build": ""}
    question = interpreters.question(choice.implementation.framework, _more_imports(choice), build["horovod"])
    info = interpreters.ask(python, question, environment)
    if info.horovod and info.horovod == build["horovod"]:
        return replace(info, check_build=build["check_build"])
    if info.check_build:
        cache_build(python, info.horovod, info.check_build)
    return info


def _build_cache(python: Path) -> Path:
    return paths.cache_folder() / "pythons" / f"{hashlib.sha256(str(python).encode()).hexdigest()[:16]}.json"


def cache_build(python: Path, horovod: int, check_build: str) -> None:
    """Cache the build options of a Horovod installation."""
    cached = _build_cache(python)
    cached.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(cached, {"horovod": horovod, "check_build": check_build})


def _ask_image(target: Target, choice: Choice, gpus: int, start: bool, outer: tuple[str, ...]) -> PythonInfo | None:
    # Query an image; None if unavailable. Answers are cached by image ID or file; images in a registry lack an ID and
    # are queried each time
    question = interpreters.question(choice.implementation.framework, _more_imports(choice), 0)
    command = ("python", "-c", interpreters.program(), question)
    identity = _identity(target)
    # Without GPUs an image may lack the driver's libraries.
    key = hashlib.sha256(f"{identity} {command} {bool(gpus)}".encode()).hexdigest()[:16]
    cached = paths.cache_folder() / "images" / f"{key}-facts.json"
    if identity and cached.exists():
        return PythonInfo(**files.read_json(cached))
    if not start:
        return None
    job = Job(
        argv=command,
        environment={},
        mounts=(),
        ranks=1,
        gpus=gpus,
        launch=Launch("srun", outer=outer) if outer else ALONE,
    )
    rendered = render(target, job, container_name(Path(f"facts_{os.getpid()}")), os.environ)
    try:
        info = interpreters.parse(engines.ask(rendered.argv, IMPORT_SECONDS).stdout)
    except EncoreError:
        return None
    # Failed imports may be caused by the machine, so they are not cached.
    if identity and info is not None and not info.problems:
        cached.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(cached, asdict(info))
    return info


def _identity(target: Target) -> str:
    # Identity of the image content; empty if the image is still in a registry
    if target.image_info is not None:
        return target.image_info.id
    file = Path(target.image)
    if not file.is_file():
        return ""
    status = file.stat()
    return f"{file} {status.st_size} {status.st_mtime_ns}"


def _more_imports(choice: Choice) -> tuple[str, ...]:
    # Modules that the benchmark imports in addition to the framework
    row = images.catalogue().image.get(choice.name)
    return (row.imports,) if row is not None else ()
