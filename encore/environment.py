"""The framework environments of the `host` runtime: made once, in steps that resume, one builder at a time.

An environment lies in the user's cache under a key made of everything that goes into it, so that a changed
requirement makes a new one and every checkout shares the same one.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from encore import catalogue, names, paths
from encore.errors import EncoreError, ExitCode

TOLD = {
    "mxnet": "mxnet",
    "tensorflow-cpu": "tensorflow",
    "torch": "pytorch",
    "horovod": "horovod",
    "nvidia-dali-cuda120": "dali",
    "numpy": "numpy",
}
"""Packages whose versions a system description names, and how it calls them."""

OnStep = Callable[[str], None]
"""Called with what is being done, in a few words."""


@dataclass(frozen=True)
class Environment:
    """What an environment is made of."""

    framework: str
    requirements: Path
    interpreter: str
    horovod: Mapping[str, Any]
    mpi: bool
    disk_gib: float
    check: str

    @property
    def folder(self) -> Path:
        """Where the environment lies; the name changes with its content."""
        content = [self.requirements.read_text(encoding="utf-8"), _version(self.interpreter), self.check]
        content += [json.dumps(dict(self.horovod), sort_keys=True), str(self.mpi)]
        key = hashlib.sha256("\n".join(content).encode()).hexdigest()[:12]
        return paths.cache_folder() / "environments" / f"{self.framework}-{key}"

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.folder / "bin" / "python"

    @property
    def is_ready(self) -> bool:
        """Whether every step was done and checked."""
        return (self.folder / "ready.json").exists()


@cache
def _version(interpreter: str) -> str:
    """``3.11`` of an interpreter; empty when it does not run."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _find_interpreter(framework: str, wanted: list[str]) -> str:
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if running in wanted:
        return sys.executable
    for version in wanted:
        found = shutil.which(f"python{version}")
        # A version manager's shim answers to every name; only what runs counts.
        if found and _version(found) == version:
            return found
    raise EncoreError(
        f"no Python that {framework} runs on: this is Python {running}",
        expected=f"Python {' or '.join(wanted)} on PATH",
        remedy=f"install python{wanted[0]} with its venv module and try again, or use a container runtime",
    )


def describe(framework: str) -> Environment:
    """The environment of ``framework`` on this machine; EncoreError if no interpreter fits."""
    table = catalogue.read_toml(paths.REQUIREMENTS / "environments.toml")
    if framework not in table:
        raise names.unknown("framework environment", framework, table)
    entry = table[framework]
    return Environment(
        framework=framework,
        requirements=paths.REQUIREMENTS / entry["requirements"],
        interpreter=_find_interpreter(framework, entry["python"]),
        horovod=entry.get("horovod", {}),
        mpi=shutil.which("mpicc") is not None,
        disk_gib=entry["disk_gib"],
        check=entry["check"],
    )


def ensure_environment(framework: str, on_step: OnStep | None = None) -> Path:
    """Python of the environment of ``framework``, which is made if need be.

    Steps that an earlier, interrupted set-up finished are not done again. Raises EncoreError with one clear
    line for a missing compiler, an unsuitable Python, no network, a full disk.
    """
    environment = describe(framework)
    if environment.is_ready:
        return environment.python
    report = on_step or (lambda text: None)
    environment.folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(str(environment.folder.with_suffix(".lock")))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"another process is making the {framework} environment; waiting for it")
        lock.acquire()
    try:
        if not environment.is_ready:
            _make(environment, report)
    finally:
        lock.release()
    return environment.python


def software(python: Path) -> dict[str, str]:
    """Versions of what matters in an environment, named as MLPerf's system descriptions do: dali_version."""
    folders = [str(folder) for folder in python.parent.parent.glob("lib/python*/site-packages")]
    versions = {
        found.metadata["Name"]: found.version for found in importlib.metadata.distributions(path=folders)
    }
    return {f"{called}_version": versions[name] for name, called in TOLD.items() if name in versions}


def _make(environment: Environment, report: OnStep) -> None:
    _check_compiler(environment)
    _check_disk(environment)
    steps: list[tuple[str, str, list[list[str]]]] = [
        ("venv", "making a virtual environment", [_venv_command(environment)]),
        ("packages", f"installing {environment.requirements.name}", [_install_command(environment)]),
    ]
    if environment.horovod:
        title = f"compiling Horovod {environment.horovod['version']}, about 2 minutes on 2 cores"
        steps.append(("horovod", title, [_horovod_command(environment)]))
    steps.append(("check", "checking that it imports", [[str(environment.python), "-c", environment.check]]))
    for number, (name, title, commands) in enumerate(steps, 1):
        stamp = environment.folder / f"{name}.done"
        if stamp.exists():
            continue
        report(f"{environment.framework} environment, step {number} of {len(steps)}: {title}")
        for command in commands:
            _run(environment, command)
        stamp.touch()
    ready = {
        "framework": environment.framework,
        "python": _version(environment.interpreter),
        "mpi": environment.mpi,
    }
    temporary = environment.folder / "ready.json.writing"
    temporary.write_text(json.dumps(ready), encoding="utf-8")
    temporary.rename(environment.folder / "ready.json")


