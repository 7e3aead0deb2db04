"""Triton without a container: the server in the wheel nvidia-pytriton, with its Python backend.

The wheel has the binary, the backend's library, one stub for each version of Python, and the libraries that they load
(in nvidia_pytriton.libs). The stub loads the Python that it was built for as a library, so that this must be found.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from encore.errors import EncoreError
from encore.job import PASSED_ON, Command
from encore.lab.serving.repository import Repository

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


def ask(program: Path) -> Python:
    try:
        done = subprocess.run([str(program), "-c", ASK], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EncoreError(f"{program} does not run: {error}", hint="--python FILE: a Python") from error
    if done.returncode != 0:
        raise EncoreError(f"{program} does not run: {done.stderr.strip()[-200:]}", hint="--python FILE: a Python")
    facts = json.loads(done.stdout)
    return Python(program, facts["version"], tuple(facts["packages"]), facts["wheel"], facts["library"])


@dataclass(frozen=True)
class Wheel:
    folder: Path

    @property
    def server(self) -> Path:
        return self.folder / "tritonserver" / "bin" / "tritonserver"

    @property
    def backend(self) -> Path:
        """The Python backend, without a stub."""
        return self.folder / "tritonserver" / "backends" / "python"

    def stub(self, version: str) -> Path:
        """Return what runs model.py in a Python of this version."""
        return self.folder / "tritonserver" / "python_backend_stubs" / version / STUB

    @property
    def libraries(self) -> Path:
        return self.folder.parent / "nvidia_pytriton.libs"


def find(server: Python, runs_model: Python) -> Wheel:
    """Return the wheel of ``server``; EncoreError if it is missing or has nothing for the model's Python."""
    if not server.wheel:
        raise EncoreError(f"{server.program} has no nvidia-pytriton", expected="its tritonserver", hint=PYTRITON)
    wheel = Wheel(Path(server.wheel))
    missing = [path for path in (wheel.server, wheel.backend, wheel.libraries) if not path.exists()]
    if missing:
        raise EncoreError(f"no {missing[0]}", expected="the wheel of nvidia-pytriton 0.7", hint=PYTRITON)
    if not wheel.stub(runs_model.version).exists():
        known = sorted(path.parent.name for path in wheel.folder.glob(f"tritonserver/python_backend_stubs/*/{STUB}"))
        raise EncoreError(
            f"nvidia-pytriton runs no model in Python {runs_model.version}",
            expected=f"Python {', '.join(known)}",
            hint="--python FILE: one of these",
        )
    if not runs_model.library:
        version = runs_model.version
        raise EncoreError(
            f"{runs_model.program} was built without libpython{version}.so.1.0, which Triton's Python backend loads",
            expected="a Python with a shared library",
            hint=f"apt-get install libpython{version} python{version}-venv (Debian, Ubuntu), or --runtime docker",
        )
    return wheel


def command(
    wheel: Wheel, runs_model: Python, repository: Repository, options: tuple[str, ...], caller: Mapping[str, str]
) -> Command:
    """Return the server as a command of this machine; `link_backend` makes what it needs next to the repository."""
    environment = {name: caller[name] for name in PASSED_ON if name in caller}
    # The stub finds its standard library by the `python3` that is first on PATH.
    environment["PATH"] = os.pathsep.join([str(runs_model.program.parent), caller.get("PATH", os.defpath)])
    environment["PYTHONPATH"] = os.pathsep.join(runs_model.packages)
    environment["PYTHONNOUSERSITE"] = "1"
    libraries = [runs_model.library, str(wheel.libraries), caller.get("LD_LIBRARY_PATH", "")]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
    folder = repository.folder.absolute()
    # The Python backend starts its stub by `bash -c` and quotes no path: relative ones have no space of the user's.
    folders = [repository.models.absolute().relative_to(folder), backends(repository).relative_to(folder)]
    where = (f"--model-repository={folders[0]}", f"--backend-directory={folders[1]}")
    return Command(argv=(str(wheel.server), *where, *options), environment=environment, working_directory=folder)


def backends(repository: Repository) -> Path:
    return repository.folder.absolute() / "backends"


def link_backend(wheel: Wheel, version: str, repository: Repository) -> None:
    """Put the Python backend and the stub of a version of Python together: the wheel has them in two places."""
    folder = backends(repository) / "python"
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*wheel.backend.iterdir(), wheel.stub(version)):
        link = folder / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path)
