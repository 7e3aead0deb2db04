"""Cache of compiled code in the user's cache, shared by runs of the same kind.

It is exchanged through ``compiled.bin`` in the experiment's folder, which all runtimes and nodes can access.
"""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from encore import files, paths
from encore.configuration import Configuration

FILE = "compiled.bin"


def key_of(configuration: Configuration, image: dict[str, Any] | None, python: Path | None, gpus: list[str]) -> str:
    """Return the run's cache key; empty if the run does not compile.

    The key covers image or Python, implementation, GPUs with their driver, and the configuration except for the
    seed. The compiler verifies every entry against the code.
    """
    settings = configuration.plain()
    if settings.get("device") != "gpu" or settings.get("compile", "none") in ("none", False):
        return ""
    settings.pop("seed", None)
    parts = [configuration.choice.implementation.module, image, str(python), sorted(set(gpus)), settings]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def load(key: str, folder: Path) -> bool:
    """Copy cached code into an experiment's folder; return whether the cache had any."""
    cached = _cache_file(key)
    with suppress(OSError):  # It only saves time
        # PyTorch loads code from it
        if key and cached.lstat().st_uid == os.geteuid():
            shutil.copyfile(cached, folder / FILE, follow_symlinks=False)
            return True
    return False


def store(key: str, folder: Path) -> None:
    """Move an experiment's compiled code into the cache, replacing the previous entry."""
    output, cached = folder / FILE, _cache_file(key)
    with suppress(OSError):
        if key and output.exists():
            cached.parent.mkdir(parents=True, exist_ok=True)
            with files.replaced(cached) as target, output.open("rb") as source:
                shutil.copyfileobj(source, target)
        output.unlink(missing_ok=True)


def _cache_file(key: str) -> Path:
    return paths.cache_folder() / "compiled" / f"{key}.bin"
