"""What this Encore is: its version, that of the rules that it judges by, and digests of what it carries."""

import hashlib
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from encore import __version__, checkout, paths

RULES = "mlperf-logging"
DATA = Path(__file__).parent / "results" / "data"


def facts() -> dict[str, Any]:
    """Return them by name; ``data`` are the published results and rules, ``benchmarks`` the training code."""
    return {
        "version": __version__,
        "rules": {"name": RULES, "version": metadata.version(RULES)},
        "data_sha256": digest(DATA),
        "benchmarks_sha256": digest(paths.BENCHMARKS),
        "code": checkout.code_state(),
        "python": platform.python_version(),
    }


def digest(folder: Path) -> str:
    """Return the SHA-256 over names and contents of a folder's files, without those that Python compiles."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()
