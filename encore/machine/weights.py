"""Files of trained weights that a run begins with: found, named in its passport, and seen by its ranks."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from encore.catalogue import Weights
from encore.configuration import Configuration
from encore.errors import EncoreError
from encore.job import Mount

CHUNK = 1 << 24


def weight_files(configuration: Configuration, data: Path) -> dict[str, Path]:
    """Return the file of each key that names one; a name without a folder is one in the data folder."""
    given = {key: str(configuration.get(key)) for key in configuration.choice.benchmark.weights}
    return {key: data / name for key, name in given.items() if name}


def _digest(path: Path, algorithm: str) -> str:
    digest = hashlib.new(algorithm)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def refuse_wrong(key: str, path: Path, wanted: Weights) -> str:
    """Return what is known of the file that a submitted system is to begin with.

    Raises:
        EncoreError: it is not there, or is another one than was published.
    """
    instead = f"--set {key}=FILE where it is elsewhere; --set {key}= begins with random weights, unlike the submission"
    get = f"put {' and '.join((wanted.file, *wanted.also))} of {wanted.source} into the data folder; {instead}"
    same_form = path.suffix == Path(wanted.file).suffix
    for each in (path, *(path.with_name(name) for name in wanted.also if same_form)):
        if not each.is_file():
            raise EncoreError(f"{each} is no file", expected=wanted.title, hint=get)
    if not same_form or not wanted.checksums:
        return f"no checksum of a {path.suffix} file is published; its names and shapes are checked when it is read"
    for algorithm, published in wanted.checksums.items():
        found = _digest(path, algorithm)
        if not found.startswith(published):
            raise EncoreError(
                f"{path} has the {algorithm.upper()} {found}",
                expected=f"{wanted.title}: {' or '.join(published)} ({wanted.published})",
                hint=get,
            )
    return ""


def as_json(files: dict[str, Path]) -> dict[str, Any]:
    """Return path, size and SHA-256 of each, for the passport."""
    return {
        key: {"file": str(path), "bytes": path.stat().st_size, "sha256": _digest(path, "sha256")}
        for key, path in files.items()
    }


def mounts(files: dict[str, Path], data: Path) -> tuple[Mount, ...]:
    """Return what a container needs besides the data folder; TensorFlow has tensors in files next to its ``.index``."""
    outside = [path for path in files.values() if data not in path.parents]
    parts = [part for path in outside if path.suffix == ".index" for part in path.parent.glob(f"{path.stem}.data-*")]
    return tuple(Mount(path, str(path), True) for path in (*outside, *sorted(parts)))


def refuse_others(files: dict[str, Path], known: Mapping[str, Any]) -> None:
    """Refuse a file that is not the one of the passport; one that is gone may be in a checkpoint."""
    there = as_json({key: path for key, path in files.items() if path.is_file()})
    for key, found in there.items():
        if key in known and found["sha256"] != known[key]["sha256"]:
            raise EncoreError(
                f"{found['file']} is not the file of {key} that the run began with",
                expected=f"SHA-256 {known[key]['sha256'][:12]}",
                hint="restore it, or start a new run",
            )
