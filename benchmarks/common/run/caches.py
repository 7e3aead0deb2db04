"""Caches of compilers: code that this user will run, in folders that no other user can write to."""

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import MutableMapping

from benchmarks.common.data.problem import REFUSED, Problem


def private_folder(path: Path) -> Path:
    """Create a folder; if its parent is world-writable, such as /tmp, with mode 0700.

    Exit the process if the path is a symbolic link or another user can write to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not _is_shared(path.parent):
        path.mkdir(exist_ok=True)
        return path
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
        problem = Problem(
            f"cache {path} is a symbolic link, or other users can change it",
            "a directory of this user with mode 0700",
            "remove it, or set TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR and CUDA_CACHE_PATH",
        )
        print(f"error: {problem}", file=sys.stderr, flush=True)
        raise SystemExit(REFUSED)
    path.chmod(0o700)
    return path


def set_cuda_cache(environment: MutableMapping[str, str]) -> None:
    """Move CUDA's kernel cache to a private folder if HOME is world-writable, such as /tmp in containers."""
    home = Path(environment.get("HOME") or "/")
    if "CUDA_CACHE_PATH" not in environment and home.is_dir() and _is_shared(home):
        environment["CUDA_CACHE_PATH"] = str(private_folder(home / f"cuda_{os.getuid()}"))


def _is_shared(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IWOTH)
