"""Commands that the user may copy from a message: whole, quoted, and right from whatever folder they are read in."""

from __future__ import annotations

import contextlib
import shlex
import shutil
from pathlib import Path

from encore import paths
from encore.errors import EncoreError
from encore.run.run_folder import RunFolder


def command(*words: str | Path) -> str:
    """Return a command of Encore's as a shell takes it; by its path where ``encore`` is not on PATH."""
    installed = paths.ROOT / ".venv" / "bin" / "encore"
    program = "encore" if shutil.which("encore") or not installed.exists() else str(installed)
    return shlex.join([program, *(str(word) for word in words)])


def follow(run: Path) -> str:
    """Return the command that watches a run."""
    return command("follow", run.absolute())


def cancel(run: Path) -> str:
    """Return the command that ends a run."""
    return command("cancel", run.absolute())


def resume(run: Path) -> str:
    """Return the command that continues a run: through Slurm where it began in a job, on its cluster's terms."""
    submitted, cluster, asked = False, "", []
    with contextlib.suppress(EncoreError):
        passport = RunFolder(run).passport()
        submitted, cluster = bool(passport.get("slurm")), passport.get("cluster_file") or ""
        asked = [each for each in passport.get("arguments") or () if submitted and each == "--require-target"]
    with_cluster = ("--cluster", cluster) if cluster else ()
    return command("submit" if submitted else "run", "--resume", run.absolute(), *with_cluster, *asked)