def _venv_command(environment: Environment) -> list[str]:
    return [environment.interpreter, "-m", "venv", "--clear", str(environment.folder)]


def _install_command(environment: Environment) -> list[str]:
    pip = [str(environment.python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    return [*pip, "--no-deps", "-r", str(environment.requirements)]


def _horovod_command(environment: Environment) -> list[str]:
    pip = [str(environment.python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    # Not from pip's cache: a wheel that was compiled for another MXNet or MPI has the same name.
    options = ["--no-cache-dir", "--no-binary", "horovod", "--no-build-isolation", "--no-deps"]
    return [*pip, *options, f"horovod=={environment.horovod['version']}"]


def _build_variables(environment: Environment) -> dict[str, str]:
    """Horovod's build switches (its docs/install.rst)."""
    variables = {"PATH": f"{environment.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    if environment.horovod:
        variables[f"HOROVOD_WITH_{environment.horovod['with']}"] = "1"
        variables.update({f"HOROVOD_WITHOUT_{name}": "1" for name in environment.horovod["without"]})
        variables["HOROVOD_WITH_GLOO"] = "1"
        variables["HOROVOD_WITH_MPI" if environment.mpi else "HOROVOD_WITHOUT_MPI"] = "1"
    return variables


def _check_compiler(environment: Environment) -> None:
    if not environment.horovod:
        return
    missing = [name for name in ("g++", "make") if shutil.which(name) is None]
    if missing:
        raise EncoreError(
            f"no {' and no '.join(missing)} on PATH",
            expected="a C++ compiler and make, to compile Horovod",
            remedy="apt-get install g++ make (Debian, Ubuntu) and try again",
        )


def _check_disk(environment: Environment) -> None:
    free = shutil.disk_usage(environment.folder).free / 2**30
    if free < environment.disk_gib:
        raise EncoreError(
            f"{free:.1f} GiB free where the environment goes, {environment.folder.parent}",
            expected=f"{environment.disk_gib} GiB",
            remedy="free some space, or set XDG_CACHE_HOME to a folder on another disk",
        )


def _run(environment: Environment, command: list[str]) -> None:
    log = environment.folder.with_suffix(".log")
    with log.open("ab") as file:
        file.write(f"\n$ {' '.join(command)}\n".encode())
        file.flush()
        variables = {**os.environ, **_build_variables(environment)}
        # Its own session: a Ctrl-C ends this process, which then ends the child and says how to go on.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
        try:
            code = child.wait()
        except KeyboardInterrupt:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            raise EncoreError(
                f"interrupted while making the {environment.framework} environment",
                remedy="run the same command again: it goes on where it stopped",
                exit_code=ExitCode.INTERRUPTED,
            ) from None
    if code != 0:
        raise _explain(environment, log)


SYMPTOMS = (
    ("No space left on device", "the disk is full", "free some space and run the same command again"),
    (
        (
            "Temporary failure in name resolution",
            "Network is unreachable",
            "Failed to establish a new connection",
        ),
        "the package index cannot be reached",
        "check the network and pip's settings (pip config list), and run the same command again",
    ),
    (
        ("ensurepip is not", "No module named venv", "returned non-zero exit status"),
        "this Python cannot make virtual environments",
        "apt-get install python3-venv (Debian, Ubuntu) and try again",
    ),
    (
        ("No matching distribution found", "Could not find a version"),
        "the package index does not have what is pinned",
        "check the network and pip's settings (pip config list), and run the same command again",
    ),
)


def _explain(environment: Environment, log: Path) -> EncoreError:
    """What went wrong, from the last command's output."""
    output = log.read_text(encoding="utf-8", errors="replace").rsplit("\n$ ", 1)[-1]
    for texts, meaning, remedy in SYMPTOMS:
        needles = (texts,) if isinstance(texts, str) else texts
        if any(needle in output for needle in needles):
            return EncoreError(
                f"the {environment.framework} environment could not be made: {meaning}",
                remedy=f"{remedy}; the whole output is in {log}",
                exit_code=ExitCode.REFUSED,
            )
    last = [line for line in output.splitlines() if line.strip()][-1:]
    return EncoreError(
        f"the {environment.framework} environment could not be made: {' '.join(last)}",
        remedy=f"read {log}, then run the same command again: it goes on where it stopped",
    )
