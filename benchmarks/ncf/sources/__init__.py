"""Where NCF's interactions come from: MovieLens ratings, the files of the NCF paper, or made-up tastes."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from benchmarks.ncf.sources import movielens, paper, tastes
from benchmarks.ncf.sources.interactions import Interactions


def read_source(origin: Optional[Path], name: Optional[str], seed: int) -> Interactions:
    """The interactions of the source at ``origin``; the small set without one. Problem if it cannot be used."""
    if origin is None:
        return tastes.make()
    if origin.is_dir() and paper.find(origin):
        return paper.read(origin, name)
    return movielens.read(origin, name, seed)
