"""Paths of the project, the user's cache (XDG), data and results.

Checkouts contain data, results and build output. Installed wheels contain the required part of the checkout in
``encore/tree``, which is read-only: data go to XDG_DATA_HOME, results to the current folder.
"""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
IS_INSTALLED = (_PACKAGE / "tree").is_dir()
# benchmarks/, containers/, requirements/ and slurm/ are below it
ROOT = _PACKAGE / "tree" if IS_INSTALLED else _PACKAGE.parent

BENCHMARKS = ROOT / "benchmarks"
REQUIREMENTS = ROOT / "requirements"


def benchmark_folder(name: str) -> Path:
    return BENCHMARKS / name.replace("-", "_")


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")) / "encore"


def default_data(benchmark: str) -> Path:
    user_data = Path(os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")) / "encore"
    return (user_data if IS_INSTALLED else ROOT / "data") / benchmark


def default_results() -> Path:
    return (Path.cwd() if IS_INSTALLED else ROOT) / "results"


def build_folder() -> Path:
    return (cache_folder() if IS_INSTALLED else ROOT) / "build"


def absolute(path: Path) -> Path:
    """Return an absolute path without ``..``; keeps links, which may differ between nodes."""
    return Path(os.path.abspath(path))  # noqa: PTH100
