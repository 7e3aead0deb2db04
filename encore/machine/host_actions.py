"""Actions on a host of a run, started over srun or ssh: check requirements, drop the page cache, remove containers.

    $ srun --ntasks-per-node=1 python -m encore.machine.host_actions check '[["same", "/data/dataset.json", "9f..."]]'

Prints one line of JSON. Uses the standard library only, to start fast with any Python.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SECONDS = 20.0
DROP = Path("/proc/sys/vm/drop_caches")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of all Python files in a directory tree; empty if it cannot be read."""
    content = hashlib.sha256()
    try:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            content.update(file.read_bytes())
    except OSError:
        return ""
    return content.hexdigest()


def _shared(mark: str, _: str) -> str:
    # Look for a recently created file, and write a file. Read-only mounts, and users unknown to the server, are only
    # detected by writing.
    folder = Path(mark).parent
    if not Path(mark).exists():
        return f"the results folder {folder} is not shared with the first host"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"


def _image(engine: str, image: str) -> str:
    command = [engine, "image", "inspect", image]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{engine}: {error}"
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return "" if done.returncode == 0 else f"{engine}: {reason}"


def _gpus(min_count: str, _: str) -> str:
    # The driver lists GPUs in /proc immediately; device files may be created on first use.
    count = max(len(list(Path(folder).glob(name))) for folder, name in GPU_FILES)
    return "" if count >= int(min_count) else f"{count} GPUs, {min_count} needed"


GPU_FILES = (("/proc/driver/nvidia/gpus", "*"), ("/dev", "nvidia[0-9]*"))
# Each function returns the problem; empty if the requirement is met.
PROBES: dict[str, Callable[[str, str], str]] = {
    "same": lambda path, expected: "" if digest(Path(path)) == expected else f"{path} is missing or differs",
    "executable": lambda path, _: "" if os.access(path, os.X_OK) else f"no {path}",
    "readable": lambda path, _: "" if os.access(path, os.R_OK) else f"{path} cannot be read",
    "shared": _shared,
    "program": lambda name, _: "" if shutil.which(name) else f"{name} is not on PATH",
    "image": _image,
    "interface": lambda name, _: "" if Path("/sys/class/net", name).exists() else f"no network interface {name}",
    "gpus": _gpus,
}


def check(needs: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """Return the problems of this host with the indices of the requirements (kind, target, expected value)."""
    answers = ((number, PROBES[kind](target, expected)) for number, (kind, target, expected) in enumerate(needs))
    return {"problems": [(number, problem) for number, problem in answers if problem]}


def drop_caches(_: Any = None) -> dict[str, Any]:
    """Flush and drop page cache, dentries and inodes before a run (MLPerf's training rules, "caches").

    ``dropped`` is False where this user may not.
    """
    try:
        os.sync()
        DROP.write_text("3\n", encoding="ascii")
    except OSError:
        return {"dropped": False}
    return {"dropped": True}


def remove_containers(arguments: dict[str, str]) -> dict[str, Any]:
    """Remove containers of an experiment that remained after Slurm killed their client."""
    engine = arguments["engine"]
    listing = [engine, "ps", "--all", "--quiet", "--filter", f"label={arguments['label']}"]
    done = subprocess.run(listing, capture_output=True, text=True, timeout=SECONDS, check=False)
    containers = done.stdout.split()
    if containers:
        command = [engine, "rm", "--force", "--volumes", *containers]
        subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
    return {"removed": containers}


ACTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "check": check,
    "drop-caches": drop_caches,
    "remove-containers": remove_containers,
}


if __name__ == "__main__":
    answer = ACTIONS[sys.argv[1]](json.loads(sys.argv[2]))
    print(json.dumps({"node": os.environ.get("SLURMD_NODENAME") or platform.node(), **answer}))
