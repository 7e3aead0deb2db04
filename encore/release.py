"""Version of Encore and its rules, state of the checkout, and digests of the data and benchmarks."""

import hashlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from typing_extensions import TypedDict

from encore import __version__, paths

RULES = "mlperf-logging"
DATA = Path(__file__).parent / "results" / "data"


class Rules(TypedDict):
    name: str
    version: str


class CodeState(TypedDict):
    commit: str | None  # None outside of a git checkout
    uncommitted_sha256: str | None  # Hash of the uncommitted changes; None: no such changes


class Release(TypedDict):
    """What this Encore is."""

    version: str
    rules: Rules  # What logs are judged by
    data_sha256: str  # Digest of the published results and of Encore's own rules
    benchmarks_sha256: str  # Digest of the training code
    code: CodeState
    python: str  # Version


def facts() -> Release:
    return {
        "version": __version__,
        "rules": {"name": RULES, "version": metadata.version(RULES)},
        "data_sha256": digest(DATA),
        "benchmarks_sha256": digest(paths.BENCHMARKS),
        "code": code_state(),
        "python": platform.python_version(),
    }


def _git(*arguments: str) -> str | None:
    # An installed wheel may be inside an unrelated repository.
    if paths.IS_INSTALLED:
        return None
    try:
        done = subprocess.run(["git", "-C", str(paths.ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def code_state() -> CodeState:
    commit, difference = _git("rev-parse", "HEAD"), _git("diff", "HEAD")
    changed = hashlib.sha256(difference.encode()).hexdigest() if difference else None
    return {"commit": commit.strip() if commit else None, "uncommitted_sha256": changed}


def digest(folder: Path) -> str:
    """Return the SHA-256 over names and contents of the folder's files, except .pyc files."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()
