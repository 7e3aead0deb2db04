"""Query a Python interpreter for a benchmark's packages: the user's (`host` runtime), or in an image."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from encore import catalogue, environment
from encore.errors import EncoreError
from encore.machine import python_probe

COMMON = ("numpy", "mlperf_logging")  # Modules that the training code of every benchmark imports
OLDEST = ".".join(map(str, python_probe.OLDEST))
SECONDS = 300.0
EXPECTED = f"Python {OLDEST} or later with the framework, such as in a conda environment"
HINT = 'activate the environment and give --python "$(command -v python)"'


@dataclass(frozen=True, kw_only=True)
class PythonInfo:
    python: str  # Version, such as ``3.11.7``
    problems: Mapping[str, str] = field(default_factory=dict)  # Why modules cannot be imported, by name
    packages: Mapping[str, str] = field(default_factory=dict)  # Versions by package
    cuda: str = ""  # CUDA version of the framework build; empty for CPU builds
    gpus: int = 0
    mpirun: bool = False  # Whether mpirun is on PATH
    horovod: int = 0  # When Horovod was installed, in nanoseconds; 0 without
    check_build: str = ""  # Output of ``horovodrun --check-build``; empty without Horovod


def find_or_create(python: Path | None, framework: str, on_step: Callable[[str], None]) -> Path:
    """Return the user's Python, else the Python in the framework's environment, which is created if needed."""
    if python is None:
        return environment.ensure_environment(framework, on_step).absolute()
    if not python.expanduser().is_file():
        raise EncoreError(f"--python {python}: no such file", expected="a Python that has the framework")
    return python.expanduser().absolute()


def question(framework: str, extra_modules: Sequence[str], known_horovod: int) -> str:
    """Return the argument of :mod:`encore.machine.python_probe`. ``extra_modules`` are imported first.

    ``known_horovod`` identifies an installation of Horovod whose build is already known.
    """
    entry = catalogue.framework(framework)
    modules = list(dict.fromkeys((*filter(None, extra_modules), *entry.imports, *COMMON)))
    return json.dumps({"modules": modules, "cuda": entry.cuda, "gpus": entry.gpus, "known": known_horovod})


# An older Python cannot parse the program, but reports its version.
GUARD = """import sys
if sys.version_info < {oldest}:
    print({mark!r} + '{{"python": "%d.%d.%d"}}' % sys.version_info[:3])
else:
    exec({program!r})
"""


def program() -> str:
    text = Path(python_probe.__file__).read_text(encoding="utf-8")
    return GUARD.format(oldest=python_probe.OLDEST, mark=python_probe.MARK, program=text)


def parse(output: str) -> PythonInfo | None:
    """Parse the answer in a program's output; None if missing."""
    answers = re.findall(rf"^{python_probe.MARK}(.*)$", output, re.MULTILINE)
    return PythonInfo(**json.loads(answers[-1])) if answers else None


def ask(python: Path, question: str, environment: Mapping[str, str]) -> PythonInfo:
    """Query the user's Python; EncoreError if it is not usable or too old."""
    if not python.is_file():
        raise EncoreError(f"no Python {python}", expected=EXPECTED, hint=HINT)
    if not os.access(python, os.X_OK):
        raise EncoreError(f"{python} is not executable", expected=EXPECTED, hint=HINT)
    command = [str(python), "-c", program(), question]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=SECONDS, check=False,
            stdin=subprocess.DEVNULL, errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EncoreError(f"{python} does not run: {error}", expected=EXPECTED, hint=HINT) from error
    info = parse(done.stdout)
    if info is None:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise EncoreError(f"{python} is not a working Python: {last[0]}", expected=EXPECTED, hint=HINT)
    if tuple(map(int, info.python.split(".")[:2])) < python_probe.OLDEST:
        raise EncoreError(f"{python} is Python {info.python}", expected=EXPECTED, hint=HINT)
    return info
