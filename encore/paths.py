"""Where things are: the project, the user's cache (XDG), data and results."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""Root of the checkout: benchmarks/, containers/ and requirements/ lie below it."""

BENCHMARKS = ROOT / "benchmarks"
REQUIREMENTS = ROOT / "requirements"


def benchmark_folder(name: str) -> Path:
    """Return the folder of a benchmark, a Python package: its name with ``_`` for each ``-``."""
    return BENCHMARKS / name.replace("-", "_")


def cache_folder() -> Path:
    """Return the folder of what can be made again: ``$XDG_CACHE_HOME/encore``, else ``~/.cache/encore``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "encore"


def default_data(benchmark: str) -> Path:
    """Return where a benchmark's data set is looked for when ``--data`` is not given."""
    return ROOT / "data" / benchmark


def default_results() -> Path:
    """Return where run folders are made when ``--results`` is not given."""
    return ROOT / "results"
