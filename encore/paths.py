"""Where things are: the project, the user's cache (XDG), data and results."""

import os
from pathlib import Path

# Root of the checkout: benchmarks/, containers/ and requirements/ lie below it.
ROOT = Path(__file__).resolve().parent.parent

BENCHMARKS = ROOT / "benchmarks"
REQUIREMENTS = ROOT / "requirements"


def benchmark_folder(name: str) -> Path:
    return BENCHMARKS / name.replace("-", "_")


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")) / "encore"


def default_data(benchmark: str) -> Path:
    return ROOT / "data" / benchmark


def default_results() -> Path:
    return ROOT / "results"
