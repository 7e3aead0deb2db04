"""Probe of a Python, in an image or of the user: importable packages, GPUs, and build options of Horovod.

The source is passed to ``python -c``, so no files are needed. Reads and prints one line of JSON. Standard library
only.
"""

import contextlib
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

# Prefix of the answer: greetings of images and warnings of frameworks are also printed to stdout
MARK = "ENCORE FACTS "
SECONDS = 300.0
OLDEST = (3, 8)
# Names and versions of the distribution's packages, written by the build of a benchmark's image
SYSTEM_PACKAGES = Path("/opt/encore/system-packages.txt")


def problems(modules: list[str]) -> dict[str, str]:
    """Return why modules cannot be imported, by name; they are imported in the order given."""
    errors = {}
    for name in modules:
        try:
            importlib.import_module(name)
        # A missing or incompatible library may raise any exception.
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return errors


def packages() -> dict[str, str]:
    """Return package versions by name; in an image of a benchmark including the distribution's packages."""
    from importlib import metadata

    manifest = SYSTEM_PACKAGES.read_text(encoding="utf-8") if SYSTEM_PACKAGES.is_file() else ""
    # Debian versions: epoch, colon, upstream version, dash, revision.
    system = re.findall(r"^([\w.+-]+)=(?:\d+:)?(\S+?)(?:-[^-\s]*)?$", manifest, re.MULTILINE)
    # The first match on the path takes precedence.
    distributions = reversed(list(metadata.distributions()))
    return {
        **dict(system),
        **{
            distribution.metadata["Name"]: distribution.version
            for distribution in distributions
            if distribution.metadata["Name"]
        },
    }


def value(expression: str) -> Any:
    """Evaluate an expression over imported modules; None on errors."""
    if not expression:
        return None
    with contextlib.suppress(Exception):
        return eval(expression, dict(sys.modules))
    return None


def installed(name: str) -> int:
    """Return when a package was installed, in nanoseconds; 0 where it was not imported."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file).parent.stat().st_mtime_ns if file else 0


def check_build() -> str:
    """Return the output of ``horovodrun --check-build``; empty if the program is missing."""
    # As a module, because scripts may be installed in any directory.
    command = [sys.executable, "-m", "horovod.runner.launch", "--check-build"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def probe(question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a question of :mod:`encore.machine.interpreters`."""
    failed = problems(question["modules"])
    horovod = installed("horovod")
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "problems": failed,
        "packages": packages(),
        "cuda": str(value(question["cuda"]) or ""),
        "gpus": int(value(question["gpus"]) or 0),
        "mpirun": shutil.which("mpirun") is not None,
        "horovod": horovod,
        "check_build": check_build() if horovod and horovod != question["known"] and not failed else "",
    }


if __name__ == "__main__":
    # Output of framework imports is not part of the answer.
    print(MARK + json.dumps(probe(json.loads(sys.argv[1]))))
