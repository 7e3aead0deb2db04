"""What a training compiled, kept in the user's cache for the next run of the same kind.

It crosses in the experiment's folder, ``compiled.bin``, so that every runtime and node has it without a further mount.
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
    """Return the key of a run; empty where nothing is compiled.

    In it is what changes all that is compiled: image or Python, implementation, GPUs with their driver, and
    configuration but for the seed. The compiler looks at the code itself, and takes what still fits.
    """
    settings = configuration.plain()
    if settings.get("device") != "gpu" or settings.get("compile", "none") in ("none", False):
        return ""
    settings.pop("seed", None)
    parts = [configuration.choice.implementation.module, image, str(python), sorted(set(gpus)), settings]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def give(key: str, folder: Path) -> bool:
    """Copy what an earlier run has kept into an experiment's folder; return whether there was any."""
    cached = _place(key)
    if not key:
        return False
    with suppress(OSError):  # It only saves time
        # PyTorch loads code from it
        if cached.lstat().st_uid != os.geteuid():
            return False
        shutil.copyfile(cached, folder / FILE, follow_symlinks=False)
        return True
    return False


def keep(key: str, folder: Path) -> None:
    """Move what an experiment has compiled into the cache, over what was there."""
    output, cached = folder / FILE, _place(key)
    with suppress(OSError):
        if key and output.exists():
            cached.parent.mkdir(parents=True, exist_ok=True)
            with files.replaced(cached) as target, output.open("rb") as source:
                shutil.copyfileobj(source, target)
        output.unlink(missing_ok=True)


def _place(key: str) -> Path:
    return paths.cache_folder() / "compiled" / f"{key}.bin"
