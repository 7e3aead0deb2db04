"""Files of trained weights that a run begins with: found, named in its passport, and seen by its ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from encore.configuration import Configuration
from encore.errors import EncoreError
from encore.job import Mount

CHUNK = 1 << 24


def weight_files(configuration: Configuration, data: Path) -> dict[str, Path]:
    """Return the file of each key that names one; a name without a folder is one in the data folder."""
    given = {key: str(configuration.get(key)) for key in configuration.choice.benchmark.weights}
    return {key: data / name for key, name in given.items() if name}


def as_json(files: dict[str, Path]) -> dict[str, Any]:
    """Return path, size and SHA-256 of each, for the passport."""
    found = {}
    for key, path in files.items():
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
        found[key] = {"file": str(path), "bytes": path.stat().st_size, "sha256": digest.hexdigest()}
    return found


def mounts(files: dict[str, Path], data: Path) -> tuple[Mount, ...]:
    """Return what a container needs besides the data folder."""
    return tuple(Mount(path, str(path), True) for path in files.values() if data not in path.parents)


def refuse_others(files: dict[str, Path], known: Mapping[str, Any]) -> None:
    """Refuse a file that is not the one of the passport; one that is gone may be in a checkpoint."""
    there = as_json({key: path for key, path in files.items() if path.is_file()})
    for key, found in there.items():
        if key in known and found["sha256"] != known[key]["sha256"]:
            raise EncoreError(
                f"{found['file']} is not the file of {key} that the run began with",
                expected=f"SHA-256 {known[key]['sha256'][:12]}",
                remedy="restore it, or start a new run",
            )
