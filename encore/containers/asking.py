"""Ask the Python of an image, or one of the user's, what it has of what a benchmark needs."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from encore import files, paths
from encore.catalogue import Choice
from encore.containers import engines, images, renderers, runtimes
from encore.containers.runtimes import Target
from encore.errors import EncoreError
from encore.job import Job
from encore.machine import pythons
from encore.machine.pythons import Facts

IMPORT_SECONDS = 600  # Pyxis and Enroot may have to unpack an image of 20 GB first


def asked(
    target: Target,
    choice: Choice,
    extra: Mapping[str, str],
    gpus: int = 0,
    start: bool = True,
    outer: tuple[str, ...] = (),
) -> Target:
    """Return the target with what its Python answered, or with the reason why it cannot be used.

    ``extra`` are variables that the ranks get. An image that nobody asked yet is started for it on ``gpus``, by
    ``outer`` where Slurm has to, unless ``start`` is False.
    """
    if target.facts is not None or target.problem is not None:
        return target
    if target.runtime != "host":
        return replace(target, facts=_ask_image(target, choice, gpus, start, outer))
    if target.python is None:
        return target
    try:
        return replace(target, facts=_ask_python(target.python, choice, extra))
    except EncoreError as error:
        return replace(target, problem=error)


def _ask_python(python: Path, choice: Choice, extra: Mapping[str, str]) -> Facts:
    # The answer of a Python of the user's, with the environment that ranks have. What its Horovod was built with takes
    # longest to say; it is asked again when another one was installed
    nothing = Job(argv=(), environment=extra, mounts=(), ranks=1, gpus=0)
    environment = renderers.host(nothing, python, os.environ, given=True).environment
    kept = _kept_build(python)
    known: dict[str, Any] = files.read_json(kept) if kept.exists() else {"horovod": 0, "check_build": ""}
    question = pythons.question(choice.implementation.framework, _more_imports(choice), known["horovod"])
    facts = pythons.ask(python, question, environment)
    if facts.horovod and facts.horovod == known["horovod"]:
        return replace(facts, check_build=known["check_build"])
    if facts.check_build:
        keep_build(python, facts.horovod, facts.check_build)
    return facts


def _kept_build(python: Path) -> Path:
    return paths.cache_folder() / "pythons" / f"{hashlib.sha256(str(python).encode()).hexdigest()[:16]}.json"


def keep_build(python: Path, horovod: int, check_build: str) -> None:
    """Keep what the Horovod of a Python, installed at that time, was built with."""
    kept = _kept_build(python)
    kept.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(kept, {"horovod": horovod, "check_build": check_build})


def _ask_image(target: Target, choice: Choice, gpus: int, start: bool, outer: tuple[str, ...]) -> Facts | None:
    # The answer of an image, None without one. It is asked once, since its id or its file names the answer; one that
    # is still in a registry is asked every time
    question = pythons.question(choice.implementation.framework, _more_imports(choice), 0)
    command = ("python", "-c", pythons.program(), question)
    identity = _identity(target)
    # Without its GPUs an image may lack the driver's library.
    key = hashlib.sha256(f"{identity} {command} {bool(gpus)}".encode()).hexdigest()[:16]
    kept = paths.cache_folder() / "images" / f"{key}-facts.json"
    if identity and kept.exists():
        return Facts(**files.read_json(kept))
    if not start:
        return None
    job = Job(argv=command, environment={}, mounts=(), ranks=1, gpus=gpus, outer=outer)
    rendered = runtimes.render(target, job, runtimes.container_name(Path(f"facts_{os.getpid()}")), os.environ)
    try:
        facts = pythons.parse(engines.ask(rendered.argv, IMPORT_SECONDS).stdout)
    except EncoreError:
        return None
    # What cannot be imported may be the machine's fault, and be fixed there.
    if identity and facts is not None and not facts.problems:
        kept.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(kept, asdict(facts))
    return facts


def _identity(target: Target) -> str:
    # What names the content of an image; empty for one that is still in a registry
    if target.found is not None:
        return target.found.id
    file = Path(target.image)
    if not file.is_file():
        return ""
    facts = file.stat()
    return f"{file} {facts.st_size} {facts.st_mtime_ns}"


def _more_imports(choice: Choice) -> tuple[str, ...]:
    # What the benchmark imports in addition to its framework
    row = images.catalogue().image.get(choice.name)
    return (row.imports,) if row is not None else ()
