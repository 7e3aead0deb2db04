"""Version of Encore and its rules, and digests of its data and benchmarks."""

import hashlib
import platform
from importlib import metadata
from pathlib import Path

from typing_extensions import TypedDict

from encore import __version__, checkout, paths
from encore.checkout import CodeState

RULES = "mlperf-logging"
DATA = Path(__file__).parent / "results" / "data"


class Rules(TypedDict):
    name: str
    version: str


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
        "code": checkout.code_state(),
        "python": platform.python_version(),
    }


def digest(folder: Path) -> str:
    """Return the SHA-256 over names and contents of the folder's files, except .pyc files."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()
